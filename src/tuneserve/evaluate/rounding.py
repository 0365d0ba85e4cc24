"""Plain rounding to 4 bits, in place: what a quantizer that learns nothing would cost.

The yardstick of every export: symmetric, one scale a group, as GPTQ's format stores it, and no
calibration. Engine file: imports torch.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tuneserve.errors import ModelError

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
_LEVELS = 15  # 4 bits: zero point 8, so -8 to 7


@torch.no_grad()
def round_to_nearest(model: Any, group_size: int) -> int:
    """Round every linear layer of the decoder to 4 bits and back; the head stays as it is.

    Args:
        model: A loaded 16- or 32-bit model.
        group_size: Weights per scale; -1, or one that does not divide a layer, for one a row.

    Returns:
        How many layers were rounded.

    Raises:
        ModelError: There was none, so that the model is no yardstick.
    """
    count = 0
    for name, module in model.named_modules():
        if not _LAYER.search(f"{name}."):
            continue
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(rounded(module.weight, group_size))
        elif isinstance(module, Conv1D):  # GPT-2's, stored as [in, out]
            module.weight.copy_(rounded(module.weight.T, group_size).T)
        else:
            continue
        count += 1
    if not count:
        raise ModelError(
            f"{type(model).__name__} has no linear layer in its decoder that could be rounded",
            expected="layers as `layers.0`, `h.0` or `blocks.0`, the yardstick of every export",
            hint="choose another base",
        )
    return count


def rounded(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """`weight` [out, in] after 4 bits: ``round(w / s) * s`` with ``s = 2 max|w| / 15`` a group."""
    inputs = weight.shape[1]
    width = inputs if group_size == -1 or inputs % group_size else group_size
    groups = weight.float().reshape(weight.shape[0], -1, width)
    scale = 2 * groups.abs().amax(-1, keepdim=True) / _LEVELS
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = (groups / scale).round().clamp(-8, 7) * scale
    return values.reshape(weight.shape).to(weight.dtype)
