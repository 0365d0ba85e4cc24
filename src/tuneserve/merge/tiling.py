"""How output tensors are cut into pieces, and how much memory that takes. No torch.

A piece is what moves through the pipeline at once: some bytes of the header, a run of untouched
bytes, or rows of one merged tensor. The largest piece decides the buffers, so the memory is known
before it is used.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuneserve.checkpoint.headers import DTYPE_BITS, TensorInfo
from tuneserve.errors import OutOfMemory
from tuneserve.merge.directio import BLOCK_BYTES, lead
from tuneserve.merge.plan import MergePlan, Output, OutputShard
from tuneserve.progress import human_bytes

# Tiles of 64 rows or more were equal to the whole product in every case tried, smaller ones not.
MIN_ROWS = 64

DEFAULT_PIECE_BYTES = 4 * 2**20
_MIN_PIECE_BYTES = 2**18

# Pieces in flight: one in each of the five steps, and two that wait.
BUFFERS = 7

# An interpreter with torch loaded and its matrix library warm: measured at 235 to 260 MiB with
# torch 2.13 for CPUs, and at 520 with torch 2.11 for CUDA, whose libraries are loaded with it.
_CPU_BUILD_BYTES, _CUDA_BUILD_BYTES = 300 * 2**20, 560 * 2**20

# float32 arrays alive while a 16-bit tile is merged (weight, update, and one between), in tile
# sizes.
_SCRATCH_FACTOR = 7


@dataclass(frozen=True)
class Piece:
    """One move through the pipeline.

    Attributes:
        source: Tensor the bytes are read from; None for the header and for bytes that are only
            hashed.
        read_offset: Where to read in the source's file; `read_bytes` of them.
        write_bytes: How many bytes come out; 0 where they are only hashed.
        output: The tensor to merge rows of; None for bytes that pass unchanged.
        begin: First row of the tile.
        hashed: Whether the bytes read are the next ones of the source file.
        last: Whether the output tensor is complete with this piece.
        unchanged: Whether the output is, to the end of this piece, byte for byte the source.
    """

    read_offset: int
    read_bytes: int
    write_bytes: int
    source: TensorInfo | None = None
    output: Output | None = None
    begin: int = 0
    hashed: bool = True
    last: bool = False
    unchanged: bool = False

    @property
    def lead(self) -> int:
        """Where its bytes begin in the buffer."""
        return lead(self.read_offset)


def header_bytes(shard: OutputShard) -> bytes:
    """The output file's length field and header: the base's own where the layout did not change."""
    if shard.same_layout:
        raw = shard.source.raw
    else:
        entries: dict[str, object] = (
            {"__metadata__": shard.source.metadata} if shard.source.metadata else {}
        )
        offset = 0
        for output in shard.outputs:
            entries[output.name] = {
                "dtype": output.dtype,
                "shape": list(output.shape),
                "data_offsets": [offset, offset + output.nbytes],
            }
            offset += output.nbytes
        raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)  # the format keeps tensors aligned to 8 bytes
    return len(raw).to_bytes(8, "little") + raw


def pieces(shard: OutputShard, piece_bytes: int) -> Iterator[Piece]:
    """The pieces after the header, in file order."""
    run_begin = run_end = shard.source.data_begin  # untouched bytes not yet handed out
    unchanged = shard.same_layout  # else the headers differ already
    own = {info.name: info for info in shard.source.tensors}
    for output in shard.outputs:
        base = own.get(output.name)
        if base is not None and output.op.kind == "copy":
            run_end = base.end
            continue
        yield from _plain(run_begin, run_end, piece_bytes, unchanged=unchanged)
        unchanged = False
        run_begin = run_end = base.end if base is not None else run_end
        if base is not None and output.op.source is not base:
            yield from _plain(base.begin, base.end, piece_bytes, only_hashed=True)
        yield from _tiles(output, piece_bytes, hashed=output.op.source is base)
    yield from _plain(run_begin, run_end, piece_bytes, unchanged=unchanged)


def _plain(
    begin: int,
    end: int,
    piece_bytes: int,
    *,
    only_hashed: bool = False,
    unchanged: bool = False,
) -> Iterator[Piece]:
    while begin < end:
        count = min(piece_bytes, end - begin)
        yield Piece(begin, count, 0 if only_hashed else count, unchanged=unchanged)
        begin += count


def _tiles(output: Output, piece_bytes: int, *, hashed: bool) -> Iterator[Piece]:
    source = output.op.source
    count = output.shape[0] if output.shape else 1
    read_row, write_row = source.nbytes // max(count, 1), output.nbytes // max(count, 1)
    bounds = row_bounds(output, piece_bytes)
    for begin, end in zip(bounds, bounds[1:], strict=False):
        yield Piece(
            source.begin + begin * read_row,
            (end - begin) * read_row,
            (end - begin) * write_row,
            source,
            output,
            begin,
            hashed,
            end == count,
        )


def row_bounds(output: Output, piece_bytes: int) -> list[int]:
    """Where the tiles of a tensor begin, and its end. No tile but a whole tensor is under
    `MIN_ROWS`.
    """
    count = output.shape[0] if output.shape else 1
    rows = max(MIN_ROWS, piece_bytes // max(_row_bytes(output), 1))
    unit = _row_unit(output)
    rows = max(unit, rows // unit * unit)
    bounds = list(range(0, count, rows)) or [0]
    if len(bounds) > 1 and count - bounds[-1] < MIN_ROWS:
        bounds.pop()
    return [*bounds, count]


def _row_unit(output: Output) -> int:
    """NF4 quantizes runs of 64 elements: tiles must end where a run does."""
    if not output.op.nf4:
        return 1
    return 64 // math.gcd(64, math.prod(output.shape[1:]))


def _row_bytes(output: Output) -> int:
    count = max(output.shape[0] if output.shape else 1, 1)
    return max(output.nbytes, output.op.source.nbytes) // count


@dataclass(frozen=True)
class Budget:
    """Memory of a merge: `piece_bytes` is asked for, `buffer_bytes` holds the largest piece."""

    piece_bytes: int
    buffer_bytes: int
    total_bytes: int


def budget(plan: MergePlan, max_memory_bytes: int | None) -> Budget:
    """Choose the piece size.

    Raises:
        OutOfMemory: Even the smallest pieces need more than `max_memory_bytes`.
    """
    size = DEFAULT_PIECE_BYTES
    needed = _needed(plan, size)
    while max_memory_bytes and needed.total_bytes > max_memory_bytes and size > _MIN_PIECE_BYTES:
        size //= 2
        needed = _needed(plan, size)
    if max_memory_bytes and needed.total_bytes > max_memory_bytes:
        raise OutOfMemory(
            f"the merge needs {human_bytes(needed.total_bytes)}, allowed are "
            f"{human_bytes(max_memory_bytes)}",
            expected=f"--max-memory of at least {needed.total_bytes} bytes for this model",
            hint=f"{human_bytes(interpreter_bytes())} of it are Python and torch; the rest holds "
            f"{MIN_ROWS} rows of the widest tensor, below which sums would differ from PEFT's",
            details={"needed_bytes": needed.total_bytes, "allowed_bytes": max_memory_bytes},
        )
    return needed


@functools.cache
def interpreter_bytes() -> int:
    """Resident memory of Python with the installed torch, which is not loaded to find out."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return _CPU_BUILD_BYTES
    cuda = Path(found.origin).with_name("lib") / "libtorch_cuda.so"
    return _CUDA_BUILD_BYTES if cuda.is_file() else _CPU_BUILD_BYTES


