"""Reading a run file: every wrong field is reported at once, with its path.

Relative paths in a run file are taken from its own folder.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from tuneserve.config import RunFile
from tuneserve.credentials import REFUSED
from tuneserve.errors import RunFileError
from tuneserve.section import Section, field_paths

AnySection = TypeVar("AnySection", bound=Section)
Loc = tuple[int | str, ...]


def load_run_file(path: Path) -> RunFile:
    """Read and check a run file; relative paths in it are taken from the run file's folder.

    Raises:
        RunFileError: The file is missing, not YAML, or one or more fields are wrong (all of them
        are listed).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunFileError(
            f"{path}: cannot be read ({error.strerror})",
            expected="a YAML run file",
            hint="check the path, or write one with `tuneserve init DATA`",
        ) from error
    except UnicodeDecodeError as error:
        raise RunFileError(
            f"{path}: byte {error.start} is not UTF-8",
            expected="UTF-8",
            hint="save the file as UTF-8",
        ) from error
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader that also refuses repeated keys
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise RunFileError(
            f"{where}: {getattr(error, 'problem', None) or error}",
            expected="valid YAML",
            hint="mend the line named",
        ) from error
    if not isinstance(data, dict):
        raise RunFileError(
            f"{path}: is empty" if data is None else f"{path}: holds {type(data).__name__}",
            expected="a mapping with name, model and data",
            hint="`tuneserve init DATA` writes a whole one",
        )
    return parse_run(data, source=str(path), folder=path.resolve().parent, text=text)


def check_run_file(run_file: str) -> dict[str, str]:
    """A deployment's build step: the run file is checked when it is deployed, not at night.

    Raises:
        RunFileError: Lists every wrong field.
    """
    run = load_run_file(Path(run_file))
    return {"run": run.name, "served": run.serve.name}


def parse_run(
    data: dict[str, Any], *, source: str = "run", folder: Path | None = None, text: str = ""
) -> RunFile:
    """Check a run given as a mapping.

    Args:
        data: The mapping, as read from YAML.
        source: What error messages call it.
        folder: Relative paths are made absolute from here; None leaves them as they are.
        text: The YAML that it was read from: errors then say in which line.

    Raises:
        RunFileError: Lists every wrong field with its path.
    """
    try:
        run = RunFile.model_validate(data)
    except ValidationError as error:
        raise _all_problems(error, source, RunFile, _lines(text)) from None
    return run if folder is None else _absolute(run, folder)


def make_section(kind: type[AnySection], source: str, **values: Any) -> AnySection:
    """A section from single values, as a command's options give them.

    Raises:
        RunFileError: Lists every wrong value.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        raise _all_problems(error, source, kind, {}) from None


def _all_problems(
    error: ValidationError, source: str, kind: type[Section], lines: dict[Loc, int]
) -> RunFileError:
    problems = []
    for item in error.errors():
        line = _line(lines, item["loc"])
        where = f"{source}:{line}: " if line else ""
        problems.append(f"{where}{_field_path(item['loc'])}: {_problem(item, kind)}")
    count = "1 field is wrong" if len(problems) == 1 else f"{len(problems)} fields are wrong"
    return RunFileError(
        f"{source}: {count}\n  " + "\n  ".join(problems),
        expected="fields and values as docs/run-file.md has them",
        hint="mend the fields named; docs/run-file.md describes all of them",
        details={"fields": [_field_path(item["loc"]) for item in error.errors()]},
    )


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, which YAML readers otherwise resolve silently to
    the last.
    """


def _strict_mapping(
    loader: _StrictLoader, node: yaml.MappingNode, deep: bool = False
) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key_node.value!r} occurs twice", key_node.start_mark
            )
        if isinstance(key_node.value, str):
            seen.add(key_node.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _strict_mapping)


def _lines(text: str) -> dict[Loc, int]:
    """Lines, from 1, of the fields and list entries of a YAML text. What an alias repeats has that
    of the first place alone.
    """
    found: dict[Loc, int] = {}
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
            found[(*loc, name)] = place.start_mark.line + 1
            walk(value, (*loc, name))

    walk(yaml.compose(text, Loader=_StrictLoader), ())
    return found


def _line(lines: dict[Loc, int], loc: Loc) -> int | None:
    """The line of a field; of the section around it where the field itself is not written."""
    ways = (lines.get(loc[:end]) for end in range(len(loc), 0, -1))
    return next((line for line in ways if line), None)


def _field_path(loc: Loc) -> str:
    return ".".join(str(part) for part in loc) or "(top)"


def _problem(item: Any, kind: type[Section]) -> str:
    if item["type"] == "extra_forbidden":
        meant = _meant(item["loc"], list(field_paths(kind)))
        return "there is no such field" + (f"; did you mean {meant}?" if meant else "")
    if item["type"] == "missing":
        return "is missing"
    if item["type"] == REFUSED:
        return str(item["msg"])  # what was found is a secret
    return f"{item['msg'].removeprefix('Value error, ')} (found {item['input']!r})"


def _meant(loc: Loc, fields: list[str]) -> str:
    """The field that was meant: one of the same section that is written nearly so, or the only one
    of that name in another; empty where nothing is near.
    """
    section, dot, name = _field_path(loc).rpartition(".")
    beside = [path.removeprefix(section + dot) for path in fields if path.startswith(section + dot)]
    near = difflib.get_close_matches(name, [each for each in beside if "." not in each], n=1)
    if near:
        return section + dot + near[0]
    elsewhere = [path for path in fields if path.rpartition(".")[2] == name]
    return elsewhere[0] if len(elsewhere) == 1 else ""


def _absolute(run: RunFile, folder: Path) -> RunFile:
    def place(path: str) -> str:
        return path if "://" in path else str(folder / Path(path).expanduser())

    engines = {
        name: engine.model_copy(update={"python": engine.python and place(engine.python)})
        for name, engine in run.engines
    }

    base = run.model.base
    # A hub id (org/name) looks like a relative path: it is one only when that folder exists.
    if base.startswith(("./", "../")) or (
        not base.startswith("builtin:") and (folder / base).is_dir()
    ):
        base = str((folder / base).resolve())
    template = run.model.chat_template
    return run.model_copy(
        update={
            "model": run.model.model_copy(
                update={"base": base, "chat_template": place(template) if template else None}
            ),
            "data": run.data.model_copy(
                update={
                    "train": [place(p) for p in run.data.train],
                    "eval": [place(p) for p in run.data.eval],
                }
            ),
            "serve": run.serve.model_copy(
                update={
                    field: place(path)
                    for field in ("tls_certificate", "tls_key")
                    if (path := getattr(run.serve, field))
                }
            ),
            "engines": run.engines.model_copy(update=engines),
            "store": run.store.model_copy(
                update={"root": place(run.store.root) if run.store.root else None}
            ),
        }
    )
