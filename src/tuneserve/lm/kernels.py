"""Triton kernels for what a decoder block does between its matrix products. Engine file.

Each replaces a chain of torch operations that would read and write the same numbers several times,
and keep copies of them. The arithmetic is float32, the numbers are stored as they came. Imported
only where there is Triton and a GPU; `tuneserve.lm.elementwise` chooses, and has the same formulas
in torch.
"""

# Triton reads the kernels' parameters itself; their types are those of the call.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, N803, N806
from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_VOCABULARY_BLOCK = 4096
_PAIRS = 512


@triton.jit
def _silu_mul(g_ptr, u_ptr, out_ptr, g_row, u_row, out_row, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(g_ptr + row * g_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + at, mask=inside, other=0.0).to(tl.float32)
    out = g * tl.sigmoid(g) * u
    tl.store(out_ptr + row * out_row + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_backward(
    d_ptr,
    g_ptr,
    u_ptr,
    dg_ptr,
    du_ptr,
    d_row,
    g_row,
    u_row,
    dg_row,
    du_row,
    width,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    d = tl.load(d_ptr + row * d_row + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * g_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_row + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    dg = d * u * (s + silu * (1 - s))
    tl.store(dg_ptr + row * dg_row + at, dg.to(dg_ptr.dtype.element_ty), mask=inside)
    tl.store(du_ptr + row * du_row + at, (d * silu).to(du_ptr.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(d_ptr + row * d_row + at, (silu * u).to(d_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    length,
    q_heads,
    k_heads,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    angle_batch,
    angle_token,
    sign,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch = token // length
    token = token % length
    angles = batch * angle_batch + token * angle_token + tl.arange(0, HALF)
    cos1 = tl.load(cos_ptr + angles).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + angles + HALF).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + angles).to(tl.float32)[None, :] * sign
    sin2 = tl.load(sin_ptr + angles + HALF).to(tl.float32)[None, :] * sign
    q_parts = tl.cdiv(q_heads, HEADS)
    part = tl.program_id(1)
    if part < q_parts:
        _rotate_heads(
            q_ptr + batch * q_batch + token * q_token,
            q_out_ptr + batch * q_out_batch + token * q_out_token,
            q_head,
            q_out_head,
            part * HEADS,
            q_heads,
            cos1,
            cos2,
            sin1,
            sin2,
            HALF,
            HEADS,
        )
    else:
        _rotate_heads(
            k_ptr + batch * k_batch + token * k_token,
            k_out_ptr + batch * k_out_batch + token * k_out_token,
            k_head,
            k_out_head,
            (part - q_parts) * HEADS,
            k_heads,
            cos1,
            cos2,
            sin1,
            sin2,
            HALF,
            HEADS,
        )


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    x_head,
    out_head,
    first,
    heads,
    cos1,
    cos2,
    sin1,
    sin2,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    at = tl.arange(0, HALF)[None, :]
    head = (first + tl.arange(0, HEADS))[:, None]
    inside = head < heads
    x1 = tl.load(x_ptr + head * x_head + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + head * x_head + at + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    to = out_ptr + head * out_head + at
    tl.store(to, (x1 * cos1 - x2 * sin1).to(kind), mask=inside)
    tl.store(to + HALF, (x2 * cos2 + x1 * sin2).to(kind), mask=inside)


@triton.jit
def _cross_entropy(z_ptr, label_ptr, loss_ptr, z_row, vocabulary, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = z_ptr + row * z_row
    label = tl.load(label_ptr + row)
    target = tl.load(begin + label).to(tl.float32)
    top = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(begin + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), axis=0)
        top = higher
    log_sum = top + tl.log(total)
    tl.store(loss_ptr + row, log_sum - target)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(begin + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        d = (tl.exp(z - log_sum) - tl.where(at == label, 1.0, 0.0)) * scale
        tl.store(begin + at, d.to(z_ptr.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def _dequantize_columns(
    packed_ptr,
    scales_ptr,
    table_ptr,
    out_ptr,
    packed_row,
    scales_row,
    begin,
    pairs,
    blocksize,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    both = tl.load(packed_ptr + row * packed_row + begin // 2 + at, mask=inside, other=0)
    scale_at = scales_ptr + row * scales_row + (begin + 2 * at) // blocksize
    scale = tl.load(scale_at, mask=inside, other=0.0)
    first = tl.load(table_ptr + (both >> 4)) * scale
    second = tl.load(table_ptr + (both & 15)) * scale
    values = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    to = 2 * tl.program_id(1) * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + row * 2 * pairs + to, values, mask=to < 2 * pairs)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, [rows, width], into `out`; rows may lie apart."""
    rows, width = gate.shape
    _silu_mul[rows, triton.cdiv(width, _BLOCK)](
        gate, up, out, gate.stride(0), up.stride(0), out.stride(0), width, BLOCK=_BLOCK
    )
    return out


def silu_mul_backward(
    gradient: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    into: tuple[torch.Tensor, torch.Tensor],
    *,
    keep_product: bool,
) -> None:
    """Gradients of `gate` and `up` written into `into`, which may be these themselves.

    With `keep_product`, `gradient` is overwritten with ``silu(gate) * up``.
    """
    rows, width = gate.shape
    tensors = (gradient, gate, up, *into)
    _silu_mul_backward[rows, triton.cdiv(width, _BLOCK)](
        *tensors, *(t.stride(0) for t in tensors), width, KEEP=keep_product, BLOCK=_BLOCK
    )


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of [batch, heads, tokens, size], in one launch.

    `cos`, `sin`: [batch or 1, tokens, size]. `sign` -1 turns back, which is the gradient. The last
    dimension must be contiguous; `q` and `k` may differ in heads alone.
    """
    batch, q_heads, length, size = q.shape
    k_heads = k.shape[1]
    out = torch.empty_like(q), torch.empty_like(k)
    many = min(triton.next_power_of_2(max(q_heads, k_heads)), 16)
    _rotate[batch * length, triton.cdiv(q_heads, many) + triton.cdiv(k_heads, many)](
        q,
        k,
        *out,
        cos,
        sin,
        length,
        q_heads,
        k_heads,
        *(step for x in (q, k, *out) for step in x.stride()[:3]),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
        sign,
        HALF=size // 2,
        HEADS=many,
    )
    return out


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """Loss of each row of [rows, vocabulary]; the logits become `scale` times their gradient."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](
        logits, labels, losses, logits.stride(0), vocabulary, scale, BLOCK=_VOCABULARY_BLOCK
    )
    return losses


def dequantize_columns(
    packed: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    shape: tuple[int, int, int],
    begin: int,
    out: torch.Tensor,
) -> None:
    """See `tuneserve.lm.elementwise`."""
    rows, columns, blocksize = shape
    pairs = out.shape[1] // 2
    _dequantize_columns[rows, triton.cdiv(pairs, _PAIRS)](
        packed,
        scales,
        table,
        out,
        columns // 2,
        columns // blocksize,
        begin,
        pairs,
        blocksize,
        BLOCK=_PAIRS,
    )