def _needed(plan: MergePlan, piece_bytes: int) -> Budget:
    largest, scratch = piece_bytes, 0
    for shard in plan.shards:
        for output in shard.outputs:
            op = output.op
            if op.kind == "copy":
                continue
            bounds = row_bounds(output, piece_bytes)
            rows = max(e - b for b, e in zip(bounds, bounds[1:], strict=False))
            tile = rows * _row_bytes(output)
            largest = max(largest, tile)
            elements = rows * math.prod(output.shape[1:])
            scratch = max(scratch, elements * 2 * _SCRATCH_FACTOR + _factors(output))
    largest += 2 * BLOCK_BYTES  # blocks that begin before the bytes and end after them
    total = interpreter_bytes() + BUFFERS * largest + scratch
    return Budget(piece_bytes, largest, total)


def _factors(output: Output) -> int:
    """Bytes of the adapter's matrices held while a tensor is merged, and of NF4's scales."""
    extra = 0
    if output.op.lora:
        lora = output.op.lora
        flipped = lora.embedding or output.op.stored_transposed
        fixed = lora.b if flipped else lora.a
        extra += 2 * 4 * fixed.numel
        if flipped and lora.magnitude:
            extra += min(math.prod(output.shape), 4 * 2**20) * 4 * 3 + 4 * lora.a.numel
    if output.op.nf4:
        extra += 3 * 4 * math.prod(output.shape) // 64
    return extra + DTYPE_BITS[output.dtype]
