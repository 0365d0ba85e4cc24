"""One shard through the pipeline: a reader, the arithmetic and a writer at the same time.

Engine file: imports torch. Bytes are read with preadv into a few reused buffers (mapped pages
would count as resident memory), hashed as they pass, merged in place and written to a provisional
file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from tuneserve.checkpoint.headers import DTYPE_BITS
from tuneserve.errors import DiskFull, ModelError
from tuneserve.merge.nf4 import Nf4Roundtrip
from tuneserve.merge.plan import Output, OutputShard
from tuneserve.merge.tiles import TORCH_DTYPES, AdapterReader, TensorMerger
from tuneserve.merge.tiling import BUFFERS, Budget, Piece, header_bytes, pieces
from tuneserve.progress import human_bytes

# Written pages are given to the disk and dropped from the page cache in windows of this size, so
# that neither dirty nor cached pages pile up behind the writer.
_FLUSH_BYTES = 32 * 2**20

_T = TypeVar("_T")


@dataclass
class ShardReport:
    """What is known of a finished shard; the journal keeps it."""

    name: str
    bytes: int
    sha256: str
    source_sha256: str
    copied_bytes: int = 0
    merged_bytes: int = 0
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Stopped(Exception):
    """Another part of the pipeline failed or the merge was interrupted."""


class _Channel:
    """Bounded queues between the threads that all end when one of them fails."""

    def __init__(self) -> None:
        self.free: queue.Queue[mmap.mmap] = queue.Queue()
        self.read: queue.Queue[tuple[Piece, mmap.mmap] | None] = queue.Queue()
        self.merged: queue.Queue[tuple[Piece, mmap.mmap] | None] = queue.Queue()
        self.stop = threading.Event()
        self.failure: BaseException | None = None

    def take(self, source: queue.Queue[_T]) -> _T:
        """The next item, or `_Stopped`."""
        while not self.stop.is_set():
            try:
                return source.get(timeout=0.1)
            except queue.Empty:
                continue
        raise _Stopped

    def guard(self, work: Callable[[], None]) -> threading.Thread:
        """Start `work` in a thread whose failure stops the others and is kept."""

        def body() -> None:
            try:
                work()
            except _Stopped:
                pass
            except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
                self.failure = self.failure or error
                self.stop.set()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread


class ShardStream:
    """Merges shard after shard with the same buffers."""

    def __init__(
        self,
        budget: Budget,
        adapter_file: Path,
        nf4: Nf4Roundtrip | None,
        advance: Callable[[int], None],
    ) -> None:
        self.budget, self.nf4, self.advance = budget, nf4, advance
        self.adapter_descriptor = os.open(adapter_file, os.O_RDONLY)
        self.adapter = AdapterReader(self.adapter_descriptor)
        self.buffers = [mmap.mmap(-1, budget.buffer_bytes) for _ in range(BUFFERS)]
        self._descriptors: dict[Path, int] = {}

    def close(self) -> None:
        """Give back files and buffers."""
        os.close(self.adapter_descriptor)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def merge(self, shard: OutputShard, part: Path) -> ShardReport:
        """Write the merged shard to `part` and fsync it.

        Raises:
            DiskFull: The disk has no room left.
            ModelError: The source changed or cannot be read.
            AdapterError: A merged weight is not finite.
        """
        channel = _Channel()
        for buffer in self.buffers:
            channel.free.put(buffer)
        report = ShardReport(shard.name, 0, "", "")
        source = self._open(shard.source.file)
        out = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            header = header_bytes(shard)
            work = list(pieces(shard, self.budget.piece_bytes))
            threads = [
                channel.guard(lambda: self._read(channel, shard, source, work, report)),
                channel.guard(lambda: self._write(channel, out, header, report)),
            ]
            try:
                self._compute(channel, report)
                threads[1].join()
            except _Stopped:
                pass
            finally:
                channel.stop.set()
                for thread in threads:
                    thread.join()
            if channel.failure is not None:
                raise _readable(channel.failure, part)
            os.fsync(out)
            _drop(out, 0, 0)
        except OSError as error:
            raise _readable(error, part) from error
        finally:
            os.close(out)
        return report

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]

    def _read(
        self,
        channel: _Channel,
        shard: OutputShard,
        source: int,
        work: list[Piece],
        report: ShardReport,
    ) -> None:
        digest = hashlib.sha256(len(shard.source.raw).to_bytes(8, "little") + shard.source.raw)
        for piece in work:
            buffer = channel.take(channel.free)
            file = self._file_of(piece, source)
            view = memoryview(buffer)[: piece.read_bytes]
            _read_into(file, view, piece.read_offset, shard.source.file)
            if piece.hashed:
                digest.update(view)
            view.release()
            if piece.write_bytes:
                channel.read.put((piece, buffer))
            else:
                channel.free.put(buffer)
        report.source_sha256 = digest.hexdigest()
        channel.read.put(None)

    def _file_of(self, piece: Piece, source: int) -> int:
        if piece.source is None:
            return source
        if piece.output is not None and piece.output.op.from_adapter:
            return self.adapter_descriptor
        return self._open(piece.source.file)

    def _compute(self, channel: _Channel, report: ShardReport) -> None:
        merger: TensorMerger | None = None
        rounds: Callable[[torch.Tensor, int], None] | None = None
        while (item := channel.take(channel.read)) is not None:
            piece, buffer = item
            output = piece.output
            if output is not None:
                if piece.begin == 0:
                    merger = TensorMerger(output, self.adapter, self._base_rows(output))
                    rounds = self._nf4_tiles(output)
                assert merger is not None
                weight = _tile(piece, output, buffer)
                if rounds:
                    rounds(weight, piece.begin)
                merger.tile(weight, piece.begin)
                report.merged_bytes += piece.write_bytes
                if piece.last:
                    report.tensors[output.name] = _tensor_report(output, merger)
                del weight
            else:
                report.copied_bytes += piece.write_bytes
            channel.merged.put((piece, buffer))
        channel.merged.put(None)

    def _write(self, channel: _Channel, out: int, header: bytes, report: ShardReport) -> None:
        digest = hashlib.sha256(header)
        _write_all(out, memoryview(header), 0)
        offset = flushed = len(header)
        while (item := channel.take(channel.merged)) is not None:
            piece, buffer = item
            view = memoryview(buffer)[: piece.write_bytes]
            _write_all(out, view, offset)
            digest.update(view)
            view.release()
            channel.free.put(buffer)
            offset += piece.write_bytes
            self.advance(piece.write_bytes)
            if offset - flushed >= _FLUSH_BYTES:
                os.fdatasync(out)
                _drop(out, flushed, offset - flushed)
                flushed = offset
        report.bytes, report.sha256 = offset, digest.hexdigest()

    def _base_rows(self, output: Output) -> Callable[[int, int], torch.Tensor]:
        """Reads rows of an output's source for passes before its tiles, through NF4 where asked."""
        source = output.op.source
        file = self.adapter_descriptor if output.op.from_adapter else self._open(source.file)
        rounds = self._nf4_tiles(output)

        def read(begin: int, end: int) -> torch.Tensor:
            row_bytes = source.nbytes // source.shape[0]
            data = bytearray((end - begin) * row_bytes)
            _read_into(file, memoryview(data), source.begin + begin * row_bytes, source.file)
            flat = torch.frombuffer(data, dtype=TORCH_DTYPES[source.dtype])
            rows = flat.view(end - begin, *source.shape[1:]).to(TORCH_DTYPES[output.dtype])
            if rounds:
                rounds(rows, begin)
            return rows

        return read

    def _nf4_tiles(self, output: Output) -> Callable[[torch.Tensor, int], None] | None:
        if not output.op.nf4:
            return None
        assert self.nf4 is not None
        plain = replace(output, op=replace(output.op, nf4=False))
        return self.nf4.prepare(output, self._base_rows(plain), self.budget.piece_bytes)


