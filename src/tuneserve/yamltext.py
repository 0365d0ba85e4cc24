"""YAML as run files have it: nothing is resolved silently, and every field has its place.

Plain values are read by YAML 1.2's core schema (section 10.3), not by YAML 1.1 as PyYAML does,
where ``22:22`` is 1342, ``012`` is 10, ``no`` is false and ``1e-4`` is text. A number remembers how
it was written.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tuneserve.errors import RunFileError

Loc = tuple[int | str, ...]
Position = tuple[int, int]  # line and column, from 1

# What to do about what the parser says, by a part of its words.
_HINTS = {
    "'\\t'": "indent with spaces, not tabs",
    "expected <block end>": "indent it by as many spaces as the fields beside it",
    "expected ',' or": "close the bracket",
    "mapping values are not allowed": "put text that holds a colon and a space in quotes; a field "
    "is indented by as many spaces as those beside it",
    "cannot start any token": "put text that begins with this character in quotes",
    "unknown escape": "use single quotes: in double quotes a backslash begins an escape",
    "occurs twice": "keep one of the two",
    "another document": "one file holds one run: remove the line --- and what follows it",
    "the tag": "write the value without a tag (the word behind the exclamation mark)",
    "undefined alias": "put text that begins with * in quotes",
    "cannot name a field": "docs/run-file.md has the names of the fields",
}
# Of text, and of `<<`, by which a mapping takes over another's fields.
_TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
_DEEPEST = "more levels of nesting than any run file has"
_CORE = {
    "bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
    "int": ("-+0123456789", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": (
        "-+.0123456789",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
    "null": (("~", "n", "N", ""), r"~|null|Null|NULL|"),
    "merge": ("<", r"<<"),
}


class WrittenInt(int):
    """A whole number of a YAML text; `written` is what stands there."""

    written = ""


class WrittenFloat(float):
    """A number of a YAML text; `written` is what stands there."""

    written = ""


def written_of(value: Any) -> str | None:
    """The text of a number as it stands in the file; None of other values."""
    return value.written if isinstance(value, (WrittenInt, WrittenFloat)) else None


def read_yaml(text: str, source: str) -> Any:
    """What a YAML text holds.

    Args:
        text: The text.
        source: What error messages call it.

    Raises:
        RunFileError: It is not YAML, repeats a key, or holds a value that is none, with
            line and column.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RunFileError(
            f"{source}:{line}: the character U+{_code(error.character):04X} is none of YAML's",
            expected="text without control characters",
            hint="remove it, or save the file as UTF-8 text",
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        problem = str(getattr(error, "problem", None) or error)
        opened = getattr(error, "context_mark", None)
        if problem.startswith("expected ',' or") and opened:
            problem += f", in the bracket of line {opened.line + 1}"
        hints = (hint for part, hint in _HINTS.items() if part in problem)
        raise RunFileError(
            f"{where}: {problem}",
            expected="valid YAML",
            hint=next(hints, "mend the line named"),
        ) from error
    except RecursionError:
        raise RunFileError(
            f"{source}: holds {_DEEPEST}", expected="valid YAML", hint="count the brackets"
        ) from None


def _code(character: str | int) -> int:
    return character if isinstance(character, int) else ord(character)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, which YAML readers otherwise resolve silently to
    the last, leaves dates the text they are, and says where a value is that it cannot read.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # as PyYAML lets it out
            kind = node.tag.rpartition(":")[2]
            shown = str(node.value)[:40] if isinstance(node, yaml.ScalarNode) else "this"
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown!r} is no {kind} that can be read", node.start_mark
            ) from error


def _strict_mapping(
    loader: _StrictLoader, node: yaml.MappingNode, deep: bool = False
) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            problem = f"a {key.id} cannot name a field"
        elif key.tag not in _TEXT_TAGS:
            kind = key.tag.rpartition(":")[2]
            problem = (
                f"the key {key.value!r} is no text in YAML but {kind}, and cannot name a field"
            )
        elif key.value in seen:
            problem = f"the key {key.value!r} occurs twice"
        else:
            seen.add(key.value)
            continue
        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _whole(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    number = WrittenInt(text, 0 if text[:2] in ("0o", "0x") else 10)
    number.written = text
    return number


def _number(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node)
    number = WrittenFloat(re.sub(r"\.(?=[iInN])", "", text))  # .inf
    number.written = text
    return number


for _kind, (_first, _pattern) in _CORE.items():
    _StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _whole)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _number)
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _strict_mapping)


def positions_of(text: str) -> dict[Loc, Position]:
    """Where the fields and list entries of a YAML text are. What an alias repeats has the first
    place alone.
    """
    found: dict[Loc, Position] = {}
    walked: set[yaml.Node] = set()

    def walk(node: yaml.Node | None, loc: Loc) -> None:
        if node is None or node in walked:
            return
        walked.add(node)
        inside: list[tuple[int | str, yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            inside = [(key.value, key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inside = [(index, entry, entry) for index, entry in enumerate(node.value)]
        for name, place, value in inside:
            found[(*loc, name)] = place.start_mark.line + 1, place.start_mark.column + 1
            walk(value, (*loc, name))

    walk(yaml.compose(text, Loader=_StrictLoader), ())
    return found


def position_of(places: dict[Loc, Position], loc: Loc) -> Position | None:
    """Where a field is; where the section around it is, if the field itself is not written."""
    ways = (places.get(loc[:end]) for end in range(len(loc), 0, -1))
    return next((place for place in ways if place), None)
