"""Checkpoints of gradient checkpointing held in host memory. Engine file: imports torch.

What a checkpointed block keeps is its input, one hidden state a block. Here it is copied to pinned
host memory beside the forward pass, and back one block ahead of the backward pass, both on streams
of their own, so that the copies cost no time as long as a block takes longer than a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_WORTH_BYTES = 2**20


@dataclass
class _Held:
    """A tensor in host memory: where, and its copy on the GPU once that is under way."""

    host: torch.Tensor
    number: int
    copied: Any
    back: torch.Tensor | None = None
    arrived: Any = None


class HostCheckpoints:
    """Stands between checkpointed blocks and what they keep."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._held: list[_Held] = []

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointing function whose inputs are held here."""

        def held(function: Any, *args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(function, *args, **kwargs)

        return held

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_cuda or tensor.nbytes < _WORTH_BYTES or not tensor.is_contiguous():
            return tensor
        # torch's allocator gives a block again once the copies that it was used in are done.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        now = torch.cuda.current_stream(self._device)
        self._out.wait_stream(now)
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            copied = self._out.record_event()
        tensor.record_stream(self._out)
        held = _Held(host, len(self._held), copied)
        self._held.append(held)
        return held

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Held):
            return packed
        self._fetch(packed)
        if packed.number:  # the block before this one goes back next
            self._fetch(self._held[packed.number - 1])
        del self._held[packed.number :]
        assert packed.back is not None
        torch.cuda.current_stream(self._device).wait_event(packed.arrived)
        tensor, packed.back = packed.back, None
        return tensor

    def _fetch(self, held: _Held) -> None:
        if held.back is not None:
            return
        held.back = torch.empty_like(held.host, device=self._device, pin_memory=False)
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(held.copied)
        with torch.cuda.stream(self._in):
            held.back.copy_(held.host, non_blocking=True)
            held.arrived = self._in.record_event()


def hold_checkpoints_on_host(model: Any) -> None:
    """From when checkpointing is switched on, hold what its blocks keep in host memory."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    device = next(model.parameters()).device
    if device.type != "cuda":
        return
    store, enable = HostCheckpoints(device), model.gradient_checkpointing_enable

    def enable_held(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                plain = module._gradient_checkpointing_func
                module._gradient_checkpointing_func = store.around(plain)

    model.gradient_checkpointing_enable = enable_held
