"""Inputs of checkpointed blocks in their places and in host memory: the gradients stay the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
@pytest.mark.parametrize("places", [1, 2, 3, 6, BLOCKS, 20])
def test_gradients_are_bit_equal(device: str, places: int) -> None:
    """Also with shorter rows, with longer ones than before, and after a pass without a way back."""
    size = 512 if device == "cuda" else 32
    found = []
    for held in (False, True):
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(size, size, device=device) for _ in range(BLOCKS)]
        rows = [torch.randn(n, size, device=device) for n in (40, 24, 90)]
        store = BlockInputs(torch.device(device), BLOCKS, places) if held else None
        if store:
            lost = rows[0].clone().requires_grad_()
            for number in range(3):
                lost = store.around(checkpoint, number)(torch.sin, lost, use_reentrant=False)
        found.append(gradients(blocks, rows, store))
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


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
