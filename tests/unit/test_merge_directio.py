"""Bytes past the page cache arrive as they were, whatever their alignment and the file system."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuneserve.merge.directio import BLOCK_BYTES, Sink, Source, lead

LARGEST = 300_000


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, and one on a file system without O_DIRECT (on most kernels)."""
    shared = Path("/dev/shm")
    if request.param == "memory":
        if not shared.is_dir():
            pytest.skip("no file system in memory here")
        folder = shared / f"tuneserve-test-{os.getpid()}"
        folder.mkdir()
        try:
            yield folder
        finally:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    else:
        yield tmp_path


def resident(path: Path) -> int:
    """Pages of a file in the page cache (mincore)."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as m:
        first = ctypes.c_char.from_buffer(m)
        libc = ctypes.CDLL(None)
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert libc.mincore(address, ctypes.c_size_t(size), found) == 0
        del first
    return sum(byte & 1 for byte in found)


def evict(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def takes_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def cut(begin: int, end: int, unit: int, random_: random.Random) -> Iterator[tuple[int, int]]:
    while begin < end:
        count = min(end - begin, unit * random_.randint(1, LARGEST // unit))
        yield begin, count
        begin += count


@pytest.mark.parametrize("header", [0, 8, 4096, 5000, 12_345, 70_001])
@pytest.mark.parametrize("begin", [0, 8, 1001, 4096, 40_968])
@pytest.mark.parametrize("cached", [True, False])
def test_a_copy_in_pieces_is_the_same(
    folder: Path, header: int, begin: int, cached: bool, tmp_path: Path
) -> None:
    random_ = random.Random(header * 7 + begin)
    data, head = random_.randbytes(1_500_003), random_.randbytes(header)
    path, out = folder / "in", folder / "out"
    path.write_bytes(data)
    if not cached:
        evict(path)
    unit = 8 if begin % 8 == 0 else 1
    with contextlib.closing(Source(path)) as source, contextlib.closing(Sink(out)) as sink:
        sink.append(head)
        with mmap.mmap(-1, LARGEST + 2 * BLOCK_BYTES) as buffer:
            for offset, count in cut(begin, len(data), unit, random_):
                assert source.read(buffer, offset, count) == count
                place = lead(offset)
                assert place % 8 == 0 and buffer[place : place + count] == data[offset:][:count]
                sink.write(buffer, place, count)
        sink.finish()
    assert out.read_bytes() == head + data[begin:]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 200_000])
def test_the_end_of_the_file_is_told(folder: Path, size: int) -> None:
    path = folder / "in"
    path.write_bytes(b"x" * size)
    evict(path)
    with mmap.mmap(-1, LARGEST + 2 * BLOCK_BYTES) as buffer:
        with contextlib.closing(Source(path)) as source:
            assert source.read(buffer, 0, 250_000) == size
            assert source.read(buffer, 8 * 4096, 8192) == max(min(size - 8 * 4096, 8192), 0)


def test_the_page_cache_is_left_alone(tmp_path: Path) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("this file system knows no O_DIRECT")
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_bytes(random.Random(0).randbytes(2_000_000))
    evict(path)
    assert resident(path) == 0
    with contextlib.closing(Source(path)) as source, contextlib.closing(Sink(out)) as sink:
        with mmap.mmap(-1, LARGEST + 2 * BLOCK_BYTES) as buffer:
            for begin in range(0, 2_000_000, 250_000):
                assert source.read(buffer, begin, 250_000) == 250_000
                sink.write(buffer, lead(begin), 250_000)
        sink.finish()
    assert resident(path) == 0
    assert resident(out) == 0
    assert out.read_bytes() == path.read_bytes()


def test_nothing_can_be_read_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 10_000)
    with mmap.mmap(-1, 3 * BLOCK_BYTES) as buffer, contextlib.closing(Source(path)) as source:
        for offset in (0, 4096, 5000, 10_000):
            assert source.read(buffer, offset, 0) == 0
