"""What the pages of the orchestrator say of a run."""

from __future__ import annotations

import pytest

from tasks.pages import planned_and_measured
from tuneserve.calls import StageResult
from tuneserve.plan.memory import Peak
from tuneserve.plan.stageplan import StagePlan

GIB = 2**30


@pytest.mark.parametrize(("device", "measured"), [("GPU", "16.0 GiB"), ("RAM", "2.0 GiB")])
def test_a_peak_stands_beside_one_of_the_same_memory(device: str, measured: str) -> None:
    """A stage on a card was planned in the card's memory, and its process holds little beside."""
    plan = StagePlan("train", device, Peak({"weights": 15 * GIB}), 80 * GIB, 0)
    rows = planned_and_measured(
        [
            StageResult("plan", {"stages": {"train": plan.to_json()}}),
            StageResult(
                "train", {"peak_gpu_bytes": 16 * GIB, "peak_rss_bytes": 2 * GIB}, artifact="train-1"
            ),
        ]
    )
    assert [(row["planned peak"], row["measured peak"]) for row in rows] == [("15.0 GiB", measured)]
