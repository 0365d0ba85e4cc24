"""Inputs of checkpointed blocks in their places and in host memory: the gradients stay the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tuneserve.plan import fusedstep
from tuneserve.train import offload
from tuneserve.train.offload import BlockInputs

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
BLOCKS = 7


def gradients(
    blocks: list[torch.nn.Linear], rows: list[torch.Tensor], store: BlockInputs | None
) -> list[torch.Tensor]:
    """Of several passes, one after the other, added up."""
    for batch in rows:
        hidden = batch.requires_grad_()
        for number, block in enumerate(blocks):

            def run(x: torch.Tensor, block: torch.nn.Linear = block) -> torch.Tensor:
                return x + block(x).sin()

            around = store.around(checkpoint, number) if store else checkpoint
            hidden = around(run, hidden, use_reentrant=False)
        hidden.square().mean().backward()
    return [block.weight.grad for block in blocks]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("places", "place_bytes"),
    [(1, 2**40), (2, 2**40), (3, 2**40), (6, 2**40), (BLOCKS, 2**40), (20, 2**40), (6, 20_000)],
)
def test_gradients_are_bit_equal(device: str, places: int, place_bytes: int) -> None:
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
                lost = store.around(checkpoint, number)(torch.sin, lost, use_reentrant=False)
        found.append(gradients(blocks, rows, store))
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


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
    pack = store._pack
    store._pack = lambda tensor, number: (kept.append(pack(tensor, number)), kept[-1])[1]  # type: ignore[method-assign]
    for number in range(BLOCKS):
        hidden = store.around(checkpoint, number)(torch.sin, hidden, use_reentrant=False)
    assert len(kept) == BLOCKS and not any(isinstance(k, torch.Tensor) for k in kept)
    assert [len(store._here), len(store._host)] == [3, 4]
    assert sum(h.nbytes for h in store._here) == 3 * 5 * 8 * 4
