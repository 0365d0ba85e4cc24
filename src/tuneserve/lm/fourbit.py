"""A 4-bit weight's tensors, as a kernel takes them. Engine file: imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FourBit:
    """A 4-bit weight as bitsandbytes stores it (QLoRA, Dettmers et al., 2023, section 3).

    Attributes:
        packed: Two weights a byte, the first in its upper half.
        table: What the sixteen codes stand for, as shares of a block's largest value.
        block_size: Weights in a block.
        absmax: Largest value of each block, in float32; nested, a code for it of a byte.
        code: Nested, what the 256 codes stand for.
        second_absmax: Nested, the largest of `second_block_size` numbers that `absmax` codes.
        offset: Nested, added to each.
    """

    packed: torch.Tensor
    table: torch.Tensor
    block_size: int
    absmax: torch.Tensor
    code: torch.Tensor
    second_absmax: torch.Tensor
    second_block_size: int
    offset: float
    nested: bool

    @classmethod
    def of(cls, packed: torch.Tensor, state: Any) -> FourBit:
        """From the library's `QuantState`."""
        second = state.state2 if state.nested else None
        return cls(
            packed=packed,
            table=state.code.float().contiguous(),
            block_size=int(state.blocksize),
            absmax=state.absmax,
            code=state.absmax if second is None else second.code,
            second_absmax=state.absmax if second is None else second.absmax,
            second_block_size=1 if second is None else int(second.blocksize),
            offset=0.0 if second is None else float(state.offset),
            nested=second is not None,
        )
