"""What a run file names on this machine, looked for before others are waited for and before
anything is made. What is remote is left to the stage that reads it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tuneserve.checkpoint.base import BUILTIN, is_folder
from tuneserve.checkpoint.basecheck import read_config
from tuneserve.config import RunFile
from tuneserve.data.files import check_local
from tuneserve.errors import InputError, ModelError, RunFileError, TuneserveError
from tuneserve.release.gateway import caddy_binary

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_named(run: RunFile) -> None:
    """Refuse a run whose base, chat template, interpreters or data files are not here.

    Raises:
        ModelError: The base is neither a model's folder nor anything that a hub could have, or the
            chat template cannot be read.
        RunFileError: An interpreter is missing, or several things are.
        DataError: A local data path matches nothing.
    """
    errors = [*_errors(run)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise RunFileError(
            "\n  ".join(error.message for error in errors),
            expected="; ".join(dict.fromkeys(error.expected for error in errors)),
            hint="; ".join(dict.fromkeys(error.hint for error in errors)),
        )


def check_tools(run: RunFile) -> None:
    """Refuse a run whose last stages lack what they run on: hours later is too late.

    Raises:
        InputError: An interpreter has no vLLM or, for an export, no GPTQModel.
        ServerError: There is no Caddy.
    """
    wanted = [("serve", "vllm", "vLLM")]
    if any(method != "none" for method in run.quantize.methods):
        wanted.append(("quantize", "gptqmodel", "GPTQModel"))
    lost = []
    for stage, module, name in wanted:
        python = getattr(run.engines, stage).python
        if not _has(python or sys.executable, module):
            who = f"{run.where(f'engines.{stage}.python')}: {python}" if python else sys.executable
            lost.append(f"{who} has no {name}, which {stage} needs")
    if lost:
        raise InputError(
            "\n  ".join(lost),
            expected="interpreters that have what their stages run",
            hint="install it there (`make venv`, with ACCEL=cuda for a GPU), or name the "
            "interpreter that has it in engines",
        )
    caddy_binary()


def _has(python: str, module: str) -> bool:
    """Whether the interpreter finds the module; it is not imported, which takes seconds.

    One that is installed for development may have a finder of its own, so all are asked; not
    `sys.modules`, where a process that trains has None for what it must not import.
    """
    if python == sys.executable:
        return any(finder.find_spec(module, None) for finder in sys.meta_path)
    code = f"from importlib.util import find_spec; print(find_spec({module!r}))"
    try:
        asked = [python, "-c", code]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return True  # what is wrong with it is said by who starts it
    return done.returncode != 0 or done.stdout.strip() != "None"


def _errors(run: RunFile) -> Iterator[TuneserveError]:
    for check in (check_base_place, _check_template, _check_interpreters, _check_data):
        try:
            check(run)
        except TuneserveError as error:
            yield error


def check_base_place(run: RunFile) -> None:
    """Refuse a base that is no folder with a model here, and can be none of a hub either.

    Raises:
        ModelError: It says what it is instead.
    """
    base, where = run.model.base, run.where("model.base")
    if base.startswith("builtin:"):
        if base != BUILTIN:
            raise ModelError(
                f"{where}: there is no {base}", expected=BUILTIN, hint="mend model.base"
            )
    elif is_folder(base):
        try:
            read_config(Path(base))
        except ModelError as error:
            error.message = f"{where}: {error.message}"
            raise
    elif Path(base).is_file() or not _HUB_ID.fullmatch(base):
        kind = "a file" if Path(base).is_file() else "neither a folder here nor a hub id"
        raise ModelError(
            f"{where}: {base} is {kind}",
            expected=f"org/name of a hub, a directory with a model, or {BUILTIN}",
            hint="mend model.base; a path in it is taken from the run file's folder",
        )


def _check_template(run: RunFile) -> None:
    template, where = run.model.chat_template, run.where("model.chat_template")
    if not template:
        return
    try:
        Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            found = "there is no such file"
        else:
            found = f"cannot be read ({getattr(error, 'strerror', None) or 'it is not UTF-8'})"
        raise ModelError(
            f"{where}: {template}: {found}",
            expected="a Jinja file in UTF-8",
            hint="mend model.chat_template, or take it out to use the tokenizer's own",
        ) from error


def _check_interpreters(run: RunFile) -> None:
    lost = [
        f"{run.where(f'engines.{name}.python')}: {engine.python}: there is no such program"
        for name, engine in run.engines
        if engine.python and not shutil.which(engine.python)
    ]
    if lost:
        raise RunFileError(
            "\n  ".join(lost),
            expected="a Python interpreter, such as .venv/bin/python",
            hint="mend engines, or take the field out to use the interpreter that runs now",
        )


def _check_data(run: RunFile) -> None:
    places = {
        path: run.where(f"data.{field}.{at}")
        for field in ("train", "eval")
        for at, path in enumerate(getattr(run.data, field))
    }
    check_local(places)
