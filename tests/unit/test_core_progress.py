"""What progress lines say of the time that is left."""

from __future__ import annotations

import logging

import pytest

from tuneserve import progress
from tuneserve.progress import Progress


def test_what_came_before_the_first_count_is_not_expected_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model loads for 100 seconds, then each of ten rows takes 2: 7 rows are 14 seconds, 2 are
    4; at the first count nothing better is known than 9 times 102.
    """
    caplog.set_level(logging.INFO)
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress("evaluate", total=10, unit="row", every_seconds=0) as rows:
        clock[0] += 100
        for _ in range(3):
            clock[0] += 2
            rows.advance()
        clock[0] += 10
        rows.advance(5)
        clock[0] += 4
        rows.advance(2)
    said = [record.message for record in caplog.records]
    assert said[0] == "evaluate: 1/10 rows, 15 min 18 s left"
    assert said[2] == "evaluate: 3/10 rows, 14 s left"
    assert said[3] == "evaluate: 8/10 rows, 4 s left"
    assert said[4:] == ["evaluate: 10/10 rows, in 2 min 00 s"]
