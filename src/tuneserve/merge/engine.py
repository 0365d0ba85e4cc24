"""Tiles of a shard, from bytes in a buffer to merged bytes in the same buffer. Imports torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tuneserve.checkpoint.headers import DTYPE_BITS
from tuneserve.errors import ModelError
from tuneserve.merge.directio import read_into
from tuneserve.merge.nf4 import Nf4Roundtrip
from tuneserve.merge.plan import Output
from tuneserve.merge.tiles import TORCH_DTYPES, AdapterReader, RowReader, Scratch, TensorMerger
from tuneserve.merge.tiling import MIN_ROWS, Piece

# Three arrays of 1 MiB, beside what the hashes stream through the same cache.
_CACHED_ELEMENTS = 2**18


class TileEngine:
    """Merges tiles one after another, tensor by tensor, on one thread.

    The reader and the writer need the other cores, and one core adds faster than disks write.
    """

    def __init__(
        self,
        open_file: Callable[[Path], int],
        adapter_file: Path,
        nf4: Mapping[str, Any] | None,
        piece_bytes: int,
    ) -> None:
        self._open = open_file
        self._adapter = AdapterReader(open_file(adapter_file))
        self._nf4 = Nf4Roundtrip(nf4) if nf4 else None
        self._piece_bytes = piece_bytes
        self._scratch = Scratch()
        self._threads_before = torch.get_num_threads()
        self._merger: TensorMerger | None = None
        self._rounds: Callable[[torch.Tensor, int], None] | None = None
        torch.set_num_threads(1)

    def close(self) -> None:
        """Give the process its threads back."""
        torch.set_num_threads(self._threads_before)

    def tile(self, piece: Piece, buffer: mmap.mmap) -> None:
        """Merge the rows in `buffer` in place.

        Raises:
            AdapterError: The result is not finite.
        """
        output = piece.output
        assert output is not None
        if piece.begin == 0:
            self._merger = TensorMerger(
                output, self._adapter, self._base_rows(output), self._scratch
            )
            self._rounds = self._nf4_rounds(output)
        assert self._merger is not None
        weight = _rows(piece, output, buffer)
        if self._rounds:
            self._rounds(weight, piece.begin)
        for begin, end in cache_sized(weight.shape[0], math.prod(weight.shape[1:])):
            self._merger.tile(weight[begin:end], piece.begin + begin)

    def tensor_report(self) -> dict[str, Any]:
        """What became of the tensor whose last tile was merged."""
        assert self._merger is not None
        op = self._merger.output.op
        report: dict[str, Any] = {"kind": op.kind}
        if op.lora or op.bias:
            report["delta_norm"] = self._merger.effect.delta**0.5
            report["delta_relative"] = self._merger.effect.relative
            report["delta_survival"] = self._merger.effect.survival
        return report

    def _base_rows(self, output: Output) -> RowReader:
        """Reads rows of an output's source for a pass before its tiles, through NF4 where asked."""
        source = output.op.source
        rounds = self._nf4_rounds(output)

        def read(begin: int, end: int) -> torch.Tensor:
            row_bytes = source.nbytes // source.shape[0]
            data = bytearray((end - begin) * row_bytes)
            offset = source.begin + begin * row_bytes
            if read_into(self._open(source.file), memoryview(data), offset) < len(data):
                raise ModelError(
                    f"{source.file}: became shorter while it was read",
                    expected="files that nothing writes to meanwhile",
                )
            flat = torch.frombuffer(data, dtype=TORCH_DTYPES[source.dtype])
            rows = flat.view(end - begin, *source.shape[1:]).to(TORCH_DTYPES[output.dtype])
            if rounds:
                rounds(rows, begin)
            return rows

        return read

    def _nf4_rounds(self, output: Output) -> Callable[[torch.Tensor, int], None] | None:
        if not output.op.nf4:
            return None
        assert self._nf4 is not None
        plain = replace(output, op=replace(output.op, nf4=False))
        return self._nf4.prepare(output, self._base_rows(plain), self._piece_bytes)


def cache_sized(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Bounds of parts whose float32 arrays stay in the cache; none is under `MIN_ROWS` rows.

    The arithmetic passes over each part several times: from memory that is half as fast.
    """
    step = max(MIN_ROWS, _CACHED_ELEMENTS // max(width, 1))
    begin = 0
    while rows - begin >= step + MIN_ROWS:
        yield begin, begin + step
        begin += step
    yield begin, rows


def _rows(piece: Piece, output: Output, buffer: mmap.mmap) -> torch.Tensor:
    """The tile's rows as a tensor over the buffer, in the output's dtype."""
    count, begin = piece.write_bytes * 8 // DTYPE_BITS[output.dtype], piece.lead
    dtype = TORCH_DTYPES[output.dtype]
    if output.op.source.dtype != output.dtype:
        stored = bytearray(memoryview(buffer)[begin : begin + piece.read_bytes])
        values = torch.frombuffer(stored, dtype=TORCH_DTYPES[output.op.source.dtype])
        torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin).copy_(values)
    rows = torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin)
    return rows.view(-1, *output.shape[1:])
