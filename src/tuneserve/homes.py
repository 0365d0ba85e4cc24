"""What tells one TUNESERVE_HOME from another: several hosts may have one of the same path, one may
be moved, and a copy is another than its original.

`HOME/home-id` holds the identity, and where the file was when it was written: host, folder, inode.
A copied file has another inode than it says, or its original is still there.
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

_NOTE = "home-id"


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
        return "" if _origin(folder) else _read(folder)[0]
    except OSError:
        return ""


def _settle(folder: Path) -> None:
    """Make, or make anew, what is not there or not true any more."""
    try:
        id, *place = _read(folder)
        inode = str((folder / _NOTE).stat().st_ino)
    except FileNotFoundError:
        id, place, inode = "", [], ""
    if origin := _origin(folder) if id else "":
        log.warning(
            "%s is a copy of %s, or was moved from there to another disk: it has an identity of "
            "its own now, so that `tuneserve gc` keeps what either of them needs",
            folder,
            origin,
        )
        id = ""
    if id and place[1:] == [str(folder), inode]:  # hosts of one volume may be many
        return
    provisional = folder / f".{_NOTE}.{os.getpid()}"
    with provisional.open("w", encoding="utf-8") as stream:
        new = [id or uuid.uuid4().hex, socket.gethostname(), str(folder)]
        stream.write("\n".join([*new, str(os.fstat(stream.fileno()).st_ino)]))
    provisional.replace(folder / _NOTE)


def _origin(folder: Path) -> str:
    """What the home is a copy of; empty where it is none."""
    id, host, path, inode = _read(folder)
    here = (folder / _NOTE).stat()
    if not path or (host, path) == (socket.gethostname(), str(folder)):
        return ""  # perhaps restored in its place
    if str(here.st_ino) != inode:
        return f"{path} on {host}"
    with contextlib.suppress(OSError):  # a snapshot keeps its inodes
        there = Path(path)
        if _read(there)[0] == id and not os.path.samestat((there / _NOTE).stat(), here):
            return path
    return ""


def _read(folder: Path) -> list[str]:
    """Identity, host, folder and inode; the last three empty where they were not written."""
    lines = (folder / _NOTE).read_text(encoding="utf-8").splitlines()
    return (lines + [""] * 4)[:4]


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
