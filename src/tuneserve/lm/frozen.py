"""A frozen layer's weight, dequantized on demand.

Engine file: imports torch. A step dequantizes some thousand times, and where a launch takes as long
as a product (a slow CPU, a small model) the calls themselves decide the speed. So on a GPU one
kernel does what takes the library three, once its result was seen to equal the library's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tuneserve.lm import elementwise
from tuneserve.lm.fourbit import FourBit
from tuneserve.lm.scratch import borrowed

_PROBE_ROWS = 64
# A launch has a program for each row in the grid's second dimension, which CUDA limits.
_MOST_ROWS = 65_535


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
        self._fast = None if state is None else _fast(self._stored, state)

    def scales(self) -> Tensor | None:
        """What the quantized numbers are multiplied with: one float32 for each block of them.

        None for a weight that is not quantized or whose kernel takes them as they are stored.
        """
        if not self.quantized or self._fast is not None:
            return None
        import bitsandbytes.functional as bnb

        scales = self._state.absmax
        if self._state.nested:
            scales = bnb.dequantize_blockwise(scales, self._state.state2)
            scales += self._state.offset
        found: Tensor = scales.float()
        return found

    def rows(self, begin: int, end: int, scales: Tensor | None, out: Tensor | None) -> Tensor:
        """Rows `begin` to `end`; dequantized into `out`, where they are quantized.

        Args:
            begin: First row.
            end: One after the last.
            scales: `scales()`, of a caller that wants several parts; else None.
            out: [end - begin, in]; None unless quantized.
        """
        if not self.quantized:
            return self._stored if end - begin == self.out_features else self._stored[begin:end]
        assert out is not None
        first, last = begin * self.in_features, end * self.in_features
        if self._fast is not None:
            size = self._fast.block_size
            elementwise.dequantize(self._fast, first // size, self.in_features // size, out)
            return out
        state = self._state
        scales = self.scales() if scales is None else scales
        assert scales is not None
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
        state = self._state
        if self._fast is not None:
            size = self._fast.block_size
            elementwise.dequantize(self._fast, begin // size, self.in_features // size, out)
            return out
        scales = self.scales() if scales is None else scales
        assert scales is not None
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


def _fast(stored: Tensor, state: Any) -> FourBit | None:
    """What the kernel takes, if it gives the numbers of the library's own functions.

    The last rows are compared, and the columns from the middle on.
    """
    if not stored.is_cuda or stored.device.index != torch.cuda.current_device():
        return None
    rows, width = (int(size) for size in state.shape)
    if rows > _MOST_ROWS or width % state.blocksize or not elementwise.has_triton():
        return None
    import bitsandbytes.functional as bnb

    found = FourBit.of(stored, state)
    whole = bnb.dequantize_4bit(stored.view(-1, 1), state)
    blocks = width // found.block_size
    first, begin = max(0, rows - _PROBE_ROWS), blocks // 2
    below = torch.empty_like(whole[first:])
    elementwise.dequantize(found, first * blocks, blocks, below)
    beside = torch.empty_like(whole[:, begin * found.block_size :])
    elementwise.dequantize(found, begin, blocks, beside)
    same = torch.equal(below, whole[first:])
    same = same and torch.equal(beside, whole[:, begin * found.block_size :])
    return found if same else None
