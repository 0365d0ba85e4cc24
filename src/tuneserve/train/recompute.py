"""Gradient checkpointing of decoder blocks (Chen et al., 2016). Engine file: imports torch.

torch's own way keeps, of each block, the graph that will be computed again, and calls Python twice
for each tensor in it: where a launch takes as long as a product, a step waits for that. Here a
block whose form is known is one autograd node: nothing but its input is kept, and its graph exists
only while its gradients are computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tuneserve.train.offload import OFFLOAD_PLACES, BlockInputs

# Families whose blocks take a hidden state and give one, and leave nothing else behind. Where a
# block also gives its router's scores to a loss, or its keys to a later block, the first pass of a
# node would give them without what their gradients need. A test holds each of these to torch's own.
_GIVE_ONE_STATE = frozenset(
    {
        "cohere",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "granite",
        "llama",
        "ministral3",
        "mistral",
        "olmo",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
    }
)
_RANDOM = re.compile("drop|jitter")


class _Recomputed(torch.autograd.Function):
    """A block's output, from its input; computed again on the way back."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, function: Any, number: int, store: BlockInputs | None
    ) -> torch.Tensor:
        """`function` of `hidden`, which is kept, or what `store` has for it."""
        kept = hidden if store is None else store.pack(hidden, number)
        ctx.function, ctx.store, ctx.kept = function, store, None
        if isinstance(kept, torch.Tensor):
            ctx.save_for_backward(kept)  # as an attribute it would live until the step's end
        else:
            ctx.kept = kept
        out: torch.Tensor = function(hidden)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the input; the block's parameters get theirs on the way."""
        saved = ctx.saved_tensors
        hidden = saved[0] if ctx.kept is None else ctx.store.unpack(ctx.kept)
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            root = _Begun.apply(ctx.function(hidden), [_taken(gradients[0])])
        root.backward()
        return hidden.grad, None, None, None


class _Begun(torch.autograd.Function):
    """Where the way back through a block begins: nobody else holds its gradient.

    Given to `backward()` instead, the gradient would lie there until the block's own is done, and
    no sum could be made in its place: one hidden state more at the moment that needs most.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, gradient: list[torch.Tensor]) -> torch.Tensor:
        """Any number; `gradient`: the one of `out`, which is read by nobody."""
        ctx.gradient = gradient
        return out.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of `out`, given away."""
        return ctx.gradient.pop(), None


def _taken(gradient: torch.Tensor) -> torch.Tensor:
    """What a block's output got, which comes from the next block alone; its old holder has none."""
    taken = gradient.detach()
    gradient.data = gradient.new_empty(0)
    return taken


def draws(model: Any) -> bool:
    """Whether a pass draws random numbers: then it is repeated only with the generator's state.

    Dropout is a module, or where the family's code calls the function itself, a number in the
    configuration under one of many names (`resid_pdrop`, `attention_dropout`, `layerdrop`); so is
    the noise of a router of experts (`router_jitter_noise`).
    """
    modules = any(
        isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()
    )
    return modules or _says_random(model.config.get_text_config().to_dict())


def _says_random(settings: Mapping[str, Any]) -> bool:
    return any(
        _says_random(value)  # attention and experts may have settings of their own (MPT, DBRX)
        if isinstance(value, Mapping)
        else _RANDOM.search(str(name)) and _positive(value)
        for name, value in settings.items()
    )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def recompute_blocks(model: Any, *, offload: bool, whole: bool) -> None:
    """From when checkpointing is switched on, do it as this module says, wherever it can be done.

    Args:
        model: Wrapped with an adapter.
        offload: Keep inputs as `BlockInputs` does; on a GPU only.
        whole: Whether blocks may be one node: nothing in them is random, and nobody else looks at
            the gradients of their parameters while these are computed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    device = next(model.parameters()).device
    # Without those of a vision tower, which text never calls: inputs are held by their number.
    decoder = model.get_decoder()
    blocks = [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
    store = None
    if offload and device.type == "cuda" and len(blocks) > OFFLOAD_PLACES:
        store = BlockInputs(device, len(blocks), OFFLOAD_PLACES)
    whole = whole and getattr(model.config.get_text_config(), "model_type", "") in _GIVE_ONE_STATE
    enable = model.gradient_checkpointing_enable

    def enable_ours(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        for number, block in enumerate(blocks):
            function = block._gradient_checkpointing_func
            if store is not None:
                function = store.around(function, number)
            if whole:
                function = _as_one_node(function, number, store)
            block._gradient_checkpointing_func = function

    model.gradient_checkpointing_enable = enable_ours


def _as_one_node(
    plain: Callable[..., Any], number: int, store: BlockInputs | None
) -> Callable[..., Any]:
    def as_node(function: Any, *args: Any) -> Any:
        # A node whose input needs no gradient is none: its parameters would never get theirs.
        if len(args) != 1 or not (torch.is_grad_enabled() and args[0].requires_grad):
            return plain(function, *args)
        return _Recomputed.apply(args[0], function, number, store)

    return as_node
