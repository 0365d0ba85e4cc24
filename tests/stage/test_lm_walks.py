"""Short answers of a fused model are those of the walk through all modules."""

from __future__ import annotations

import copy

import torch

from small_lora import ATTENTION, make, step
from tuneserve.lm.walks import shorten_walks


def test_modes_reach_every_module() -> None:
    """Also one that was switched by itself, and back."""
    model = make(torch.float32, ATTENTION, nf4=False)
    shorten_walks(model)
    one = model.base_model.model.model.layers[1].self_attn.v_proj.lora_A.default
    for switch in (lambda: model.eval(), lambda: one.eval(), lambda: None):
        switch()
        assert model.train() is model and all(m.training for m in model.modules())
    assert model.eval() is model and not any(m.training for m in model.modules())


def test_gradients_are_cleared_and_parameters_counted() -> None:
    model = make(torch.float32, ATTENTION, nf4=False)
    plain = copy.deepcopy(model)
    shorten_walks(model)
    step(model)
    model.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in model.parameters() if p.requires_grad)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for exclude in (True, False, True):
        count = plain.num_parameters(exclude_embeddings=exclude)
        assert model.num_parameters(exclude_embeddings=exclude) == count


def test_no_walk_where_nothing_changes() -> None:
    model = make(torch.float32, ATTENTION, nf4=False)
    shorten_walks(model)
    inside = set(map(id, model.modules())) - {id(model)}
    asked: list[int] = []
    plain = torch.nn.Module.train
    torch.nn.Module.train = lambda self, mode=True: (asked.append(id(self)), plain(self, mode))[1]  # type: ignore[method-assign]
    try:
        model.train()
        assert not asked
        model.eval()
        assert inside <= set(asked)
    finally:
        torch.nn.Module.train = plain  # type: ignore[method-assign]
