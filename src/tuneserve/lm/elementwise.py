"""What a decoder block does between its matrix products, fused where there is Triton. Engine file.

Every function is one formula: in Triton on a GPU (`tuneserve.lm.kernels`), in torch elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from tuneserve.lm.exhausted import is_out_of_memory
from tuneserve.lm.fourbit import FourBit

log = logging.getLogger(__name__)


@functools.cache
def _kernels() -> Any:
    from tuneserve.lm import kernels

    return kernels


@functools.cache
def has_triton() -> bool:
    """Whether Triton compiles and runs here. It comes with torch where there is a GPU, but wants a
    C compiler, which a bare container has not.
    """
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    x = torch.linspace(-4, 4, 16, device="cuda").view(1, 16)
    wanted = torch.nn.functional.silu(x) * x
    try:
        for _ in range(2):  # the second launch is by the compiled form itself
            found = _kernels().silu_mul(x, x, torch.zeros_like(x))
            if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                raise RuntimeError(f"silu(x) * x came out as {found.tolist()}")
    # Compilers, drivers and other versions of Triton fail with errors of their own.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        log.warning("Triton's kernels cannot be used: torch's are slower (%s)", error)
        return False
    return True


def _fused(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and has_triton()


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, [rows, width], into `out`."""
    if _fused(gate):
        return _kernels().silu_mul(gate, up, out)
    return torch.mul(torch.nn.functional.silu(gate), up, out=out)


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
    if _fused(gate):
        _kernels().silu_mul_backward(gradient, gate, up, into, keep_product=keep_product)
        return
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    # silu' = s + g s (1 - s) = s + silu - silu s
    slope = (sigmoid + silu).addcmul_(silu, sigmoid, value=-1).mul_(gradient).mul_(up)
    product = silu * up if keep_product else None
    torch.mul(gradient, silu, out=into[1])
    into[0].copy_(slope)
    if product is not None:
        gradient.copy_(product)


def dequantize(stored: FourBit, first: int, row_blocks: int, out: torch.Tensor) -> None:
    """Blocks of a 4-bit weight into `out`, in one launch, their scales included. On a GPU only.

    Args:
        stored: The weight.
        first: Block that the first row of `out` begins with.
        row_blocks: From there to the block that the next row of `out` begins with.
        out: [rows, so many blocks' weights], contiguous.
    """
    _kernels().dequantize(stored, first, row_blocks, out)


class _Rotate(torch.autograd.Function):
    """Rotary position embedding (Su et al., 2021) of queries and keys; only the angles are kept."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # All blocks share the angles: nothing that a checkpoint must hold and recompute for each.
        ctx.angles = (cos, sin)
        rotated: tuple[torch.Tensor, torch.Tensor] = _kernels().rotate(q, k, cos, sin, 1.0)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = (d if d.stride(-1) == 1 else d.contiguous() for d in gradients)
        return *_kernels().rotate(*whole, *ctx.angles, -1.0), None, None


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for transformers' ``apply_rotary_pos_emb`` of [batch, heads, tokens, size].

    The halves of `cos` and of `sin` must be equal, as they are in every family that rotates halves:
    the gradient is then the rotation back.
    """
    if unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1] or cos.stride(-1) != 1:
        raise ValueError("rotary: angles of [batch, tokens, size] wanted")
    rotated: tuple[torch.Tensor, torch.Tensor] = _Rotate.apply(q, k, cos, sin)
    return rotated


def rotary_or(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """`rotary` where the angles fill a head, else the family's own function.

    Phi, GPT-NeoX and others rotate a part of each head: their angles say so only when they come.
    """

    def either(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        if unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1] or cos.stride(-1) != 1:
            return theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotary(q, k, cos, sin)

    either.fused = True  # type: ignore[attr-defined]
    return either


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
    """Loss of each row of [rows, vocabulary]; the logits become `scale` times their gradient."""
    if _fused(logits):
        return _kernels().cross_entropy(logits, labels, scale)
    rows = torch.arange(len(labels), device=logits.device)
    z = logits.float()
    log_sum = z.logsumexp(-1)
    losses = log_sum - z[rows, labels]
    z = (z.sub_(log_sum.unsqueeze(-1)) if z is not logits else z - log_sum.unsqueeze(-1)).exp_()
    z[rows, labels] -= 1
    logits.copy_(z.mul_(scale))
    return losses