def _tile(piece: Piece, output: Output, buffer: mmap.mmap) -> torch.Tensor:
    """The tile's rows as a tensor over the buffer, in the output's dtype."""
    count = piece.write_bytes * 8 // DTYPE_BITS[output.dtype]
    if output.op.source.dtype != output.dtype:
        stored = bytearray(memoryview(buffer)[: piece.read_bytes])
        values = torch.frombuffer(stored, dtype=TORCH_DTYPES[output.op.source.dtype])
        torch.frombuffer(buffer, dtype=TORCH_DTYPES[output.dtype], count=count).copy_(values)
    weight = torch.frombuffer(buffer, dtype=TORCH_DTYPES[output.dtype], count=count)
    return weight.view(-1, *output.shape[1:])


def _tensor_report(output: Output, merger: TensorMerger) -> dict[str, Any]:
    report: dict[str, Any] = {"kind": output.op.kind}
    if output.op.lora or output.op.bias:
        report["delta_norm"] = merger.effect.delta**0.5
        report["delta_survival"] = merger.effect.survival
    return report


def _read_into(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise ModelError(
                f"{path}: ends at byte {offset + done}, it changed while it was read",
                hint="run again when nothing writes to the base",
            )
        done += count


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _drop(descriptor: int, offset: int, count: int) -> None:
    os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def _readable(error: BaseException, part: Path) -> BaseException:
    """A full disk as the error that says so; everything else as it is."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = os.statvfs(part.parent)
        return DiskFull(
            f"{part.parent}: no room left for {part.name} ({error.strerror})",
            hint=f"{human_bytes(free.f_bavail * free.f_frsize)} are free there; make room, run again",
            details={"free_bytes": free.f_bavail * free.f_frsize},
        )
    return error


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """One thread for the arithmetic: the reader and the writer need the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
