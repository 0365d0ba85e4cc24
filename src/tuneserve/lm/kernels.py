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

from typing import Any

import torch
import triton
import triton.language as tl

from tuneserve.lm.fourbit import FourBit

_BLOCK = 1024
_VOCABULARY_BLOCK = 4096
# Blocks of 4-bit weights that one program dequantizes: of whole rows, and of some columns of a row.
_ROW_BLOCKS = 64
_COLUMN_BLOCKS = 32
_MOST_FORMS = 4096


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
    sign,
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


@triton.jit(do_not_specialize=["first", "row_blocks", "blocks"])
def _dequantize(
    packed_ptr,
    absmax_ptr,
    code_ptr,
    second_ptr,
    table_ptr,
    out_ptr,
    offset,
    first,
    row_blocks,
    blocks,
    NESTED: tl.constexpr,
    SECOND: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < blocks
    block = row * row_blocks + first + at
    scale = tl.load(absmax_ptr + block, mask=inside, other=0)
    if NESTED:
        second = tl.load(second_ptr + block // SECOND, mask=inside, other=0.0)
        scale = tl.load(code_ptr + scale) * second + offset
    pair = tl.arange(0, SIZE // 2)[None, :]
    both = tl.load(packed_ptr + block[:, None] * (SIZE // 2) + pair, mask=inside[:, None], other=0)
    high = tl.load(table_ptr + (both >> 4)) * scale[:, None]
    low = tl.load(table_ptr + (both & 15)) * scale[:, None]
    values = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    to = (row * blocks + at)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + to, values, mask=inside[:, None])


_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor, ...],
    floats: tuple[float, ...],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
    **options: Any,
) -> None:
    """``kernel[grid](*tensors, *floats, *numbers, *constants)``, in a third of the time.

    Triton looks at every argument of every launch, for which of the forms it compiled the kernel
    in. That takes 30 us, longer than most kernels run. The form depends on the tensors' types and
    alignment and on the numbers, so it is looked up by these.
    """
    address = 0
    for tensor in tensors:
        address |= tensor.data_ptr()
    arguments = (*tensors, *floats, *numbers, *constants)
    types = [tensor.dtype for tensor in tensors]
    # By identity: Triton's own hash of a kernel takes a lock. None of these kernels ever goes away.
    key = (id(kernel), tensors[0].get_device(), grid, numbers, constants, *types)
    found = _compiled.get(key) if address % 16 == 0 else None
    if found is not None:
        found(*arguments)
        return
    made = kernel[grid](*arguments, **options)
    if address % 16 == 0 and hasattr(made, "function"):
        if len(_compiled) > _MOST_FORMS:  # lengths of batches differ
            _compiled.clear()
        _compiled[key] = made[grid]


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, [rows, width], into `out`; rows may lie apart."""
    rows, width = gate.shape
    tensors = (gate, up, out)
    numbers = (gate.stride(0), up.stride(0), out.stride(0), width)
    _launch(_silu_mul, (rows, -(-width // _BLOCK), 1), tensors, (), numbers, (_BLOCK,))
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
    numbers = (*(t.stride(0) for t in tensors), width)
    constants = (keep_product, _BLOCK)
    grid = (rows, -(-width // _BLOCK), 1)
    _launch(_silu_mul_backward, grid, tensors, (), numbers, constants)


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
    numbers = (
        length,
        q_heads,
        k_heads,
        *(step for x in (q, k, *out) for step in x.stride()[:3]),
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(1),
    )
    grid = (batch * length, -(-q_heads // many) + -(-k_heads // many), 1)
    _launch(_rotate, grid, (q, k, *out, cos, sin), (sign,), numbers, (size // 2, many))
    return out


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """Loss of each row of [rows, vocabulary]; the logits become `scale` times their gradient."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](
        logits, labels, losses, logits.stride(0), vocabulary, scale, BLOCK=_VOCABULARY_BLOCK
    )
    return losses


def dequantize(stored: FourBit, first: int, row_blocks: int, out: torch.Tensor) -> None:
    """See `tuneserve.lm.elementwise`."""
    rows, blocks = out.shape[0], out.shape[1] // stored.block_size
    if row_blocks == blocks:  # rows that lie below one another are one
        rows, blocks = 1, rows * blocks
    tile = _ROW_BLOCKS if rows == 1 else _COLUMN_BLOCKS
    tensors = (
        stored.packed,
        stored.absmax,
        stored.code,
        stored.second_absmax,
        stored.table,
        out,
    )
    numbers = (first, row_blocks, blocks)
    constants = (stored.nested, stored.second_block_size, stored.block_size, tile)
    _launch(
        _dequantize,
        (-(-blocks // tile), rows, 1),
        tensors,
        (stored.offset,),
        numbers,
        constants,
        enable_fp_fusion=False,  # a product and a sum, each rounded, as the library does it
    )
