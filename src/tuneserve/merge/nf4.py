"""Weights through NF4 and back, as a QLoRA adapter saw its base. Engine file: imports torch.

The 4-bit codes of a block depend on that block alone, so tiles can be quantized one by one; with
double quantization the blocks' scales are quantized together (their mean is one number for the
whole tensor), so the scales of all blocks are gathered in a first pass. bitsandbytes does the
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tuneserve.merge.plan import Output
from tuneserve.merge.tiles import RowReader
from tuneserve.merge.tiling import row_bounds

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
            codes, state = self._quantize(weight)
            if scales is not None:
                first = begin * width // self.blocksize
                state.absmax = scales[first : first + state.absmax.numel()]
            weight.copy_(self._functional.dequantize_4bit(codes, state))

        return roundtrip

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self._functional.quantize_4bit(
            weight.contiguous(),
            blocksize=self.blocksize,
            compress_statistics=False,
            quant_type=self.quant_type,
        )

    def _scales(self, output: Output, read_rows: RowReader, piece_bytes: int) -> torch.Tensor:
        """All blocks' scales after their own quantization."""
        bounds = row_bounds(output, piece_bytes)
        parts = [
            self._quantize(read_rows(begin, end))[1].absmax
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ]
        absmax = torch.cat(parts)
        offset = absmax.mean()
        codes, state = self._functional.quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCK)
        return self._functional.dequantize_blockwise(codes, state) + offset
