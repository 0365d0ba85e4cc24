"""Reading and writing beside the page cache: it is as full after a merge as before.

Dirty pages go to the disk early and leave the cache; otherwise gigabytes of them would push out
everything else, count against a memory cgroup, and be waited for at the end. Pages of the source
leave it too, unless they were there before.
"""

from __future__ import annotations

import ctypes
import os

# sync_file_range(2): start writing a range; or wait until it is written.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4

# The disk is handed this much at a time, and may lag behind the writer by `_LAG_BYTES`.
_WINDOW_BYTES = 32 * 2**20
_LAG_BYTES = 256 * 2**20


class Writeback:
    """Follows the writer of one file. A hint to the kernel only: `fsync` makes the file durable."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._started = 0
        self._dropped = 0
        libc = ctypes.CDLL(None, use_errno=True)
        self._sync_range = getattr(libc, "sync_file_range", None)
        if self._sync_range is not None:
            self._sync_range.argtypes = [
                ctypes.c_int,
                ctypes.c_int64,
                ctypes.c_int64,
                ctypes.c_uint,
            ]

    def written(self, end: int) -> None:
        """Bytes up to `end` were written."""
        if self._sync_range is None or end - self._started < _WINDOW_BYTES:
            return
        self._sync_range(self.descriptor, self._started, end - self._started, _WRITE)
        self._started = end
        drop = end - _LAG_BYTES
        if drop - self._dropped >= _WINDOW_BYTES:
            count = drop - self._dropped
            wait = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
            self._sync_range(self.descriptor, self._dropped, count, wait)
            os.posix_fadvise(self.descriptor, self._dropped, count, os.POSIX_FADV_DONTNEED)
            self._dropped = drop

    def finish(self) -> None:
        """Make the file durable and leave nothing of it in the cache."""
        os.fsync(self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view` from `offset` on; the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


class ReadAhead:
    """Tells the kernel what is read next, and drops what was read and not cached before."""

    def __init__(self) -> None:
        self._cached: dict[tuple[int, int], bool] = {}

    def expect(self, descriptor: int, offset: int, count: int) -> None:
        """These bytes are wanted soon."""
        if (descriptor, offset) in self._cached or not count:
            return
        cached = _is_cached(descriptor, offset + count - 1)
        self._cached[(descriptor, offset)] = cached
        if not cached:
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)

    def done(self, descriptor: int, offset: int, count: int) -> None:
        """These bytes were read."""
        if not self._cached.pop((descriptor, offset), True):
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether a byte is in the page cache: a read that may not wait succeeds only then."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # EAGAIN: not cached; EOPNOTSUPP: this file system does not tell
        return False
