"""Weights through NF4 and back, as a QLoRA adapter saw its base. Engine file: imports torch.

The 4-bit codes of a block depend on that block alone, so tiles can be quantized one by one; with
double quantization the blocks' scales are quantized together (their mean is one number for the
whole tensor), so the scales of all blocks are gathered in a first pass. The values are those of
bitsandbytes to the bit. Its own way to a code on a CPU is a binary search a weight, 36 million a
second; comparing with all 15 bounds at once takes a quarter of that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tuneserve.merge.plan import Output
from tuneserve.merge.tiles import RowReader
from tuneserve.merge.tiling import row_bounds

# Weights that are compared at once: they and their codes stay in a core's cache.
_CHUNK = 2**18

# Scales are themselves quantized in groups of this many (bitsandbytes, quantize_4bit with nesting).
_NESTED_BLOCK = 256


class Nf4Roundtrip:
    """Quantizes and dequantizes with the settings of training."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import bitsandbytes.functional as functional

        self._functional = functional
        self.quant_type = str(settings.get("quant_type", "nf4"))
        self.nested = bool(settings.get("double_quant", True))
        self.blocksize = int(settings.get("blocksize", 64))

    def prepare(
        self, output: Output, read_rows: RowReader, piece_bytes: int
    ) -> Callable[[torch.Tensor, int], None]:
        """A function that takes rows of `output` through NF4 in place; it may read the tensor
        once.
        """
        width = math.prod(output.shape[1:])
        scales = self._scales(output, read_rows, piece_bytes) if self.nested else None

        def roundtrip(weight: torch.Tensor, begin: int) -> None:
            codes, state = self._quantize(weight.contiguous())
            if scales is not None:
                first = begin * width // self.blocksize
                state.absmax = scales[first : first + state.absmax.numel()]
            weight.copy_(self._functional.dequantize_4bit(codes, state))

        return roundtrip

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As `bitsandbytes.functional.quantize_4bit`: packed codes (numel / 2, 1), and their
        state.
        """
        if self.quant_type != "nf4" or weight.numel() % self.blocksize:
            return self._functional.quantize_4bit(
                weight,
                blocksize=self.blocksize,
                compress_statistics=False,
                quant_type=self.quant_type,
            )
        absmax = self._absmax(weight)
        code = self._functional.get_4bit_type(self.quant_type, device="cpu")
        state = self._functional.QuantState(
            absmax=absmax,
            shape=weight.shape,
            code=code,
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=weight.dtype,
        )
        factors = 1.0 / absmax.clamp(min=1e-38)
        blocks = weight.view(-1, self.blocksize)
        packed = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8)
        step = max(1, _CHUNK // self.blocksize)
        for first in range(0, len(blocks), step):
            # In float32, whatever the weights are in.
            scaled = blocks[first : first + step] * factors[first : first + step].view(-1, 1)
            scaled.clamp_(-1, 1)
            begin = first * self.blocksize // 2
            packed[begin : begin + scaled.numel() // 2, 0] = _packed(scaled.view(-1), code)
        return packed, state

    def _absmax(self, weight: torch.Tensor) -> torch.Tensor:
        """Each block's largest magnitude, its scale, in float32: (numel / blocksize,)."""
        return weight.view(-1, self.blocksize).abs().amax(1).float()

    def _scales(self, output: Output, read_rows: RowReader, piece_bytes: int) -> torch.Tensor:
        """All blocks' scales after their own quantization."""
        bounds = row_bounds(output, piece_bytes)
        parts = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            rows = read_rows(begin, end).contiguous()
            whole = rows.numel() % self.blocksize == 0
            parts.append(self._absmax(rows) if whole else self._quantize(rows)[1].absmax)
        absmax = torch.cat(parts)
        offset = absmax.mean()
        codes, state = self._functional.quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCK)
        return self._functional.dequantize_blockwise(codes, state) + offset


def _packed(scaled: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Two codes a byte of values in [-1, 1], the first in the upper half: the nearest of `code`,
    which rises, and the lower of two that are equally near.
    """
    codes = torch.full((scaled.numel(),), len(code) - 1, dtype=torch.uint8)
    below = torch.empty(scaled.numel(), dtype=torch.bool)
    for bound in ((code[:-1] + code[1:]) / 2).tolist():
        torch.le(scaled, bound, out=below)  # not of NaN, which so has the highest code
        codes -= below.view(torch.uint8)
    return (codes[::2] << 4) | codes[1::2]
