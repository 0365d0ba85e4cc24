"""What a merge says while it runs: bytes, rate and the time that is left."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tuneserve.merge.run import _progress


def test_lines_and_the_callback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("tuneserve.merge.run.time", clock)
    monkeypatch.setattr("tuneserve.progress.time", clock)
    caplog.set_level(logging.INFO, "tuneserve.progress")
    seen: list[tuple[int, int]] = []
    total = 1000 * 2**20
    with _progress(total, lambda done, of: seen.append((done, of))) as advance:
        now = 101.0
        advance(100 * 2**20)
        now = 103.0
        advance(2**20)  # within the five seconds of a line
        now = 110.0
        advance(399 * 2**20)
        now = 120.0
        advance(500 * 2**20)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "merge: 100/1000 MiB, 9 s left, 100.0 MiB/s",
        "merge: 500/1000 MiB, 11 s left, 50.0 MiB/s",  # 400 MiB in the last 9 seconds
        "merge: 1000/1000 MiB, in 20 s, 50.0 MiB/s",
    ]
    assert seen == [(n * 2**20, total) for n in (100, 101, 500, 1000)]
