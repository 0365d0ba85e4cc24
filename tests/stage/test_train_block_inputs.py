"""Inputs of checkpointed blocks in their places and in host memory: the gradients stay the same."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tuneserve.plan import fusedstep
from tuneserve.train import offload
from tuneserve.train.offload import BlockInputs
from tuneserve.train.recompute import _as_one_node

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
BLOCKS = 7


def plain(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def gradients(
    blocks: list[torch.nn.Linear],
    rows: list[torch.Tensor],
    store: BlockInputs | None = None,
    *,
    node: bool = False,
) -> list[torch.Tensor]:
    """Of several passes, one after the other, added up; last, those of the rows."""
    for batch in rows:
        hidden = batch.requires_grad_()
        for number, block in enumerate(blocks):

            def run(x: torch.Tensor, block: torch.nn.Linear = block) -> torch.Tensor:
                return x + block(x).sin()

            around = store.around(plain, number) if store else plain
            hidden = (_as_one_node(around, number, store) if node else around)(run, hidden)
        hidden.square().mean().backward()
    return [block.weight.grad for block in blocks] + [batch.grad for batch in rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("places", "place_bytes"),
    [(1, 2**40), (2, 2**40), (3, 2**40), (6, 2**40), (BLOCKS, 2**40), (20, 2**40), (6, 20_000)],
)
@pytest.mark.parametrize("node", [False, True])
def test_gradients_are_bit_equal(device: str, places: int, place_bytes: int, node: bool) -> None:
    """Also with shorter rows, with longer ones than before, and after a pass without a way back."""
    size = 512 if device == "cuda" else 32
    found = []
    for held in (False, True):
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(size, size, device=device) for _ in range(BLOCKS)]
        rows = [torch.randn(n, size, device=device) for n in (40, 24, 90)]
        store = BlockInputs(torch.device(device), BLOCKS, places, place_bytes) if held else None
        if store:
            lost = rows[0].clone().requires_grad_()
            for number in range(3):
                around = store.around(plain, number)
                lost = (_as_one_node(around, number, store) if node else around)(torch.sin, lost)
        found.append(gradients(blocks, rows, store, node=node and held))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)


def test_a_block_as_one_node_has_the_same_gradients() -> None:
    """Bit for bit; and with an input that needs none, its parameters still get theirs."""
    found = []
    for node in (False, True):
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(8, 8) for _ in range(BLOCKS)]
        found.append(gradients(blocks, [torch.randn(n, 8) for n in (5, 3)], node=node))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)
    block, rows = torch.nn.Linear(8, 8), torch.randn(5, 8)
    _as_one_node(plain, 0, None)(block, rows).sum().backward()
    assert torch.allclose(block.weight.grad, rows.sum(0).expand(8, 8))


def test_a_block_as_one_node_keeps_its_input_alone() -> None:
    """Until its way back, and no longer, though the loss is still there."""
    inputs: list[Any] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        inputs.append(weakref.ref(x))
        return x.sin().cos().exp()

    hidden = torch.randn(5, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = hidden * 1
        for _ in range(3):
            out = _as_one_node(plain, 0, None)(run, out)
    assert [t.numel() for t in kept] == [40, 40, 40]
    kept.clear()
    loss = out.sum()
    del out
    assert all(x() is not None for x in inputs)
    loss.backward()
    assert len(inputs) == 6 and not any(x() is not None for x in inputs)


class Top(torch.autograd.Function):
    """Gives a gradient of its own, and keeps a weak reference to its memory."""

    memory: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = torch.ones(5, 8)
        Top.memory = gradient.untyped_storage()._weak_ref()
        return gradient


class Bottom(torch.autograd.Function):
    """Looks whether that memory was given back."""

    given_back: bool | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Bottom.given_back = torch.UntypedStorage._expired(Top.memory)
        return gradients[0]


def test_the_gradient_of_an_output_is_gone_before_the_block_is_through() -> None:
    """One hidden state, in the moment that needs most; torch's reentrant checkpoints keep it."""
    linear, found = torch.nn.Linear(8, 8), []
    reentrant = functools.partial(checkpoint, use_reentrant=True)
    for function in (reentrant, plain, _as_one_node(plain, 0, None)):
        rows = torch.randn(5, 8, requires_grad=True)
        Top.apply(function(lambda x: linear(Bottom.apply(x)), rows * 1)).backward()
        assert torch.allclose(rows.grad, linear.weight.sum(0).expand(5, 8))
        found.append(Bottom.given_back)
    assert found == [False, True, True]


def test_the_plan_counts_with_the_same_places() -> None:
    assert offload.OFFLOAD_PLACES == fusedstep.OFFLOAD_PLACES
    assert offload.OFFLOAD_BYTES == fusedstep.OFFLOAD_BYTES


def test_long_rows_have_fewer_places() -> None:
    """Inputs of 4 kB in places of 10 kB together: two."""
    store = BlockInputs(torch.device("cpu"), BLOCKS, 6, 10_000)
    store._make_room(4096)
    assert [len(store._here), len(store._host)] == [2, 5]


def test_what_is_kept_is_the_place_alone() -> None:
    """Places for three of seven inputs, and nothing else of their size."""
    store = BlockInputs(torch.device("cpu"), BLOCKS, 3)
    kept: list[object] = []
    hidden = torch.randn(5, 8, requires_grad=True)
    pack = store.pack
    store.pack = lambda tensor, number: (kept.append(pack(tensor, number)), kept[-1])[1]  # type: ignore[method-assign]
    for number in range(BLOCKS):
        hidden = store.around(plain, number)(torch.sin, hidden)
    assert len(kept) == BLOCKS and not any(isinstance(k, torch.Tensor) for k in kept)
    assert [len(store._here), len(store._host)] == [3, 4]
    assert sum(h.nbytes for h in store._here) == 3 * 5 * 8 * 4
