"""A frozen linear layer with its adapter, a gated MLP, and the head with its loss, each as one
autograd node. Engine file: imports torch.

What is multiplied is the sum ``x W' + scale (x A') B'`` (LoRA, Hu et al., 2021); W is frozen, in 16
bits or in NF4. A dequantized weight lives for one product and is never kept for the backward pass.
Each input is kept once, products are added into their sum by the matrix product itself, and there
are no copies in another type. The plain modules give the same numbers up to rounding, and
`tests/stage/test_lm_fused.py` holds them to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tuneserve.lm import elementwise
from tuneserve.lm.frozen import Weight
from tuneserve.lm.rows import IGNORED
from tuneserve.lm.scratch import MlpPart, MlpScratch, borrowed

# The MLP goes through its inner width in parts whose activations and dequantized weights take about
# this much, so that neither the width nor the rows decide the peak; narrower parts than _PART_WIDTH
# would leave matrix units idle, and each costs a handful of launches.
_PART_BYTES = 216 * 2**20
_PART_WIDTH = 2048
# Tiles of matrix units are 128 x 256. In widths of so many, the tiles of a few thousand rows come
# out near a multiple of a large card's 132 multiprocessors; between them up to a fifth is idle.
_PART_MULTIPLE = 1024
# Logits of the head exist for so many bytes at a time.
_LOGITS_BYTES = 128 * 2**20


class Keep(Enum):
    """What an MLP keeps for its backward pass.

    ACTIVATIONS: gate and up projection. INPUT: its input, the rest is computed again. NOTHING_NEW:
    like INPUT, in the recomputation of a checkpointed block, where nobody reads the output.
    """

    ACTIVATIONS = 1
    INPUT = 2
    NOTHING_NEW = 3


@dataclass(frozen=True)
class Layer:
    """A frozen weight and the scale of its adapter, if it has one."""

    weight: Weight
    scale: float = 0.0


class LoraLinear(torch.autograd.Function):
    """``x W' + bias + scale (x A') B'``; keeps x and x A'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, a: Tensor | None, b: Tensor | None) -> Tensor:
        """Multiply. `x`: [..., in]; `a`: [rank, in]; `b`: [out, rank], both or neither."""
        flat = x.reshape(-1, x.shape[-1])
        weight = layer.weight
        out = torch.nn.functional.linear(flat, weight.dense(), weight.bias)
        inner = None
        if a is not None and b is not None:
            inner = flat @ a.t()
            out.addmm_(inner, b.t(), alpha=layer.scale)
        # The factors are parameters, alive anyway: kept beside what a checkpoint must recompute.
        ctx.layer, ctx.shape, ctx.factors = layer, x.shape, (a, b)
        ctx.save_for_backward(*((x, inner) if a is not None else ()))
        return shaped(out, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the factors."""
        d = gradients[0].reshape(-1, gradients[0].shape[-1])
        layer: Layer = ctx.layer
        dx = d @ layer.weight.dense() if ctx.needs_input_grad[0] else None
        da = db = None
        saved = ctx.saved_tensors  # once: a checkpointed block may be asked for them only once
        if saved:
            x, inner = saved
            a, b = ctx.factors
            back = scaled_product(d, b, layer.scale)
            da = back.t() @ x.reshape(-1, x.shape[-1])
            db = scaled_product(d.t(), inner, layer.scale)
            if dx is not None:
                dx.addmm_(back, a)
        return (None if dx is None else dx.view(ctx.shape)), None, da, db


def shaped(out: Tensor, x: Tensor) -> Tensor:
    """`out`, [rows, width], in as many dimensions as `x`, and for autograd no view of anything.

    A node's views must not be changed in place, and some families (OLMo) clamp their queries, keys
    and values so.
    """
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]])


def scaled_product(left: Tensor, right: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """``scale left @ right`` in one launch, into `out` if there is one."""
    if out is None:
        out = left.new_empty((left.shape[0], right.shape[1]))
    return out.addmm_(left, right, beta=0, alpha=scale)  # of beta 0: not even NaN is read


class GatedMlp(torch.autograd.Function):
    """``down(silu(gate(x)) * up(x))``, through its inner width part by part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layers: tuple[Layer, Layer, Layer], keep: Keep, *factors: Tensor | None
    ) -> Tensor:
        """Multiply. `layers`: gate, up, down; `factors`: A and B of each, or None."""
        ctx.layers, ctx.keep = layers, keep
        flat = x.reshape(-1, x.shape[-1])
        inner = layers[0].weight.out_features
        kept: list[Tensor] = []
        if keep is Keep.NOTHING_NEW:
            y = x.new_empty(1).expand(x.shape)
        else:
            if keep is Keep.ACTIVATIONS:
                kept = [torch.empty((len(flat), 2 * inner), dtype=x.dtype, device=x.device)]
            y = _forward(flat, layers, factors, kept[0] if kept else None).view(x.shape)
        # With the activations kept, the input is needed for the adapters' gradients alone.
        needs_x = not kept or factors[0] is not None or factors[2] is not None
        ctx.shape, ctx.needs_x = x.shape, needs_x
        ctx.factors = factors
        ctx.save_for_backward(*([x] if needs_x else []), *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gradients of x and of the factors."""
        saved = list(ctx.saved_tensors)
        x = saved.pop(0) if ctx.needs_x else None
        both = saved.pop(0) if ctx.keep is Keep.ACTIVATIONS else None
        layers, factors = ctx.layers, ctx.factors
        d = gradients[0].reshape(-1, gradients[0].shape[-1])
        flat = None if x is None else x.reshape(-1, x.shape[-1])
        work = _Backward(d, flat, both, layers, factors)
        for begin, end in work.parts:
            work.part(begin, end)
        dx, found = work.finish()
        return dx.view(ctx.shape), None, None, *found


def _parts(rows: int, layers: tuple[Layer, ...], element_bytes: int) -> list[tuple[int, int]]:
    """The inner width in equal parts, each a multiple of what matrix units like, the last less."""
    gate, down = layers[0].weight, layers[2].weight
    inner = gate.out_features
    column = 3 * rows * element_bytes  # product, gate and up projection; and the weights to these
    column += 2 * gate.in_features * element_bytes * gate.quantized
    column += down.out_features * element_bytes * down.quantized
    count = max(1, min(-(-inner * column // _PART_BYTES), inner // _PART_WIDTH))
    width = -(-inner // count)
    width = -(-width // _PART_MULTIPLE) * _PART_MULTIPLE
    return [(begin, min(begin + width, inner)) for begin in range(0, inner, width)]


class _Work:
    """The borrowed memory of one pass through an MLP, and what all of its parts need."""

    def __init__(
        self,
        x: Tensor,
        layers: tuple[Layer, ...],
        factors: tuple[Tensor | None, ...],
        width: int,
        *,
        both: bool,
    ) -> None:
        self._x, self._layers = x, layers
        self._factors = (factors[0:2], factors[2:4])
        gate, up, down = (layer.weight for layer in layers)
        self._together = gate.quantized and up.quantized
        rows = len(x)
        shapes = [
            (rows, width),
            (rows, 2 * width if both else 0),
            (2 * width if self._together else 0, gate.in_features),
            (down.out_features if down.quantized else 0, width),
        ]
        self._scratch = borrowed.take(x.device, x.dtype, *shapes, form=MlpScratch)
        self._scales = [weight.scales() for weight in (gate, up, down)]
        self.inner = [None if a is None else x @ a.t() for a, _ in self._factors]

    def part(self, width: int) -> MlpPart:
        """Memory for a part of this width."""
        part: MlpPart = self._scratch.part(width)
        return part

    def weights(self, begin: int, end: int, part: MlpPart) -> list[Tensor]:
        """Rows of gate and of up: one tensor where they are dequantized, else two."""
        gate, up = self._layers[0].weight, self._layers[1].weight
        if not self._together:
            return [gate.rows(begin, end, None, None), up.rows(begin, end, None, None)]
        gate.rows(begin, end, self._scales[0], part.weights[0])
        up.rows(begin, end, self._scales[1], part.weights[1])
        return [part.pair]

    def down(self, begin: int, end: int, part: MlpPart) -> tuple[Tensor, Tensor]:
        """Columns of the down projection, [out, end - begin], and the same transposed."""
        weight = self._layers[2].weight
        if weight.quantized:
            return weight.columns(begin, end, self._scales[2], part.down), part.down_t
        columns = weight.columns(begin, end, None, None)
        return columns, columns.t()

    def project(
        self, begin: int, end: int, weights: list[Tensor], part: MlpPart, kept: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Gate and up projection of a part of the inner width.

        Args:
            begin: First column of the inner width.
            end: One after the last.
            weights: As `weights` gives them.
            part: Memory of the part.
            kept: Two of [rows, end - begin], to write them into; None: `part.halves`.
        """
        halves: tuple[Tensor, Tensor] = part.halves if kept is None else kept
        if len(weights) == 1 and kept is None:
            torch.mm(self._x, part.pair_t, out=part.both)
        else:
            parts = part.weights if len(weights) == 1 else weights
            for half, weight in zip(halves, parts, strict=True):
                torch.mm(self._x, weight.t(), out=half)
        for at, (_, b) in enumerate(self._factors):
            layer = self._layers[at]
            if layer.weight.bias is not None:
                halves[at].add_(layer.weight.bias[begin:end])
            if b is not None:
                halves[at].addmm_(self.inner[at], b[begin:end].t(), alpha=layer.scale)
        return halves


def _forward(
    x: Tensor, layers: tuple[Layer, ...], factors: tuple[Tensor | None, ...], kept: Tensor | None
) -> Tensor:
    """The MLP's output. With `kept`, [rows, 2 inner], gate and up projection are left there."""
    a, b = factors[4:6]
    down = layers[2]
    parts = _parts(len(x), layers, x.element_size())
    work = _Work(x, layers, factors, parts[0][1], both=kept is None)
    half = 0 if kept is None else kept.shape[1] // 2
    y = inner = None
    for begin, end in parts:
        part = work.part(end - begin)
        into = None
        if kept is not None:
            into = (kept[:, begin:end], kept[:, half + begin : half + end])
        gate, up = work.project(begin, end, work.weights(begin, end, part), part, into)
        product = elementwise.silu_mul(gate, up, part.product)
        y = _add(y, product, work.down(begin, end, part)[1])
        if a is not None:
            inner = _add(inner, product, a[:, begin:end].t())
    assert y is not None
    if down.weight.bias is not None:
        y += down.weight.bias
    if inner is not None and b is not None:
        y.addmm_(inner, b.t(), alpha=down.scale)
    return y


def _add(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, in place; without a total, the product."""
    return left @ right if total is None else total.addmm_(left, right)


class _Backward:
    """Collects the MLP's gradients part by part."""

    def __init__(
        self,
        d: Tensor,
        x: Tensor | None,
        kept: Tensor | None,
        layers: tuple[Layer, ...],
        factors: tuple[Tensor | None, ...],
    ) -> None:
        self._d, self._x, self._kept, self._layers, self._factors = d, x, kept, layers, factors
        self.parts = _parts(len(d), layers, d.element_size())
        self._work = _Work(d if x is None else x, layers, factors, self.parts[0][1], both=True)
        down_b = factors[5]
        self._back = None if down_b is None else scaled_product(d, down_b, layers[2].scale)
        self._inner: Tensor | None = None
        self._dx: Tensor | None = None
        self._d_inner: list[Tensor | None] = [None, None]
        self._found: list[Any] = [None if f is None else torch.empty_like(f) for f in factors]

    def part(self, begin: int, end: int) -> None:
        """Go back through this part of the inner width."""
        work, part = self._work, self._work.part(end - begin)
        weights, halves = work.weights(begin, end, part), part.halves
        if self._kept is None:
            gate, up = work.project(begin, end, weights, part)
        else:
            half = self._kept.shape[1] // 2
            gate, up = self._kept[:, begin:end], self._kept[:, half + begin : half + end]
        d = torch.mm(self._d, work.down(begin, end, part)[0], out=part.product)
        down_a = self._factors[4]
        if down_a is not None:
            d.addmm_(self._back, down_a[:, begin:end])
        elementwise.silu_mul_backward(d, gate, up, halves, keep_product=down_a is not None)
        if down_a is not None:  # d now holds what went into the down projection
            self._inner = _add(self._inner, d, down_a[:, begin:end].t())
            scaled_product(self._back.t(), d, 1.0, self._found[4][:, begin:end])  # type: ignore[union-attr]
        for at, half in enumerate(halves):
            b, scale = self._factors[2 * at + 1], self._layers[at].scale
            if b is None:
                continue
            self._d_inner[at] = _add(self._d_inner[at], half, b[begin:end])
            scaled_product(half.t(), work.inner[at], scale, self._found[2 * at + 1][begin:end])
        if len(weights) == 1:
            self._dx = _add(self._dx, part.both, weights[0])
        else:
            for half, weight in zip(halves, weights, strict=True):
                self._dx = _add(self._dx, half, weight)

    def finish(self) -> tuple[Tensor, list[Any]]:
        """The gradient of x, and those of the factors."""
        assert self._dx is not None
        for at in (0, 1):
            a, back = self._factors[2 * at], self._d_inner[at]
            if a is None or back is None:
                continue
            back.mul_(self._layers[at].scale)
            self._found[2 * at] = back.t() @ self._x
            self._dx.addmm_(back, a)
        if self._inner is not None:
            self._found[5] = scaled_product(self._d.t(), self._inner, self._layers[2].scale)
        return self._dx, self._found


class HeadLoss(torch.autograd.Function):
    """Summed loss of the rows that have a label; logits exist a few rows at a time.

    The gradient is computed in the forward pass, while the logits are there, so nothing is
    multiplied twice; the head itself is frozen. The CPU waits once, for the number of rows.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """`hidden`: [rows, size]; `weight`: [vocabulary, size]; `labels`: [rows], or IGNORED."""
        at = (labels != IGNORED).nonzero().squeeze(1)
        ctx.rows = len(hidden)
        hidden, labels = hidden.index_select(0, at), labels.index_select(0, at)
        rows = max(64, _LOGITS_BYTES // (weight.shape[0] * hidden.element_size()))
        d = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), rows):
            end = begin + rows
            part = hidden[begin:end]
            (logits,) = borrowed.take(hidden.device, hidden.dtype, (len(part), len(weight)))
            torch.mm(part, weight.t(), out=logits)
            total += elementwise.cross_entropy(logits, labels[begin:end], 1.0).sum()
            if d is not None:
                torch.mm(logits, weight, out=d[begin:end])
        ctx.save_for_backward(d, at)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient that the forward pass left, times the one that comes in."""
        d, at = ctx.saved_tensors
        d.mul_(gradients[0].to(d.dtype))  # read once: no copy
        return d.new_zeros(ctx.rows, d.shape[1]).index_copy_(0, at, d), None, None
