"""What is wrong with a section, in the words of the run file: where, what was found, what the
field takes, and what was probably meant.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tuneserve.allowed import allowed_of, allowed_values, section_of
from tuneserve.credentials import NO_VARIABLE, REFUSED
from tuneserve.errors import RunFileError
from tuneserve.section import NOT_A_NUMBER, Section, entry_of, field_paths
from tuneserve.yamltext import Loc, Position, position_of, written_of

# By pydantic's type of error; what each of our own validators says is whole.
SENTENCES = {
    **dict.fromkeys(("greater_than", "greater_than_equal"), "{found} is too small"),
    **dict.fromkeys(("less_than", "less_than_equal", "int_parsing_size"), "{found} is too large"),
    **dict.fromkeys(
        ("int_type", "float_type", "string_type", "bool_type", "list_type", NOT_A_NUMBER),
        "found {found}",
    ),
    **dict.fromkeys(("int_parsing", "float_parsing"), "{found} is no number"),
    "model_type": "found {found}",
    "bool_parsing": "{found} is neither",
    "int_from_float": "{found} is not whole",
    "finite_number": "{found} is not finite",
    "literal_error": "{found} is none of them",
    "string_pattern_mismatch": "{found} is no such name",
    "string_unicode": "{found} holds half of a UTF-16 pair",
    "string_too_short": "is empty",
    "too_short": "is empty",
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
    "invalid_key": "{found} is no name of a field, which are text",
}
_WHOLE = ("missing", "extra_forbidden", "invalid_key")
_OWN = ("value_error", REFUSED, NO_VARIABLE)
_KINDS = {"dict": "a mapping", "tuple": "a list", "bytes": "binary data"}
_MOST_NAMES = 6
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = 60


def run_file_error(
    error: ValidationError, source: str, kind: type[Section], places: dict[Loc, Position]
) -> RunFileError:
    """All that is wrong, each field once.

    Args:
        error: What pydantic found.
        source: What messages call the file or the command.
        kind: The section that was checked.
        places: Where the fields are, if that is known.
    """
    problems, fields = [], []
    for loc, field, item in _each_field(error, kind):
        place = position_of(places, loc)
        where = f"{source}:{place[0]}:{place[1]}: " if place else ""
        fields.append(_path(loc))
        problems.append(f"{where}{fields[-1]}: {_problem(item, loc, field, kind)}")
    count = "1 field is wrong" if len(problems) == 1 else f"{len(problems)} fields are wrong"
    return RunFileError(
        f"{source}: {count}\n  " + "\n  ".join(problems),
        expected="fields and values as docs/run-file.md has them",
        hint="mend the fields named; docs/run-file.md describes all of them",
        details={"fields": fields},
    )


def _each_field(
    error: ValidationError, kind: type[Section]
) -> Iterator[tuple[Loc, FieldInfo | Any, Any]]:
    """Each wrong field once: of one that takes values of several kinds, pydantic has an error for
    each of them, and one for a list's entry beside one for the list.
    """
    found: dict[Loc, tuple[Any, Any]] = {}
    several: set[Loc] = set()
    for item in error.errors():
        loc, takes = _place(item["loc"], kind)
        found.setdefault(loc, (takes, item))
        if loc != item["loc"]:
            several.add(loc)
    for loc, (takes, item) in found.items():
        inside = any(other[: len(loc)] == loc and other != loc for other in found)
        if not (loc in several and inside):
            yield loc, takes, item


def _place(loc: Loc, kind: type[Section]) -> tuple[Loc, FieldInfo | Any]:
    """The field's path without pydantic's names for the kinds of value that it may have, and the
    field, or the annotation of a list's entries.
    """
    kept: list[int | str] = []
    here: FieldInfo | Any = kind
    for part in loc:
        annotation = here.annotation if isinstance(here, FieldInfo) else here
        if section := section_of(annotation):
            here = section.model_fields.get(str(part))
        elif isinstance(part, int):
            here = entry_of(annotation)
        else:
            continue
        kept.append(part)
    return tuple(kept), here


def _path(loc: Loc) -> str:
    return ".".join(str(part) for part in loc) or "(top)"


def in_words(item: Any) -> str:
    """What was found, of one of pydantic's errors."""
    if item["type"] in _OWN:  # it names what was found, where that is no secret
        return str(item["msg"]).removeprefix("Value error, ")
    sentence = SENTENCES.get(item["type"], "{found} is not allowed")
    return sentence.format(found=_found(item["input"]))


