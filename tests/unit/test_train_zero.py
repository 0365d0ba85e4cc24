"""ZeRO's state between checkpoints and optimizers: moments in 8 bits, shares of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tuneserve.train.adapter import may_be_unused
from tuneserve.train.zero import _read_moment, _Share, _write_moment

BLOCK = 256


def state_of_8_bits(elements: int) -> dict[str, Any]:
    """As bitsandbytes' AdamW8bit makes it for a parameter of so many elements."""
    from bitsandbytes.functional import create_dynamic_map

    blocks = -(-elements // BLOCK)
    return {
        "step": 3,
        "state1": torch.zeros(elements, dtype=torch.uint8),
        "qmap1": create_dynamic_map(signed=True),
        "absmax1": torch.zeros(blocks),
        "state2": torch.zeros(elements, dtype=torch.uint8),
        "qmap2": create_dynamic_map(signed=False),
        "absmax2": torch.zeros(blocks),
    }


def rounded(values: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Each value as the nearest code times its block's largest size (Dettmers et al., 2022)."""
    found = np.empty_like(values)
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        largest = np.abs(block).max()
        nearest = np.abs(block[:, None] / largest - code[None, :]).argmin(1)
        found[begin : begin + BLOCK] = code[nearest] * largest
    return found


@pytest.mark.parametrize(("name", "number"), [("exp_avg", 1), ("exp_avg_sq", 2)])
def test_a_moment_of_8_bits_comes_back_as_near_as_they_are(name: str, number: int) -> None:
    elements = 2 * BLOCK + 88  # the last block is short
    values = np.random.default_rng(number).normal(size=elements).astype(np.float32)
    values *= np.repeat([1e-6, 1.0, 30.0], [BLOCK, BLOCK, 88]).astype(np.float32)
    if number == 2:
        values = values**2
    state = state_of_8_bits(elements)
    _write_moment(state, name, torch.from_numpy(values))
    expected = rounded(values, state[f"qmap{number}"].numpy())
    assert state[f"state{number}"].dtype == torch.uint8
    found = _read_moment(state, name).numpy()
    # In the middle between two codes either is right.
    largest = state[f"absmax{number}"].numpy().repeat(BLOCK)[:elements]
    assert np.all(np.abs(found - values) <= np.abs(expected - values) + 1e-4 * largest)
    assert np.mean(np.isclose(found, expected, rtol=1e-5, atol=0)) > 0.95
    untouched = 3 - number
    assert not state[f"state{untouched}"].any() and not state[f"absmax{untouched}"].any()
    # Written and read again it stays, up to the signed map's lowest code, which is -0.993: a block
    # whose largest is negative shrinks by that.
    again = state_of_8_bits(elements)
    _write_moment(again, name, _read_moment(state, name))
    assert np.all(np.abs(_read_moment(again, name).numpy() - found) <= 0.008 * largest)


@pytest.mark.parametrize("key", ["exp_avg", "state1"])
def test_a_moment_of_32_bits_is_kept_as_it_is(key: str) -> None:
    """torch's AdamW, and the 8-bit one for tensors below 4096 elements."""
    state = {key: torch.zeros(5)}
    value = torch.tensor([0.0, -1.5, 2.0**-30, 3.0, 1e9])
    _write_moment(state, "exp_avg", value)
    assert torch.equal(_read_moment(state, "exp_avg"), value)
    assert state[key] is not value


def test_shares_of_any_size_hold_each_element_once() -> None:
    names = [("a", torch.Size((2, 3)), 0), ("b", torch.Size((5,)), 6)]
    for ranks in (1, 2, 3, 4):
        size = -(-11 // ranks)
        whole = {"a": torch.full((6,), -1), "b": torch.full((5,), -1)}
        for rank in range(ranks):
            flat = torch.arange(rank * size, (rank + 1) * size)
            for name, into, of in _Share(flat, rank * size, names).cuts(size, rank * size):
                whole[name][into] = flat[of]
        assert whole["a"].tolist() == [0, 1, 2, 3, 4, 5]
        assert whole["b"].tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("name", "unused"),
    [("mlp.experts.3.up_proj", True), ("mlp.shared_expert.up_proj", False), ("q_proj", False)],
)
def test_a_single_expert_may_have_no_row(name: str, unused: bool) -> None:
    model = torch.nn.Module()
    inner = model
    for part in name.split("."):
        inner.add_module(part, torch.nn.Module())
        inner = inner.get_submodule(part)
    inner.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(1)))
    assert may_be_unused(model) is unused
    inner.get_parameter("lora_A").requires_grad = False
    assert may_be_unused(model) is False
