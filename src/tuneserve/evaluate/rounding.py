"""Plain rounding to 4 bits, in place: what a quantizer that learns nothing would cost.

The yardstick of every export: symmetric, one scale a group, as GPTQ's format stores it, and no
calibration. Engine file: imports torch.
"""

from __future__ import annotations

import re
from typing import Any

import torch

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
    """
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and _LAYER.search(f"{name}."):
            module.weight.copy_(rounded(module.weight, group_size))
            count += 1
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
