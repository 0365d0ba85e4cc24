"""Room on the disk: asked for before a merge writes, and given back when it ran out."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tuneserve.errors import DiskFull
from tuneserve.merge.journal import Journal
from tuneserve.progress import human_bytes

# Room asked for beside the weights: journal, proof, index and the file system's own blocks.
SPARE_BYTES = 8 * 2**20

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin what cannot be finished; provisional files of an attempt before make room.

    Raises:
        DiskFull: The file system of `folder` has less than `needed_bytes` free.
    """
    parts = sum(p.stat().st_blocks * 512 for p in folder.glob(".*.part"))
    free = _free_bytes(folder) + parts
    if free < needed_bytes:
        raise DiskFull(
            f"{folder}: {human_bytes(needed_bytes)} ({needed_bytes} bytes) needed, "
            f"{human_bytes(free)} free",
            expected="room for the whole output",
            hint="make room or choose another disk, then run the same command again",
            details={"needed_bytes": needed_bytes, "free_bytes": free},
        )


@contextlib.contextmanager
def owned(folder: Path, key: str, needed_bytes: int, names: tuple[str, ...]) -> Iterator[Journal]:
    """The folder for the merge `key`, with its journal; a disk that fills up on the way gets back
    what was written: the journal alone stays.

    Args:
        folder: Where the merge writes.
        key: Which merge it is.
        needed_bytes: What the whole result takes.
        names: Of the files that it writes, relative to the folder.

    Raises:
        DiskFull: There is no room left, wherever that was found.
        OutputExists: The folder is not free.
    """
    with (
        full_disk_said(folder, needed_bytes),
        contextlib.closing(Journal.open(folder, key)) as journal,
    ):
        try:
            yield journal
        except OSError as error:
            if error.errno in _FULL:
                journal.discard_all(names)
            raise


@contextlib.contextmanager
def full_disk_said(folder: Path, needed_bytes: int) -> Iterator[None]:
    """The operating system's error as the one that says how much is needed and how much is free.

    Raises:
        DiskFull: In its place.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = _free_bytes(next(p for p in (folder, *folder.absolute().parents) if p.exists()))
        what = f" for {Path(error.filename).name}" if isinstance(error.filename, str) else ""
        raise DiskFull(
            f"{folder}: no room left{what} ({error.strerror}); {human_bytes(needed_bytes)} "
            f"({needed_bytes} bytes) needed in all",
            expected="room for the whole output",
            hint=f"{human_bytes(free)} are free; make room, run again",
            details={"needed_bytes": needed_bytes, "free_bytes": free},
        ) from error


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
