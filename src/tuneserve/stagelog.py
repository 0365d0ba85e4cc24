"""What a stage says, kept in a file beside being shown, so that `tuneserve logs` can follow it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tuneserve.errors import InputError
from tuneserve.places import home

_MOST_BYTES = 20 * 2**20


def stage_logs() -> Path:
    """Where the logs of stages are: RUN.STAGE.log, and RUN.STAGE.log.1 of the time before."""
    return home() / "logs"


def latest_log(stage: str) -> Path:
    """The log of the last run of a stage.

    Raises:
        InputError: It never ran here.
    """
    found = sorted(stage_logs().glob(f"*.{stage}.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(
            f"the stage {stage} has no log in {stage_logs()}",
            expected="a stage that ran with this TUNESERVE_HOME",
            hint=_other_logs(),
        )
    return found[-1]


def logged_stages() -> list[str]:
    """Stages that said something here, the one that ran last at the end."""
    logs = [path for path in stage_logs().glob("*.*.log") if path.stat().st_size]
    logs.sort(key=lambda path: path.stat().st_mtime)
    return list(dict.fromkeys(path.name.split(".")[-2] for path in reversed(logs)))[::-1]


def _other_logs() -> str:
    hint = "a stage whose result is re-used does not run and writes no log"
    if stages := logged_stages():
        hint += f"; there are logs of {', '.join(stages)}: `tuneserve logs {stages[-1]}`"
    return hint


@contextlib.contextmanager
def kept_log(
    run: str, stage: str, show: Callable[[str], None] | None
) -> Iterator[Callable[[str], None]]:
    """A receiver of log lines that writes each to the stage's log and shows it.

    A full disk or a reader that has gone (a closed terminal, `| head`) ends the one or the other,
    never the stage.

    Args:
        run: Name of the run.
        stage: The stage.
        show: Gets each line; None: our own stderr.
    """
    path = stage_logs() / f"{run}.{stage}.log"
    show = show or to_stderr
    kept, heard, left = _opened(path), True, _MOST_BYTES

    def write(line: str) -> None:
        nonlocal kept, heard, left
        left -= len(line)
        if kept and left > 0:
            try:
                kept.write(f"{time.strftime('%H:%M:%S')} {line}\n".encode())
            except OSError:
                kept = None
        try:
            if heard:
                show(line)
        except (OSError, ValueError):
            heard = False

    try:
        yield write
    finally:
        if kept:
            kept.close()


def _opened(path: Path) -> io.FileIO | None:
    """The log, empty, its predecessor beside it; None where it cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.is_file():
            path.replace(path.with_suffix(".log.1"))
        return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")
    return None


def to_stderr(line: str) -> None:
    """Show a line where a program's log belongs."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
