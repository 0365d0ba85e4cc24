"""Heads that score tokens without ever holding a batch's logits. Engine file."""

from __future__ import annotations

import types
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput

from tuneserve.lm.fused import HeadLoss
from tuneserve.lm.rows import IGNORED


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
    config = model.config.get_text_config()
    if hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        config.num_experts = config.num_local_experts  # the name that TRL asks for
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


def add_head_loss(model: Any) -> bool:
    """Let a causal language model sum its loss in one node: ``model(..., loss_only=True).loss``.

    That is the summed loss of the supervised tokens, in nats; gradients with it cost two products
    of the head instead of three, and a tile of 128 MiB. Only for plain heads: frozen, without bias,
    logit scale or soft cap. To be called after `add_fused_head`.

    Returns:
        Whether the head is plain; if not, nothing was changed.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scaled = any(
        getattr(config, name, None) not in (None, 1, 1.0)
        for name in (
            "final_logit_softcapping",
            "logit_scale",
            "output_multiplier",
            "lm_head_multiplier",
            "logits_scaling",
        )
    )
    routed = getattr(config, "output_router_logits", False)
    if scaled or routed or type(head) is not torch.nn.Linear or head.bias is not None:
        return False
    if head.weight.requires_grad:
        return False
    plain = model.forward

    def forward(self: Any, *args: Any, loss_only: bool = False, **kwargs: Any) -> Any:
        if not loss_only:
            return plain(*args, **kwargs)
        # A token's label is the next one; the last of a row has none.
        labels = torch.nn.functional.pad(kwargs.pop("labels")[:, 1:], (0, 1), value=IGNORED)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        loss = HeadLoss.apply(hidden.flatten(0, 1), head.weight, labels.flatten())
        return CausalLMOutput(loss=loss)

    model.forward = types.MethodType(forward, model)
    return True
