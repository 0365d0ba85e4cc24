"""A card's rate is known by its whole name alone; what only looks like it has none."""

from __future__ import annotations

import pytest

from tuneserve.plan.speed import peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 990), ("NVIDIA H100 80GB HBM3", 990), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA RTX A6000", 155),
        ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A1000", None), ("NVIDIA H200 MIG 1g.18gb", None), ("Tesla T4", None),
        ("a 24 GiB GPU", None), ("", None),
    ],
)  # fmt: skip
def test_rates_by_name(name: str, teraflops: int | None) -> None:
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)
