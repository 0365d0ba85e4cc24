"""A frozen layer's weight, dequantized on demand, and the memory that such things borrow.

Engine file: imports torch. A step dequantizes some thousand times, and where a launch takes as long
as a product (a slow CPU, a small model) the calls themselves decide the speed. So on a GPU the
kernels of bitsandbytes are called directly, once their result was seen to equal the library's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tuneserve.lm import elementwise

log = logging.getLogger(__name__)

_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_PROBE_ROWS = 64
_ALIGN = 512
_MOST_VIEWS = 512


class Borrowed:
    """Scratch memory of one device, lent to one caller at a time and never given back.

    Buffers of a step's widest moment come and go with every block; taken from the allocator, they
    leave holes that the lasting tensors of the next block tear up. All borrowers work on one
    stream, one after the other, and none keeps what it borrowed beyond its own call.
    """

    def __init__(self) -> None:
        self._flat: dict[torch.device, Tensor] = {}
        self._views: dict[tuple[Any, ...], list[Tensor]] = {}

    def take(self, device: torch.device, dtype: torch.dtype, *shapes: tuple[int, int]) -> Any:
        """Tensors of these shapes, contents undefined; all of what was lent before is void."""
        if device.type != "cuda":  # the C library hands out what was just freed
            return [torch.empty(shape, dtype=dtype) for shape in shapes]
        key = (device, dtype, shapes)
        views = self._views.get(key)
        if views is None:
            if len(self._views) > _MOST_VIEWS:  # lengths of batches differ
                self._views.clear()
            views = self._views[key] = self._cut(device, dtype, shapes)
        return views

    def _cut(
        self, device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]
    ) -> list[Tensor]:
        sizes = [-(-rows * width * dtype.itemsize // _ALIGN) * _ALIGN for rows, width in shapes]
        flat = self._flat.get(device)
        if flat is None or flat.numel() < sum(sizes):
            self._flat.pop(device, None)
            self._views = {key: found for key, found in self._views.items() if key[0] != device}
            del flat
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            self._flat[device] = flat
        views, begin = [], 0
        for (rows, width), size in zip(shapes, sizes, strict=True):
            part = flat[begin : begin + rows * width * dtype.itemsize]
            views.append(part.view(dtype).view(rows, width))
            begin += size
        return views

    def release(self) -> None:
        """Give everything back; what was lent before is void."""
        self._flat.clear()
        self._views.clear()


borrowed = Borrowed()


class Weight:
    """A frozen layer's weight, [out, in], however it is stored."""

    def __init__(self, layer: torch.nn.Module) -> None:
        weight: Any = layer.weight
        state: Any = getattr(weight, "quant_state", None)
        self.quantized = state is not None
        self.bias: Tensor | None = layer.bias
        shape = weight.shape if state is None else state.shape
        self.out_features, self.in_features = int(shape[0]), int(shape[1])
        with torch._C.DisableTorchFunctionSubclass():
            self._stored = weight.detach().as_subclass(torch.Tensor)
        self.dtype = self._stored.dtype if state is None else state.dtype
        self.device = self._stored.device
        self._state: Any = state
        self._direct = _direct(self._stored, state) if state is not None else None

    def scales(self) -> Tensor:
        """What the quantized numbers are multiplied with: one float32 for each block of them."""
        if self._direct is not None:
            return self._direct.scales()
        import bitsandbytes.functional as bnb

        scales = self._state.absmax
        if self._state.nested:
            scales = bnb.dequantize_blockwise(scales, self._state.state2)
            scales += self._state.offset
        return scales.float()

    def rows(self, begin: int, end: int, scales: Tensor | None, out: Tensor | None) -> Tensor:
        """Rows `begin` to `end`; dequantized into `out`, where they are quantized.

        Args:
            begin: First row.
            end: One after the last.
            scales: `scales()`, for a caller that wants several parts; else None.
            out: [end - begin, in]; None unless quantized.
        """
        if not self.quantized:
            return self._stored if end - begin == self.out_features else self._stored[begin:end]
        assert out is not None
        scales = self.scales() if scales is None else scales
        if self._direct is not None:
            self._direct.into(out, begin * self.in_features, end * self.in_features, scales)
            return out
        state = self._state
        first, last = begin * self.in_features, end * self.in_features
        packed = self._stored.view(-1, 1)[first // 2 : last // 2]
        scales = scales[first // state.blocksize : last // state.blocksize]
        shape = (end - begin, self.in_features)
        arguments = (packed, scales, state.blocksize, state.quant_type, shape, state.dtype)
        out.copy_(torch.ops.bitsandbytes.dequantize_4bit.default(*arguments))
        return out

    def dense(self, out: Tensor | None = None) -> Tensor:
        """All of it, in borrowed memory or in `out`, where it is quantized."""
        if self.quantized and out is None:
            shape = (self.out_features, self.in_features)
            (out,) = borrowed.take(self.device, self.dtype, shape)
        return self.rows(0, self.out_features, None, out)

    def columns(self, begin: int, end: int, scales: Tensor | None, out: Tensor | None) -> Tensor:
        """Columns `begin` to `end`, [out, end - begin]; as `rows`.

        Args:
            begin: First column; a multiple of the blocks that share a scale, as is `end`.
            end: One after the last.
            scales: `scales()`, or None.
            out: [out, end - begin], contiguous; None unless quantized.
        """
        if not self.quantized:
            return self._stored[:, begin:end]
        assert out is not None
        scales = self.scales() if scales is None else scales
        state = self._state
        if self._direct is not None and self._direct.table is not None:
            whole = (self.out_features, self.in_features, state.blocksize)
            elementwise.dequantize_columns(
                self._stored, scales, self._direct.table, whole, begin, out
            )
            return out
        packed = self._stored.view(self.out_features, -1)[:, begin // 2 : end // 2]
        blocks = scales.view(self.out_features, -1)
        blocks = blocks[:, begin // state.blocksize : end // state.blocksize]
        arguments = (packed.reshape(-1, 1), blocks.reshape(-1).contiguous(), state.blocksize)
        out.copy_(
            torch.ops.bitsandbytes.dequantize_4bit.default(
                *arguments, state.quant_type, tuple(out.shape), state.dtype
            )
        )
        return out


def scales_of(weights: Sequence[Weight]) -> list[Tensor | None]:
    """`scales` of each that is quantized, in fewer launches than one after the other."""
    direct = [weight._direct for weight in weights if weight._direct is not None]
    if len(direct) < len(weights) or not all(one.nested for one in direct):
        return [weight.scales() if weight.quantized else None for weight in weights]
    found = [one.unshifted() for one in direct]
    torch._foreach_add_(found, [one.offset for one in direct])
    return list(found)


class _Direct:
    """The library's own kernels, by address."""

    def __init__(self, library: Any, stored: Tensor, state: Any) -> None:
        kind = _KINDS[state.dtype]
        self._four_bit = getattr(library, f"cdequantize_blockwise_{kind}_{state.quant_type}")
        self._eight_bit = library.cdequantize_blockwise_fp32
        self._stored, self._state = stored, state
        self._blocksize, self._index = state.blocksize, stored.device.index
        self._count = state.absmax.numel()
        self._packed = stored.data_ptr()
        self.table: Tensor | None = None  # the sixteen values, for whole columns at a time
        self.nested, self.offset = bool(state.nested), 0.0
        if state.nested:
            second = state.state2
            self._code, self._quantized = second.code.data_ptr(), state.absmax.data_ptr()
            self._second, self._second_blocksize = second.absmax.data_ptr(), second.blocksize
            self.offset = float(state.offset)

    def scales(self) -> Tensor:
        return self.unshifted().add_(self.offset) if self.nested else self._state.absmax

    def unshifted(self) -> Tensor:
        """The scales of a nested state, `offset` not yet added."""
        out = torch.empty(self._count, dtype=torch.float32, device=self._stored.device)
        self._eight_bit(
            self._code,
            self._quantized,
            self._second,
            out.data_ptr(),
            self._second_blocksize,
            self._count,
            torch._C._cuda_getCurrentRawStream(self._index),
        )
        return out

    def into(self, out: Tensor, first: int, last: int, scales: Tensor) -> None:
        self._four_bit(
            None,
            self._packed + first // 2,
            scales.data_ptr() + 4 * (first // self._blocksize),
            out.data_ptr(),
            self._blocksize,
            last - first,
            torch._C._cuda_getCurrentRawStream(self._index),
        )


def _direct(stored: Tensor, state: Any) -> _Direct | None:
    """The direct way, if a part of this weight comes out as by the library's own functions."""
    import bitsandbytes.functional as bnb

    if not stored.is_cuda or state.dtype not in _KINDS:
        return None
    if stored.device.index != torch.cuda.current_device():
        return None
    try:
        from bitsandbytes.cextension import lib

        direct = _Direct(lib, stored, state)
        width = int(state.shape[1])
        rows = min(_PROBE_ROWS, int(state.shape[0]))
        last = int(state.shape[0]) * width
        ours = torch.empty((rows, width), dtype=state.dtype, device=stored.device)
        direct.into(ours, last - rows * width, last, direct.scales())
    except (ImportError, AttributeError, TypeError, OSError) as error:
        log.info("bitsandbytes' kernels are called through its own functions (%s)", error)
        return None
    whole = bnb.dequantize_4bit(stored.view(-1, 1), state)
    if not torch.equal(ours, whole[-rows:]):
        return None
    direct.table = _table(stored, state, direct.scales(), whole)
    return direct


def _table(stored: Tensor, state: Any, scales: Tensor, whole: Tensor) -> Tensor | None:
    """The values of the sixteen codes, if the kernel for columns gives the library's numbers."""
    count, width = whole.shape
    size = state.blocksize
    if not elementwise.has_triton() or width < 3 * size or width % size:
        return None
    table: Tensor = state.code.float().contiguous()
    begin = width // size // 2 * size
    out = torch.empty((count, width - begin), dtype=state.dtype, device=stored.device)
    elementwise.dequantize_columns(stored, scales, table, (count, width, size), begin, out)
    return table if torch.equal(out, whole[:, begin:]) else None
