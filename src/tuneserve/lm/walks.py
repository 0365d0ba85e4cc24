"""What a trainer asks of all modules in every step, without a walk through them. Engine file.

A 7B model with its adapter is 1,500 modules. Putting them all in training mode, counting their
parameters and clearing their gradients takes a millisecond or two each, in every step, while the
GPU has nothing to do.
"""

from __future__ import annotations

import functools
import types
from typing import Any


def shorten_walks(model: Any) -> None:
    """Let `train`, `eval`, `zero_grad` and `num_parameters` of a wrapped model answer at once.

    Args:
        model: As PEFT wrapped it; from now on no module is added, and what is trained stays.
    """
    modules = list(model.modules())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    walk = model.train

    def train(self: Any, mode: bool = True) -> Any:
        return self if all(m.training is mode for m in modules) else walk(mode)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        for parameter in trained:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = parameter.grad.detach().zero_()

    model.train = types.MethodType(train, model)
    model.zero_grad = types.MethodType(zero_grad, model)
    base = model.get_base_model()
    if hasattr(base, "num_parameters"):
        base.num_parameters = functools.cache(base.num_parameters)
