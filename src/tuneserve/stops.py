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
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def new_attempt(work: Path) -> dict[str, str]:
    """Variables that name an attempt, and its work folder, to the process that makes it."""
    return {_ATTEMPT_VARIABLE: uuid.uuid4().hex, _WORK_VARIABLE: str(work)}


def this_attempt() -> str:
    """The name of the attempt that this process is part of; empty outside of one."""
    return name_of(os.environ)


def name_of(attempt: Mapping[str, str]) -> str:
    """The name of an attempt that `new_attempt` gave; empty outside of one."""
    return attempt.get(_ATTEMPT_VARIABLE, "")


def note_stop(attempt: Mapping[str, str] | None = None) -> None:
    """Note that the attempt (this process's own by default) is ended for no want of memory.

    An attempt that has left nothing in its work folder leaves nothing to conclude from either, so
    nothing is noted. Never fails: a full disk must not keep a stop from going on.
    """
    _note(os.environ if attempt is None else attempt, _FILE)


def note_memory(attempt: Mapping[str, str]) -> bool:
    """Note that the kernel killed the attempt, or a process of it, for want of memory.

    Returns:
        Whether it was noted: there is nothing to conclude where the attempt had left nothing yet.
    """
    return _note(attempt, _MEMORY_FILE)


def _note(known: Mapping[str, str], file: str) -> bool:
    name, work = known.get(_ATTEMPT_VARIABLE), known.get(_WORK_VARIABLE)
    with contextlib.suppress(OSError):
        if name and work and any(Path(work).iterdir()):
            with (Path(work) / file).open("a", encoding="ascii") as stream:
                stream.write(f"{name}\n")
            return True
    return False


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
    """How many processes the kernel has killed for want of memory since it started: of our control
    group, whichever limit was reached; of the machine where no group counts them.

    0 where nothing does (Linux before 4.13). A container's `/proc/vmstat` counts its neighbours'.
    """
    for counted in (*_group_counts(), _PROC / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in counted.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _group_counts() -> list[Path]:
    """Where our control group's kills are counted, or those of a group around it (v1 and v2)."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found: list[Path] = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        name = "memory.oom_control" if controllers else "memory.events"
        place = root / path.lstrip("/")
        # Inside a container the path may be the host's; the files then lie at the root.
        found += [
            folder / name for folder in (place, *place.parents) if folder.is_relative_to(root)
        ]
    return found
