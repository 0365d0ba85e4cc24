"""What `tuneserve status` says of how the last runs ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuneserve.release.control import status
from tuneserve.release.status_text import status_text
from tuneserve.runs import RunRecord, Runs

REFUSED = "served loss 2.5\n  expected: below 1.0\n  what to do: see the report"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    return Runs()


def ended(runs: Runs, minute: int, state: str, error: str = "", served: str = "support") -> None:
    at = f"2026-11-30T02:{minute:02}:00.000+00:00"
    record = RunRecord(f"run{minute}", "weekly", served, state, at, error=error, stage="train")
    record.ended = None if state == "running" else at
    runs.save(record)


def test_a_refusal_is_said_aloud_where_nothing_serves_yet(runs: Runs) -> None:
    ended(runs, 1, "promoted")
    ended(runs, 2, "refused", REFUSED)
    ended(runs, 3, "running")
    ended(runs, 4, "failed", "out of memory\nwhile training", served="other")
    found = status()
    assert found["last_runs"]["support"] == {
        "run": "run2",
        "state": "refused",
        "ended": "2026-11-30T02:02:00.000+00:00",
        "stage": "train",
        "error": "served loss 2.5",
    }
    assert status_text(found).splitlines() == [
        "nothing was released yet; `tuneserve run RUN.yaml` does",
        "support: nothing serves; last run: REFUSED, 2026-11-30T02:02:00Z: served loss 2.5",
        "other: nothing serves; last run: FAILED in train, 2026-11-30T02:04:00Z: "
        "out of memory while training",
    ]


def test_it_stands_beside_what_serves(runs: Runs) -> None:
    ended(runs, 1, "still refused", REFUSED)
    entry = {"state": "up", "release": "r1", "since": "then", "health": "healthy", "history": []}
    shown = {
        "endpoint": "http://127.0.0.1:8080/v1",
        "default": "support",
        "names": {"support": {**entry, "memory_bytes": 2**30}},
        "last_runs": runs.last_ends(),
    }
    assert status_text(shown).splitlines()[-1] == (
        "  last run: STILL REFUSED, 2026-11-30T02:01:00Z: served loss 2.5"
    )
    ended(runs, 2, "confirmed")
    shown["last_runs"] = runs.last_ends()
    assert status_text(shown).splitlines()[-1] == "  last run: confirmed, 2026-11-30T02:02:00Z"
