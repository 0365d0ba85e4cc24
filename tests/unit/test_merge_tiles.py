"""The matrix library's fused sum is used where it gives the bits of a product and a sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tuneserve.merge.tiles import adds_last


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    adds_last.cache_clear()
    yield
    adds_last.cache_clear()


@pytest.mark.parametrize(("rows", "rank", "width"), [(64, 16, 512), (65, 8, 100), (64, 1024, 256)])
def test_what_is_told_of_noise_holds_for_other_values(rows: int, rank: int, width: int) -> None:
    noise = torch.Generator().manual_seed(7)
    weight = torch.randn(rows, width, generator=noise) * 0.02
    left = torch.randn(rows, rank, generator=noise) * 2
    right = torch.randn(rank, width, generator=noise) * 0.01
    same = torch.equal(torch.addmm(weight, left, right), weight + left @ right)
    assert adds_last(rows, rank, width) == same


def test_a_library_that_begins_its_sums_with_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        for column in range(left.shape[1]):
            weight += left[:, column, None] * right[column]
        return weight

    monkeypatch.setattr(torch.Tensor, "addmm_", first)
    assert not adds_last(64, 16, 512)
