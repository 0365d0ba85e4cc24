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

# The MLP goes through its inner width in parts whose activations take about this much, so that the
# width does not decide the peak; narrower parts would leave matrix units idle.
_PART_BYTES = 40 * 2**20
_PART_WIDTH = 2048
_PART_MULTIPLE = 128
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


class Weight:
    """A frozen layer's weight, [out, in], however it is stored."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        state = getattr(layer.weight, "quant_state", None)
        self.quantized = state is not None
        shape = layer.weight.shape if state is None else state.shape
        self.out_features, self.in_features = int(shape[0]), int(shape[1])

    @property
    def bias(self) -> Tensor | None:
        """The layer's bias, if it has one."""
        return self._layer.bias  # type: ignore[return-value]

    def dense(self) -> Tensor:
        """All of it, in the type that is computed in."""
        return self.rows(0, self.out_features)

    def rows(self, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """Rows `begin` to `end`; written into `out` if they have to be dequantized."""
        weight = self._layer.weight
        if not self.quantized:
            return weight[begin:end].detach()
        import bitsandbytes.functional as bnb

        state = weight.quant_state
        scales = state.absmax
        if state.nested:
            scales = bnb.dequantize_blockwise(scales, state.state2)
            scales += state.offset
        scales = scales.float()
        shape = (end - begin, self.in_features)
        first, last = begin * self.in_features, end * self.in_features
        packed = weight.detach().view(-1, 1)
        if (begin, end) != (0, self.out_features):
            packed = packed[first // 2 : last // 2]
            scales = scales[first // state.blocksize : last // state.blocksize]
        arguments = (packed, scales, state.blocksize, state.quant_type, shape, state.dtype)
        operator = torch.ops.bitsandbytes.dequantize_4bit
        if out is None:
            return operator.default(*arguments)
        if out.is_cuda:
            operator.out(*arguments, out=out)
        else:  # bitsandbytes has no such operator for CPUs
            out.copy_(operator.default(*arguments))
        return out

    def columns(self, dense: Tensor, begin: int, end: int) -> Tensor:
        """Columns `begin` to `end` of `dense()`; no copy."""
        return dense[:, begin:end]


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
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(*((x, inner, a, b) if a is not None else ()))
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the factors."""
        d = gradients[0].reshape(-1, gradients[0].shape[-1])
        layer: Layer = ctx.layer
        dx = d @ layer.weight.dense() if ctx.needs_input_grad[0] else None
        da = db = None
        saved = ctx.saved_tensors  # once: a checkpointed block may be asked for them only once
        if saved:
            x, inner, a, b = saved
            back = (d @ b).mul_(layer.scale)
            da = back.t() @ x.reshape(-1, x.shape[-1])
            db = (d.t() @ inner).mul_(layer.scale)
            if dx is not None:
                dx.addmm_(back, a)
        return (None if dx is None else dx.view(ctx.shape)), None, da, db


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
            y = x.new_zeros(1).expand(x.shape)
        elif keep is Keep.ACTIVATIONS:
            pair = _Halves(flat, layers, factors)
            both = pair.forward(0, inner)
            y = _down(elementwise.silu_mul(both[:, :inner], both[:, inner:]), layers[2], factors)
            y = y.view(x.shape)
            kept = [both]
        else:
            y = _forward_in_parts(flat, layers, factors).view(x.shape)
        # With the activations kept, the input is needed for the adapters' gradients alone.
        needs_x = not kept or factors[0] is not None or factors[2] is not None
        ctx.shape, ctx.needs_x = x.shape, needs_x
        ctx.save_for_backward(*([x] if needs_x else []), *kept, *factors)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Gradients of x and of the factors."""
        saved = list(ctx.saved_tensors)
        x = saved.pop(0) if ctx.needs_x else None
        both = saved.pop(0) if ctx.keep is Keep.ACTIVATIONS else None
        layers, factors = ctx.layers, tuple(saved)
        d = gradients[0].reshape(-1, gradients[0].shape[-1])
        flat = None if x is None else x.reshape(-1, x.shape[-1])
        work = _Backward(d, flat, both, layers, factors)
        for begin, end in _parts(len(d), layers[0].weight.out_features, d.element_size()):
            work.part(begin, end)
        dx, found = work.finish()
        return dx.view(ctx.shape), None, None, *found


def _parts(rows: int, inner: int, element_bytes: int) -> list[tuple[int, int]]:
    """The inner width in equal parts, each a multiple of what matrix units like, the last less."""
    count = max(1, min(-(-rows * inner * element_bytes // _PART_BYTES), inner // _PART_WIDTH))
    width = -(-inner // count)
    width = -(-width // _PART_MULTIPLE) * _PART_MULTIPLE
    return [(begin, min(begin + width, inner)) for begin in range(0, inner, width)]


class _Halves:
    """Gate and up projection beside one another: [rows, 2 width]."""

    def __init__(
        self, x: Tensor, layers: tuple[Layer, ...], factors: tuple[Tensor | None, ...]
    ) -> None:
        self._x, self._layers = x, layers
        self._factors = (factors[0:2], factors[2:4])
        self.inner = [None if a is None else x @ a.t() for a, _ in self._factors]

    def weights(self, begin: int, end: int) -> list[Tensor]:
        """Rows of gate and of up: one tensor where they are dequantized, else two."""
        gate, up = self._layers[0].weight, self._layers[1].weight
        if not (gate.quantized and up.quantized):
            return [gate.rows(begin, end), up.rows(begin, end)]
        width = end - begin
        size = (2 * width, gate.in_features)
        out = torch.empty(size, dtype=self._x.dtype, device=self._x.device)
        gate.rows(begin, end, out[:width])
        up.rows(begin, end, out[width:])
        return [out]

    def forward(self, begin: int, end: int, weights: list[Tensor] | None = None) -> Tensor:
        """Both, for this part of the inner width."""
        weights = weights or self.weights(begin, end)
        width = end - begin
        out = torch.empty((len(self._x), 2 * width), dtype=self._x.dtype, device=self._x.device)
        for at, weight in enumerate(weights):
            place = out if len(weights) == 1 else out[:, at * width : (at + 1) * width]
            torch.mm(self._x, weight.t(), out=place)
        for at, (layer, (_, b)) in enumerate(zip(self._layers, self._factors, strict=False)):
            half = out[:, at * width : (at + 1) * width]
            if layer.weight.bias is not None:
                half += layer.weight.bias[begin:end]
            if b is not None:
                half.addmm_(self.inner[at], b[begin:end].t(), alpha=layer.scale)
        return out


def _down(product: Tensor, layer: Layer, factors: tuple[Tensor | None, ...]) -> Tensor:
    y = torch.nn.functional.linear(product, layer.weight.dense(), layer.weight.bias)
    a, b = factors[4:6]
    if a is not None and b is not None:
        y.addmm_(product @ a.t(), b.t(), alpha=layer.scale)
    return y


def _forward_in_parts(
    x: Tensor, layers: tuple[Layer, ...], factors: tuple[Tensor | None, ...]
) -> Tensor:
    halves, down = _Halves(x, layers, factors), layers[2]
    a, b = factors[4:6]
    parts = _parts(len(x), layers[0].weight.out_features, x.element_size())
    if len(parts) == 1:
        both = halves.forward(*parts[0])
        width = parts[0][1]
        return _down(elementwise.silu_mul(both[:, :width], both[:, width:]), down, factors)
    dense = down.weight.dense()
    y = inner = None
    for begin, end in parts:
        both = halves.forward(begin, end)
        width = end - begin
        product = elementwise.silu_mul(both[:, :width], both[:, width:])
        y = _add(y, product, down.weight.columns(dense, begin, end).t())
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
        both: Tensor | None,
        layers: tuple[Layer, ...],
        factors: tuple[Tensor | None, ...],
    ) -> None:
        self._d, self._x, self._both, self._layers, self._factors = d, x, both, layers, factors
        self._dense = layers[2].weight.dense()
        self._halves = _Halves(d if x is None else x, layers, factors)
        down_b = factors[5]
        self._back = None if down_b is None else (d @ down_b).mul_(layers[2].scale)
        self._inner: Tensor | None = None
        self._dx: Tensor | None = None
        self._d_inner: list[Tensor | None] = [None, None]
        self._found: list[Any] = [None if f is None else torch.empty_like(f) for f in factors]

    def part(self, begin: int, end: int) -> None:
        """Go back through this part of the inner width."""
        weights = self._halves.weights(begin, end)
        width = end - begin
        if self._both is None:
            both = into = self._halves.forward(begin, end, weights)
            gate, up = both[:, :width], both[:, width:]
        else:
            half = self._both.shape[1] // 2
            gate, up = self._both[:, begin:end], self._both[:, half + begin : half + end]
            into = self._d.new_empty((len(self._d), 2 * width))
        d = self._d @ self._layers[2].weight.columns(self._dense, begin, end)
        down_a = self._factors[4]
        if down_a is not None:
            d.addmm_(self._back, down_a[:, begin:end])
        halves = (into[:, :width], into[:, width:])
        elementwise.silu_mul_backward(d, gate, up, halves, keep_product=down_a is not None)
        if down_a is not None:  # d now holds what went into the down projection
            self._inner = _add(self._inner, d, down_a[:, begin:end].t())
            self._found[4][:, begin:end] = self._back.t() @ d  # type: ignore[union-attr]
        del d
        for at, half in enumerate(halves):
            b, scale = self._factors[2 * at + 1], self._layers[at].scale
            if b is None:
                continue
            self._d_inner[at] = _add(self._d_inner[at], half, b[begin:end])
            inner = self._halves.inner[at]
            self._found[2 * at + 1][begin:end] = (half.t() @ inner).mul_(scale)
        if len(weights) == 1:
            self._dx = _add(self._dx, into, weights[0])
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
            self._found[5] = (self._d.t() @ self._inner).mul_(self._layers[2].scale)
        return self._dx, self._found


class HeadLoss(torch.autograd.Function):
    """Summed loss of rows; logits exist a few rows at a time.

    The gradient is computed in the forward pass, while the logits are there, so nothing is
    multiplied twice; the head itself is frozen.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """`hidden`: [rows, size]; `weight`: [vocabulary, size]; `labels`: [rows]."""
        rows = max(64, _LOGITS_BYTES // (weight.shape[0] * hidden.element_size()))
        d = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), rows):
            end = begin + rows
            logits = hidden[begin:end] @ weight.t()
            total += elementwise.cross_entropy(logits, labels[begin:end], 1.0).sum()
            if d is not None:
                torch.mm(logits, weight, out=d[begin:end])
        ctx.save_for_backward(d)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient that the forward pass left, times the one that comes in."""
        (d,) = ctx.saved_tensors
        return d.mul_(gradients[0].to(d.dtype)), None, None  # read once: no copy
