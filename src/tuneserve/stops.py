"""Which attempts at a stage were told to end, or died of their own fault: none for want of memory.

A process that the kernel kills for want of memory leaves no word, so the next attempt concludes it
from how far that one had noted to be. A stop ends the same way when the process is deep in a long
computation: it hears nothing, and is killed after a while. So whoever ends an attempt notes it here
before the first signal; what an attempt noted of itself never has to come first.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

_ATTEMPT_VARIABLE = "TUNESERVE_ATTEMPT"
_WORK_VARIABLE = "TUNESERVE_WORK"
_FILE = "stopped"


def new_attempt(work: Path) -> dict[str, str]:
    """Variables that name an attempt, and its work folder, to the process that makes it."""
    return {_ATTEMPT_VARIABLE: uuid.uuid4().hex, _WORK_VARIABLE: str(work)}


def this_attempt() -> str:
    """The name of the attempt that this process is part of; empty outside of one."""
    return os.environ.get(_ATTEMPT_VARIABLE, "")


def note_stop(attempt: Mapping[str, str] | None = None) -> None:
    """Note that the attempt (this process's own by default) is ended for no want of memory.

    An attempt that has left nothing in its work folder leaves nothing to conclude from either, so
    nothing is noted. Never fails: a full disk must not keep a stop from going on.
    """
    known: Mapping[str, str] = os.environ if attempt is None else attempt
    name, work = known.get(_ATTEMPT_VARIABLE), known.get(_WORK_VARIABLE)
    with contextlib.suppress(OSError):
        if name and work and any(Path(work).iterdir()):
            with (Path(work) / _FILE).open("a", encoding="ascii") as stream:
                stream.write(f"{name}\n")


def was_stopped(work: Path, attempt: str) -> bool:
    """Whether `note_stop` was called for this attempt."""
    try:
        return attempt in (work / _FILE).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False
