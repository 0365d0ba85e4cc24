"""The paired bootstrap over conversations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gate_evidence import SOURCES
from tuneserve.release.bootstrap import Resampled


def test_bootstrap_of_equal_differences_is_a_point() -> None:
    draws = Resampled(SOURCES, {"d": np.full(20, -2.0), "n": np.full(20, 2.0)})
    interval = draws.interval(lambda s: s["d"] / s["n"])
    assert (interval.mean, interval.low, interval.high) == (-1.0, -1.0, -1.0)


def test_bootstrap_bounds_are_near_the_normal_ones() -> None:
    # differences of +-1 nat, one token each, 100 conversations: the standard error is 0.1
    sources = [f"c:{i}" for i in range(100)]
    values = [1.0 if i % 2 else -1.0 for i in range(100)]

    def bounds(seed: int) -> Any:
        draws = Resampled(sources, {"d": values, "n": [1] * 100}, seed=seed)
        return draws.interval(lambda s: s["d"] / s["n"])

    interval = bounds(3)
    assert interval.mean == 0
    assert interval.low == pytest.approx(-0.196, abs=0.03)
    assert interval.high == pytest.approx(0.196, abs=0.03)
    assert bounds(3) == interval != bounds(4)


def test_rows_of_a_conversation_are_drawn_together() -> None:
    draws = Resampled(["a", "b"] * 5, {"d": [1.0, 3.0] * 5, "n": [1.0] * 10})
    assert draws.conversations == 2
    interval = draws.interval(lambda s: s["d"] / s["n"])
    # a and a, a and b, b and b: nothing in between
    assert (interval.low, interval.mean, interval.high) == (1.0, 2.0, 3.0)
