"""How attempts at a stage ended that left no word: by a stop, or for want of memory.

A process that the kernel kills for want of memory leaves no word, so the next attempt concludes it
from how far that one had noted to be. A stop ends the same way when the process is deep in a long
computation: it hears nothing, and is killed after a while. So whoever ends an attempt notes it here
before the first signal; what an attempt noted of itself never has to come first. Where the kernel
has counted that it killed for memory meanwhile, that is noted too, and nothing has to be concluded.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

_ATTEMPT_VARIABLE = "TUNESERVE_ATTEMPT"
_WORK_VARIABLE = "TUNESERVE_WORK"
_FILE, _MEMORY_FILE = "stopped", "out_of_memory"
_VMSTAT = Path("/proc/vmstat")


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
    _note(os.environ if attempt is None else attempt, _FILE)


def note_memory(attempt: Mapping[str, str]) -> None:
    """Note that the kernel killed the attempt, or a process of it, for want of memory."""
    _note(attempt, _MEMORY_FILE)


def _note(known: Mapping[str, str], file: str) -> None:
    name, work = known.get(_ATTEMPT_VARIABLE), known.get(_WORK_VARIABLE)
    with contextlib.suppress(OSError):
        if name and work and any(Path(work).iterdir()):
            with (Path(work) / file).open("a", encoding="ascii") as stream:
                stream.write(f"{name}\n")


def was_stopped(work: Path, attempt: str) -> bool:
    """Whether `note_stop` was called for this attempt."""
    return _is_noted(work, attempt, _FILE)


def ran_out_of_memory(work: Path, attempt: str) -> bool:
    """Whether `note_memory` was called for this attempt."""
    return _is_noted(work, attempt, _MEMORY_FILE)


def _is_noted(work: Path, attempt: str, file: str) -> bool:
    try:
        return attempt in (work / file).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False


def kernel_kills() -> int:
    """How many processes the kernel has killed for want of memory, of the machine or of a control
    group, since it started; 0 where it does not count them (Linux before 4.13).
    """
    try:
        lines = _VMSTAT.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration):
        return 0
