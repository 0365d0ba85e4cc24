"""Reading a run file: every wrong field is reported at once, with its path.

Relative paths in a run file are taken from its own folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.section import Section, Written
from tuneserve.wrongfields import run_file_error
from tuneserve.yamltext import positions_of, read_yaml

AnySection = TypeVar("AnySection", bound=Section)


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
    data = read_yaml(text, str(path))
    if not isinstance(data, dict):
        raise RunFileError(
            f"{path}: is empty"
            if data is None
            else f"{path}: holds a {'list' if isinstance(data, list) else 'single value'}",
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
        text: The YAML that it was read from: errors then say line and column.

    Raises:
        RunFileError: Lists every wrong field with its path.
    """
    places = positions_of(text) if text else {}
    try:
        run = RunFile.model_validate(data)
    except ValidationError as error:
        raise run_file_error(error, source, RunFile, places) from None
    run._written = Written(source, {".".join(map(str, loc)): at for loc, at in places.items()})
    return run if folder is None else _absolute(run, folder)


def make_section(kind: type[AnySection], source: str, **values: Any) -> AnySection:
    """A section from single values, as a command's options give them.

    Raises:
        RunFileError: Lists every wrong value.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        raise run_file_error(error, source, kind, {}) from None


def _absolute(run: RunFile, folder: Path) -> RunFile:
    def place(path: str) -> str:
        return path if "://" in path else str(folder / Path(path).expanduser())

    engines = {
        name: engine.model_copy(update={"python": engine.python and place(engine.python)})
        for name, engine in run.engines
    }

    base = os.path.expanduser(run.model.base)
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
