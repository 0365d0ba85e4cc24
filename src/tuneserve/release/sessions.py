"""Sessions of processes: who belongs to one, its end, and a record by which it is found again.

A record outlives the processes that wrote it, and numbers of processes are given out again: it also
names the boot and the start of the session's leader. What a process shows of itself is no help:
vLLM's engine and workers write their title over their command line and their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PARENT, _SESSION, _START = 1, 3, 19  # places in what `_stat` gives; proc(5) counts two more
_GONE = (b"Z", b"X")


def process_start(pid: int) -> int | None:
    """When a process started, in ticks since boot (proc(5), field 22); None when there is none."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in _GONE else int(fields[_START])


def session_members(session: int) -> list[int]:
    """Live processes of a session; zombies do not count."""
    return list(_live(_SESSION, session))


def end_session(session: int, *, patience_seconds: float = 10.0) -> None:
    """Kill every process of a session and wait until none is left."""
    deadline = time.monotonic() + patience_seconds
    while members := session_members(session):
        _kill(members)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def end_children(*, but: int, patience_seconds: float = 10.0) -> None:
    """Kill our own children, except one, and wait until none is left.

    For a subreaper (PR_SET_CHILD_SUBREAPER, prctl(2)): the children of each that ends become ours,
    so it reaches descendants in sessions of their own too.
    """
    deadline = time.monotonic() + patience_seconds
    while children := [pid for pid in _live(_PARENT, os.getpid()) if pid != but]:
        _kill(children)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def record_session(path: Path, leader: int) -> None:
    """Write down the session of a child of ours that leads it, so that a later command can end it
    when all keepers are gone."""
    fields = _stat(leader)
    assert fields is not None, "a child is there until we have waited for it"
    provisional = path.with_name(f".{path.name}.{os.getpid()}")
    text = f"{leader} {int(fields[_START])} {_boot()}\n"
    provisional.write_text(text, encoding="ascii")
    provisional.replace(path)


def recorded_session(path: Path, folder: Path) -> int | None:
    """The session that a record names; None when it has ended, or its number is another's by now.

    The kernel gives a session's number to nobody else while it has members. So it is ours when its
    leader started at the recorded time. When the leader is gone it may also be a daemon's, whose
    first process always ends: then the members must have the working directory of ours. Records of
    the first version are a number alone.

    Args:
        path: What `record_session` wrote.
        folder: The working directory that the leader was started in.
    """
    try:
        number, *rest = path.read_text("ascii").split()
        session = int(number)
        if rest:
            start, boot = rest
            if boot != _boot():
                return None
            leader = process_start(session)
            if leader is not None:
                return session if leader == int(start) else None
    except (OSError, ValueError):
        return None
    return session if any(_works_in(pid, folder) for pid in session_members(session)) else None


def runs_with(pid: int, variable: str) -> bool:
    """Whether another process was started with ``NAME=value`` in its environment."""
    if pid == os.getpid():
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return variable.encode() in environment.split(b"\0")


def pss_bytes(pid: int) -> int:
    """Proportional resident memory of a process: shared pages are counted once."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def namespaces() -> str:
    """Our PID and network namespaces (namespaces(7)); empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return "\n".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return ""


def _boot() -> str:
    """This boot's id; a dash where the system does not tell, as in some sandboxes."""
    try:
        return _BOOT_ID.read_text("ascii").strip() or "-"
    except OSError:
        return "-"


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").samefile(folder)
    except OSError:
        return False


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _live(field: int, value: int) -> Iterator[int]:
    """Live processes with this value in a field."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            if int(fields[field]) == value and fields[0] not in _GONE:
                yield int(entry)


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in brackets may itself hold brackets and spaces.
    return text[text.rindex(b")") + 2 :].split()
