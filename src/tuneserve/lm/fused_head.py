"""TRL's fused head, which scores tokens without ever holding a batch's logits. Engine file."""

from __future__ import annotations

from typing import Any


def add_fused_head(model: Any, *, float32: bool = False) -> None:
    """Let a causal language model score labels tile by tile.

    Afterwards ``model(..., labels=..., fused_lm_head=True).log_probs`` holds one number a token,
    zero where not supervised; the vocabulary exists only tile by tile, in the forward and the
    backward pass. Logit scales and soft caps are the model's own. To be called before PEFT wraps
    the model, or with the model that PEFT wrapped.

    Args:
        model: The model itself, not its PEFT wrapper.
        float32: Multiply in float32 whatever the weights are: exact losses, at some cost.
    """
    from trl.trainer.utils import add_fused_lm_head

    score_supervised_only()
    add_fused_lm_head(model, cast_lm_head_to_fp32=float32, outputs=())


def score_supervised_only() -> None:
    """Leave out positions without a label on CPUs too.

    Where there is no Triton, TRL multiplies every position by the whole vocabulary, since on some
    accelerators a changing number of positions means compiling again. A CPU compiles nothing, and
    on chat data half the positions carry no label.
    """
    import trl.trainer.utils as trl_utils

    if hasattr(trl_utils, "_use_triton"):  # a private name: without it, it is only slower
        trl_utils._use_triton = lambda device: True