def _problem(item: Any, loc: Loc, field: FieldInfo | Any, kind: type[Section]) -> str:
    sentence = in_words(item)
    if item["type"] in _OWN:
        return sentence
    if item["type"] == "extra_forbidden":
        meant = _meant(loc, kind)
        if meant == _path(loc):  # "data.train: x"
            outer, _, inner = str(loc[-1]).rpartition(".")
            return f"{sentence} of one name with dots; write {inner} below {outer}"
        return sentence + (f"; did you mean {meant}?" if meant else "")
    if item["type"] in _WHOLE:
        return sentence
    advice = _advice(item["type"], item["input"], item.get("ctx") or {})
    return f"{sentence}; expected {_expected(field)}" + (f"; {advice}" if advice else "")


def _found(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if (written := written_of(value)) is not None:
        return _repr.repr(written)[1:-1]
    if isinstance(value, (str, int, float)):
        return _repr.repr(value)
    return _KINDS.get(type(value).__name__, f"a {type(value).__name__}")


def _expected(field: FieldInfo | Any) -> str:
    section = section_of(field.annotation if isinstance(field, FieldInfo) else field)
    if section is not None:
        names = list(section.model_fields)
        more = ", ..." if len(names) > _MOST_NAMES else ""
        return f"fields below it: {', '.join(names[:_MOST_NAMES])}{more}"
    words = allowed_values(field) if isinstance(field, FieldInfo) else allowed_of(field)
    return f"a {words}" if words.startswith(("whole", "number", "list", "size")) else words


def _advice(type_: str, value: Any, context: dict[str, Any]) -> str:
    """What was probably meant; empty where nothing is known."""
    if value is None:
        return "write it, or take the line out"
    if isinstance(value, bool) and type_ != "model_type":
        return "true and false are no words in YAML: put a word in quotes"
    if type_ == "string_type" and isinstance(value, (int, float)):
        return "put it in quotes"
    if not isinstance(value, str):
        return ""
    if type_ == "list_type":
        return f"write [{_repr.repr(value)}]"
    if type_ in ("int_parsing", "float_parsing"):
        return _number(value)
    if type_ == "literal_error":
        near = difflib.get_close_matches(value, re.findall(r"'([^']+)'", context["expected"]), n=1)
        return f"did you mean {near[0]}?" if near else ""
    if type_ == "string_pattern_mismatch":
        name = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:32].rstrip("-")
        return f"for example {name}" if name else ""
    return ""


def _number(text: str) -> str:
    if share := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text):
        return f"write {float(share.group(1)) / 100:g}"
    if comma := re.fullmatch(r"\s*(\d+),(\d+)\s*", text):
        return f"write {comma.group(1)}.{comma.group(2)}, or the digits alone"
    if re.fullmatch(r"\s*\d+(:\d+)+\s*", text):
        return "write one number, without colons; times are in seconds"
    return ""


def _meant(loc: Loc, kind: type[Section]) -> str:
    """The field that was meant: one of the same section that is written nearly so, or the only one
    of that name in another; empty where nothing is near.
    """
    fields = list(field_paths(kind))
    if (whole := _path(loc)) in fields:
        return whole
    *around, name = loc
    here = _place(tuple(around), kind)[1]
    section = section_of(here.annotation if isinstance(here, FieldInfo) else here)
    near = difflib.get_close_matches(str(name), section.model_fields if section else [], n=1)
    if near:
        return _path((*around, near[0]))
    elsewhere = [path for path in fields if path.rpartition(".")[2] == name]
    return elsewhere[0] if len(elsewhere) == 1 else ""
