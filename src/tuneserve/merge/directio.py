"""Reading and writing past the page cache (O_DIRECT), straight from and to the merge's buffers.

A copy through the page cache moves every byte twice more and fills new pages all the time, which
costs more than the merge's own arithmetic; and gigabytes of dirty pages would push out everything
else, count against a memory cgroup, and be waited for at the end. The disk's own transfers want
offsets, lengths and memory in whole blocks, so bytes lie in a buffer as far from its beginning as
they lie from the beginning of their block in the file: nothing is moved to be read or written.

Files that are in the page cache already are read from it. File systems that know no such
transfers are used as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

# Every disk and file system in use takes transfers of this alignment (open(2), O_DIRECT).
BLOCK_BYTES = 4096

# Where O_DIRECT is not known, dirty pages are written out and dropped this often.
_WINDOW_BYTES = 64 * 2**20


_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def lead(offset: int) -> int:
    """Where the bytes from `offset` of a file on lie in a buffer.

    Values that are not aligned in the file would not be in the buffer: those begin at 0.
    """
    return offset % BLOCK_BYTES if offset % 8 == 0 else 0


class Source:
    """A file to read from.

    Attributes:
        plain: Descriptor for reads through the page cache.
    """

    def __init__(self, path: Path) -> None:
        self.plain = os.open(path, os.O_RDONLY)
        # Of files that are not ours the kernel says that all of them were cached.
        self._told = os.access(path, os.W_OK) or os.fstat(self.plain).st_uid == os.geteuid()
        self._direct: int | None = None
        with contextlib.suppress(OSError):
            self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def close(self) -> None:
        """Close the file."""
        os.close(self.plain)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, buffer: mmap.mmap, offset: int, count: int) -> int:
        """Read `count` bytes from `offset` on to `lead(offset)` of the buffer; how many there were.

        Fewer are read only at the end of the file.
        """
        begin, done = lead(offset), 0
        cached = self._told and _is_cached(self.plain, offset, count)
        if self._direct is not None and begin == offset % BLOCK_BYTES and not cached:
            done = self._read_blocks(buffer, offset - begin, begin + count) - begin
            done = min(max(done, 0), count)
        if done < count:
            with memoryview(buffer)[begin + done : begin + count] as view:
                done += read_into(self.plain, view, offset + done)
            if not cached:
                os.posix_fadvise(self.plain, offset, count, os.POSIX_FADV_DONTNEED)
        return done

    def _read_blocks(self, buffer: mmap.mmap, offset: int, count: int) -> int:
        """Read whole blocks until `count` bytes are there; fewer where that is not possible."""
        assert self._direct is not None
        whole, done = _up(count), 0
        try:
            while done < count and done % BLOCK_BYTES == 0:
                with memoryview(buffer)[done:whole] as view:
                    got = os.preadv(self._direct, [view], offset + done)
                if not got:
                    break
                done += got
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._direct)  # it opens such files but cannot read them
            self._direct = None
        return done


class Sink:
    """A new file, written from its beginning to its end.

    What does not fill a block yet waits in `_tail` for the bytes after it.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
            self._direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = os.open(path, flags, 0o644)
            self._direct = False
        self._size = 0
        self._tail = b""
        self._dirty = 0

    def close(self) -> None:
        """Close the file, finished or not."""
        os.close(self._descriptor)

    def append(self, data: bytes) -> None:
        """Write bytes that are not in a buffer."""
        with mmap.mmap(-1, len(data) + 2 * BLOCK_BYTES) as buffer:
            buffer[: len(data)] = data
            self.write(buffer, 0, len(data))

    def write(self, buffer: mmap.mmap, begin: int, count: int) -> None:
        """Write `count` bytes that lie at `begin` of a buffer, and overwrite what is around them.

        The buffer must be `BLOCK_BYTES` longer than its contents.
        """
        before = len(self._tail)
        with memoryview(buffer) as view:
            if begin != before:  # the layout is not the source's
                view[before : before + count] = view[begin : begin + count]
            view[:before] = self._tail
            whole = (before + count) // BLOCK_BYTES * BLOCK_BYTES
            self._write_all(view[:whole], self._size - before)
            self._tail = bytes(view[whole : before + count])
        self._size += count
        self._bound_cache(count)

    def finish(self) -> None:
        """Make the file durable."""
        if self._tail:
            with mmap.mmap(-1, BLOCK_BYTES) as block:
                block[: len(self._tail)] = self._tail
                with memoryview(block) as view:
                    self._write_all(view, self._size - len(self._tail))
            os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
        self._bound_cache(_WINDOW_BYTES)

    def _write_all(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._descriptor, view[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self._direct = False

    def _bound_cache(self, count: int) -> None:
        self._dirty += count
        if not self._direct and self._dirty >= _WINDOW_BYTES:
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._dirty = 0


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view` from `offset` on; the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _up(count: int) -> int:
    return -(-count // BLOCK_BYTES) * BLOCK_BYTES


def _is_cached(descriptor: int, offset: int, count: int) -> bool:
    """Whether at least half of these bytes are in the page cache, as mincore(2) tells.

    A read that may not wait (RWF_NOWAIT) would tell too, but it starts to fill the cache.
    """
    if not count:
        return False
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(offset + count - begin) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    try:
        # Of the kinds of mapping, ctypes takes the address of a private one; nothing touches it.
        with mmap.mmap(
            descriptor, offset + count - begin, access=mmap.ACCESS_COPY, offset=begin
        ) as view:
            first = ctypes.c_char.from_buffer(view)
            failed = _mincore(ctypes.addressof(first), ctypes.c_size_t(len(view)), found)
            del first
    except (OSError, ValueError):  # no mappings on this file system, or the file became shorter
        return False
    return not failed and bytes(found).count(1) * 2 >= pages
