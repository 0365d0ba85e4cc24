"""Linear layers of one input (queries, keys, values) as one autograd node. Engine file.

Beside a node for each (`tuneserve.lm.fused.LoraLinear`) the input is kept and read once, the three
adapters' ``x A'`` are one product, and so is the input's gradient. Where a launch takes as long as
a product, that is what a step waits for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tuneserve.lm.fused import Layer, scaled_product, shaped
from tuneserve.lm.scratch import borrowed

Factors = Sequence[Tensor | None]


def can_group(layers: Sequence[Layer], factors: Factors) -> bool:
    """Whether these layers can be a `Group`; each by itself can be fused."""
    alike = {
        (w.in_features, w.dtype, w.device, w.quantized) for w in (layer.weight for layer in layers)
    }
    return len(alike) == 1 and len({f.dtype for f in factors if f is not None}) == 1


class Group:
    """Layers of one input, and the memory that they share for a moment.

    Args:
        layers: All quantized, or none; of one input width and one type.
        factors: A and B of each layer, or None twice; at least one layer has an adapter.
    """

    def __init__(self, layers: Sequence[Layer], factors: Factors) -> None:
        self.layers = tuple(layers)
        self._weights = [layer.weight for layer in layers]
        self._quantized = self._weights[0].quantized
        sizes = [weight.out_features for weight in self._weights]
        self._rows = _spans(sizes)
        ranks = [0 if a is None else len(a) for a in factors[::2]]
        self.adapters = [
            (at, begin, end)
            for at, (begin, end) in enumerate(_spans(ranks))
            if factors[2 * at] is not None
        ]
        self.rank = sum(ranks)
        *first, _ = self._weights
        self._bias = None
        if self._quantized and any(weight.bias is not None for weight in first):
            self._bias = torch.cat(
                [
                    torch.zeros(w.out_features, dtype=w.dtype, device=w.device)
                    if w.bias is None
                    else w.bias.detach()
                    for w in first
                ]
            )

    def _take(self, rows: int) -> tuple[Tensor, Tensor]:
        """All weights below one another, dequantized, and [rows, out of all]; both borrowed."""
        first, width = self._weights[0], self._rows[-1][1]
        shapes = ((width, first.in_features), (rows, width))
        weights, beside = borrowed.take(first.device, first.dtype, *shapes)
        for weight, (begin, end) in zip(self._weights, self._rows, strict=True):
            weight.dense(weights[begin:end])
        return weights, beside

    def products(self, x: Tensor) -> list[Tensor]:
        """``x W' + bias`` of each.

        Quantized, all but the last are columns of one tensor: queries and keys are rotated and
        gone, while values are kept for the way back, and a view would keep the others as well.
        """
        if not self._quantized:
            return [torch.nn.functional.linear(x, w.dense(), w.bias) for w in self._weights]
        weights, _ = self._take(0)
        last = self._rows[-1][0]
        most = torch.nn.functional.linear(x, weights[:last], self._bias)
        values = torch.nn.functional.linear(x, weights[last:], self._weights[-1].bias)
        return [*(most[:, begin:end] for begin, end in self._rows[:-1]), values]

    def back(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of x, from those of the products."""
        if not self._quantized:
            dx = gradients[0] @ self._weights[0].dense()
            for gradient, weight in zip(gradients[1:], self._weights[1:], strict=True):
                dx.addmm_(gradient, weight.dense())
            return dx
        weights, beside = self._take(len(gradients[0]))
        return torch.cat(list(gradients), 1, out=beside) @ weights

    def stacked(self, factors: Factors) -> Tensor:
        """The A of all adapters below one another, [sum of ranks, in]."""
        found = [a for a in factors[::2] if a is not None]
        return found[0] if len(found) == 1 else torch.cat(found)


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(ends))


class LoraLinears(torch.autograd.Function):
    """``x W' + bias + scale (x A') B'`` of several layers; keeps x and x A' of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, *factors: Tensor | None) -> tuple[Tensor, ...]:
        """Multiply. `x`: [..., in]; `factors`: as the group's."""
        flat = x.reshape(-1, x.shape[-1])
        outs = group.products(flat)
        inner = flat @ group.stacked(factors).t()
        for at, begin, end in group.adapters:
            b: Any = factors[2 * at + 1]
            outs[at].addmm_(inner[:, begin:end], b.t(), alpha=group.layers[at].scale)
        # The factors are parameters, alive anyway (in float16 their copies, small ones): kept
        # beside what a checkpoint must recompute.
        ctx.group, ctx.shape, ctx.factors = group, x.shape, factors
        ctx.save_for_backward(x, inner)
        return tuple(shaped(out, x) for out in outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the factors."""
        group: Group = ctx.group
        x, inner = ctx.saved_tensors
        ds = [d.reshape(-1, d.shape[-1]) for d in gradients]
        found: list[Tensor | None] = [None] * len(ctx.factors)
        back = torch.empty_like(inner)
        for at, begin, end in group.adapters:
            b, scale = ctx.factors[2 * at + 1], group.layers[at].scale
            scaled_product(ds[at], b, scale, back[:, begin:end])
            found[2 * at + 1] = scaled_product(ds[at].t(), inner[:, begin:end], scale)
        da = back.t() @ x.reshape(-1, x.shape[-1])
        for at, begin, end in group.adapters:
            found[2 * at] = da[begin:end]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = group.back(ds).addmm_(back, group.stacked(ctx.factors)).view(ctx.shape)
        return dx, None, *found


class Handed:
    """Hands out what one node computed to the modules that ask for it one after the other.

    A model holds one, so that what nobody asks for lives until the next group at most. A module
    that asks with another input has its own product computed, together with the others' again:
    right in any family, and quick where q, k and v are taken of one input.
    """

    def __init__(self) -> None:
        self._group: Group | None = None
        self._x: Tensor | None = None
        self._outs: dict[int, Tensor] = {}

    def ask(
        self, group: Group, at: int, x: Tensor, compute: Callable[[], tuple[Tensor, ...]]
    ) -> Tensor:
        """Output number `at` of `compute`, which the same group's others have already called."""
        if self._x is not x or self._group is not group or at not in self._outs:
            self._group = self._x = None
            self._outs = {}
            self._outs = dict(enumerate(compute()))
            self._group, self._x = group, x
        out = self._outs.pop(at)
        if not self._outs:
            self._group = self._x = None
        return out
