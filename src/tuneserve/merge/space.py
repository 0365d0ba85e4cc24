"""Room on the disk: asked for before a merge writes, and given back when it ran out."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Mapping
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
def owned(
    folder: Path, key: str, shards: Mapping[str, int], beside_bytes: int, small: Collection[str]
) -> Iterator[Journal]:
    """The folder for the merge `key`, with its journal; a disk that fills up on the way gets back
    what was not finished.

    Finished shards go too where the folder's own disk has no room for those that are missing. Else
    they stay: what filled up may be another disk, and where no shard is missing, all but the least
    of the work is done.

    Args:
        folder: Where the merge writes.
        key: Which merge it is.
        shards: Bytes of every shard by name.
        beside_bytes: What the result takes beside them.
        small: Names of the other files that it writes, relative to the folder.

    Raises:
        DiskFull: There is no room left, wherever that was found.
        OutputExists: The folder is not free.
    """
    with (
        full_disk_said(folder, sum(shards.values()) + beside_bytes),
        contextlib.closing(Journal.open(folder, key)) as journal,
    ):
        try:
            yield journal
        except OSError as error:
            if error.errno in _FULL:
                _give_back(journal, shards, beside_bytes, small)
            raise


def _give_back(
    journal: Journal, shards: Mapping[str, int], beside_bytes: int, small: Collection[str]
) -> None:
    missing = {name: size for name, size in shards.items() if name not in journal.finished}
    journal.discard_parts()
    journal.discard([*small, *missing])  # a missing one may have its name, but no line yet
    if missing and _free_bytes(journal.folder) < sum(missing.values()) + beside_bytes:
        journal.discard(shards)


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
        what = f" for {error.filename}" if isinstance(error.filename, str) else ""
        is_full = free < needed_bytes
        raise DiskFull(
            f"{folder}: no room left{what} ({error.strerror}); {human_bytes(needed_bytes)} "
            f"({needed_bytes} bytes) needed in all",
            expected="room for the whole output",
            hint=f"{human_bytes(free)} are free; make room"
            f"{'' if is_full else ', there, under a quota or on another disk'}, run again",
            details={"needed_bytes": needed_bytes, "free_bytes": free},
        ) from error


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
