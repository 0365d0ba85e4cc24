"""One shard through the pipeline: read, hash, merge, hash, write, all at the same time. No torch.

Bytes are read into a few reused buffers (mapped pages would count as resident memory),
hashed, merged in place, hashed again and written to a provisional file. Each of these is a thread:
on one core SHA-256 is slower than a good disk, so it must not wait for the disk or the disk for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tuneserve.errors import ModelError
from tuneserve.merge.directio import Sink, Source
from tuneserve.merge.plan import OutputShard
from tuneserve.merge.tiling import BUFFERS, Budget, Piece, header_bytes, pieces

if TYPE_CHECKING:
    from tuneserve.merge.engine import TileEngine

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


# A piece and the buffer that holds it; None marks the end of the shard.
_Moves = queue.Queue[tuple[Piece, mmap.mmap] | None]


class _Channel:
    """Bounded queues between the threads that all end when one of them fails."""

    def __init__(self) -> None:
        self.free: queue.Queue[mmap.mmap] = queue.Queue()
        self.read, self.known, self.merged, self.hashed = (_Moves() for _ in range(4))
        # The state of the source's hash where the output begins to differ from it.
        self.shared: Any = None
        self.stop = threading.Event()
        self.failure: BaseException | None = None

    def each(self, source: _Moves) -> Iterator[tuple[Piece, mmap.mmap]]:
        """What comes until the end is marked with None."""
        while (item := self.take(source)) is not None:
            yield item

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
        nf4: Mapping[str, Any] | None,
        advance: Callable[[int], None],
    ) -> None:
        self.budget, self.nf4, self.advance = budget, nf4, advance
        self.adapter_file = adapter_file
        self.buffers = [mmap.mmap(-1, budget.buffer_bytes) for _ in range(BUFFERS)]
        self._sources: dict[Path, Source] = {}
        self._opening = threading.Lock()

    @functools.cached_property
    def engine(self) -> TileEngine:
        """The arithmetic. Loading torch takes seconds, in which untouched bytes already flow."""
        from tuneserve.merge.engine import TileEngine

        def plain(path: Path) -> int:
            return self._open(path).plain

        return TileEngine(plain, self.adapter_file, self.nf4, self.budget.piece_bytes)

    def close(self) -> None:
        """Give back files and buffers."""
        if "engine" in self.__dict__:
            self.engine.close()
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def merge(self, shard: OutputShard, part: Path) -> ShardReport:
        """Write the merged shard to `part` and fsync it.

        Raises:
            OSError: The disk has no room left, or fails.
            ModelError: The source changed or cannot be read.
            AdapterError: A merged weight is not finite.
        """
        channel = _Channel()
        for buffer in self.buffers:
            channel.free.put(buffer)
        report = ShardReport(shard.name, 0, "", "")
        source = self._open(shard.source.file)
        try:
            with contextlib.closing(Sink(part)) as out:
                self._pass(channel, shard, source, out, report)
        finally:
            self._sources.pop(shard.source.file).close()
        if channel.failure is not None:
            raise channel.failure
        return report

    def _pass(
        self, channel: _Channel, shard: OutputShard, source: Source, out: Sink, report: ShardReport
    ) -> None:
        """All bytes of a shard through all threads; the first failure is in the channel."""
        header = header_bytes(shard)
        work = list(pieces(shard, self.budget.piece_bytes))
        threads = [
            channel.guard(lambda: self._read(channel, shard, source, work)),
            channel.guard(lambda: _hash_source(channel, shard, report)),
            channel.guard(lambda: _hash_output(channel, shard, header, report)),
            channel.guard(lambda: self._write(channel, out, header)),
        ]
        try:
            self._compute(channel, report)
            threads[-1].join()
        except _Stopped:
            pass
        finally:
            channel.stop.set()
            for thread in threads:
                thread.join()

    def _open(self, path: Path) -> Source:
        with self._opening:
            if path not in self._sources:
                self._sources[path] = Source(path)
            return self._sources[path]

    def _read(
        self, channel: _Channel, shard: OutputShard, source: Source, work: list[Piece]
    ) -> None:
        for piece in work:
            buffer = channel.take(channel.free)
            file = source if piece.source is None else self._open(piece.source.file)
            if file.read(buffer, piece.read_offset, piece.read_bytes) < piece.read_bytes:
                raise ModelError(
                    f"{shard.source.file}: became shorter while it was read",
                    expected="files that nothing writes to meanwhile",
                    hint="run again when nothing writes to the base",
                )
            channel.read.put((piece, buffer))
        channel.read.put(None)

    def _compute(self, channel: _Channel, report: ShardReport) -> None:
        for piece, buffer in channel.each(channel.known):
            if piece.output is None:
                report.copied_bytes += piece.write_bytes
            else:
                self.engine.tile(piece, buffer)
                report.merged_bytes += piece.write_bytes
                if piece.last:
                    report.tensors[piece.output.name] = self.engine.tensor_report()
            channel.merged.put((piece, buffer))
        channel.merged.put(None)

    def _write(self, channel: _Channel, out: Sink, header: bytes) -> None:
        out.append(header)
        for piece, buffer in channel.each(channel.hashed):
            out.write(buffer, piece.lead, piece.write_bytes)
            channel.free.put(buffer)
            self.advance(piece.write_bytes)
        out.finish()


def _hash_source(channel: _Channel, shard: OutputShard, report: ShardReport) -> None:
    digest = hashlib.sha256(len(shard.source.raw).to_bytes(8, "little") + shard.source.raw)
    for piece, buffer in channel.each(channel.read):
        if channel.shared is None and not piece.unchanged:
            channel.shared = digest.copy()
        if piece.hashed:
            with memoryview(buffer)[piece.lead : piece.lead + piece.read_bytes] as view:
                digest.update(view)
        if piece.write_bytes:
            channel.known.put((piece, buffer))
        else:
            channel.free.put(buffer)
    if channel.shared is None:
        channel.shared = digest.copy()
    report.source_sha256 = digest.hexdigest()
    channel.known.put(None)


def _hash_output(channel: _Channel, shard: OutputShard, header: bytes, report: ShardReport) -> None:
    """Hash what will be written. What is the same as in the source was hashed there: only its
    state is taken over, before the first piece that differs or at the end.
    """
    digest, count = None if shard.same_layout else hashlib.sha256(header), len(header)
    for piece, buffer in channel.each(channel.merged):
        if not piece.unchanged:
            digest = digest or channel.shared
            with memoryview(buffer)[piece.lead : piece.lead + piece.write_bytes] as view:
                digest.update(view)
        count += piece.write_bytes
        channel.hashed.put((piece, buffer))
    report.bytes, report.sha256 = count, (digest or channel.shared).hexdigest()
    channel.hashed.put(None)
