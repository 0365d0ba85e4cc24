"""What tells one TUNESERVE_HOME from another: several hosts may have one of the same path, one may
be moved, and a copy is another than its original.

`HOME/home-id` holds the identity, `HOME/home-place` where that file was when it was last looked at:
host, folder, inode, time of its last change. A copied file has another inode and time, or its
original is still there. The inode alone says nothing: some file systems number anew at every mount.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_NOTE, _PLACE = "home-id", "home-place"


def home_id(folder: Path, *, make: bool = False) -> str:
    """The identity; empty where there is none, and of a copy until it has one of its own.

    Args:
        folder: The TUNESERVE_HOME.
        make: Whether to give it one.
    """
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError), _alone(folder):
                _settle(folder)
        return "" if _origin(folder) else written_id(folder)
    except OSError:
        return ""


def written_id(folder: Path) -> str:
    """The identity that stands there, of a copy its original's; empty where there is none."""
    return "".join(_lines(folder / _NOTE)[:1])


def _settle(folder: Path) -> None:
    """Make, or make anew, what is not there or not true any more."""
    id = written_id(folder)
    if id and (origin := _origin(folder)):
        log.warning(
            "%s is a copy of %s, or was moved from there to another disk: it has an identity of "
            "its own now, so that `tuneserve gc` keeps what either of them needs",
            folder,
            origin,
        )
        id = ""
    if not id:
        _write(folder / _NOTE, uuid.uuid4().hex)
    place = [socket.gethostname(), str(folder), *_marks(folder)]
    if _lines(folder / _PLACE)[1:] != place[1:]:  # hosts of one volume may be many
        _write(folder / _PLACE, "\n".join(place))


def _origin(folder: Path) -> str:
    """What the home is a copy of; empty where it is none."""
    host, path, *marks = (_lines(folder / _PLACE) + [""] * 4)[:4]
    if not path or (host, path) == (socket.gethostname(), str(folder)):
        return ""  # perhaps restored in its place
    here = _marks(folder)
    if marks[0] != here[0] and marks[1] != here[1]:
        return f"{path} on {host}"
    with contextlib.suppress(OSError):  # a snapshot keeps both
        there = Path(path, _NOTE).stat()
        same = os.path.samestat(there, (folder / _NOTE).stat())
        if not same and written_id(Path(path)) == written_id(folder):
            return path
    return ""


def _marks(folder: Path) -> list[str]:
    """What a copy of the identity's file has not in common with it: inode, time of change in ns."""
    found = (folder / _NOTE).stat()
    return [str(found.st_ino), str(found.st_ctime_ns)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def _write(path: Path, text: str) -> None:
    provisional = path.with_name(f".{path.name}.{os.getpid()}")
    provisional.write_text(text, encoding="utf-8")
    provisional.replace(path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold off other processes of the same home."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
