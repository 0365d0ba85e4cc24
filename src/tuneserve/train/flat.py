"""All factors of an adapter in one tensor for the optimizer. Engine file: imports torch.

An adapter has some hundred small tensors, and an optimizer launches at least one kernel for each;
where a launch takes longer than the update, that is time in which the GPU does nothing. The
optimizer's arithmetic goes by elements, or by blocks of 256 of them, so the result is the same up
to which elements share a block of the 8-bit state.
"""

from __future__ import annotations

from typing import Any

import torch


class FlatParameters:
    """Parameters that are views of one, whose gradients are gathered for each step.

    Args:
        parameters: Of one type and on one device; afterwards their data are views of `flat`.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.flat = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
        self._attach()

    def _attach(self) -> None:
        begin = 0
        for parameter in self._parameters:
            end = begin + parameter.numel()
            part = self.flat.data[begin:end].view_as(parameter)
            part.copy_(parameter.data)
            parameter.data = part
            begin = end

    def gather(self, *_: Any) -> None:
        """Before a step: one gradient out of all."""
        if self._parameters[0].data_ptr() != self.flat.data_ptr():
            self._attach()  # moving a model to "cpu:0" copies it, also from the CPU
        parts = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in self._parameters]
        self.flat.grad = torch.cat([part.reshape(-1) for part in parts])

    def drop(self, *_: Any) -> None:
        """After a step."""
        self.flat.grad = None


def flat_optimizer(
    kind: Any, settings: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer over `parameters` as one."""
    held = FlatParameters(parameters)
    optimizer: torch.optim.Optimizer = kind([held.flat], **settings)
    optimizer.register_step_pre_hook(held.gather)
    optimizer.register_step_post_hook(held.drop)
    return optimizer


def can_be_flat(model: Any) -> bool:
    """Whether all that is trained are factors of one type on one device."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    factors = all(".lora_A." in name or ".lora_B." in name for name, _ in trained)
    return factors and len({(p.dtype, p.device) for _, p in trained}) == 1
