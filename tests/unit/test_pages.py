"""What the pages of the orchestrator say of a run."""

from __future__ import annotations

from uuid import UUID

import pytest

from tasks import pages
from tasks.pages import planned_and_measured
from tuneserve.calls import StageCall, StageResult
from tuneserve.plan.memory import Peak
from tuneserve.plan.stageplan import StagePlan
from tuneserve.runfile import parse_run

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


def test_the_progress_bar_says_what_the_terminal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[float, str]] = []

    def create(*, progress: float, key: str, description: str) -> UUID:
        assert key == "nightly-train-progress"
        shown.append((progress, description))
        return UUID(int=1)

    def update(*, artifact_id: UUID, progress: float, description: str) -> None:
        assert artifact_id == UUID(int=1)
        shown.append((progress, description))

    monkeypatch.setattr(pages, "create_progress_artifact", create)
    monkeypatch.setattr(pages, "update_progress_artifact", update)
    run = parse_run({"name": "nightly", "model": {"base": "b"}, "data": {"train": "a.jsonl"}})
    said: list[str] = []
    watched = pages.watch_progress(StageCall("train", run), said.append)
    lines = [f"train: {n}/4 steps, 9 s left, loss 1.2000, 90 tokens/s, 6.8 GiB" for n in (1, 3)]
    for line in (lines[0], "base: 7.6 billion parameters", lines[1]):
        watched(line)
    assert shown == [
        (25.0, f"train of nightly: {lines[0]}"),
        (75.0, f"train of nightly: {lines[1]}"),
    ]
    assert len(said) == 3
