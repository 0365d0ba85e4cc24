"""Signs of trouble while training: flat losses, hungry GPUs, steps that hang."""

from __future__ import annotations

import logging
import threading

import pytest

from tuneserve.errors import StageTimeout
from tuneserve.train.watching import Skips, StallGuard, flat, hungry


def test_a_loss_that_does_not_fall_is_said() -> None:
    assert "flat: 2.0000 over the first 30 steps, 1.9900" in flat([2.0] * 60 + [1.99] * 30)
    assert not flat([2.0] * 60 + [1.9] * 30)
    assert not flat([2.0] * 89)  # too few to tell


def test_waiting_for_rows_is_said() -> None:
    assert hungry([0.2] * 20, [1.0] * 20).startswith("20% of the time")
    assert not hungry([0.05] * 20, [1.0] * 20)
    assert not hungry([0.9] * 19, [1.0] * 19)


def test_a_hanging_step_is_shown_and_ended(caplog: pytest.LogCaptureFixture) -> None:
    """The warning and the error name the line that hangs; afterwards signals are as before."""
    import signal

    before = signal.getsignal(signal.SIGUSR2)
    never = threading.Event()
    with caplog.at_level(logging.WARNING), pytest.raises(StageTimeout, match="never.wait"):
        with StallGuard(0.4, slow_seconds=0.1):
            never.wait(30)
    assert "it hangs at" in caplog.text and "never.wait" in caplog.text
    assert signal.getsignal(signal.SIGUSR2) == before


def test_beats_keep_it_quiet(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    with caplog.at_level(logging.WARNING), StallGuard(0.4, slow_seconds=0.3) as guard:
        for _ in range(12):
            never.wait(0.05)
            guard.beat(0.05)
    assert not caplog.text


def test_skipped_steps_are_counted_in_a_row() -> None:
    skips = Skips()
    for _ in range(3):
        assert [skips.skipped(1024.0) for _ in range(9)] == [""] * 9
        skips.trained()
    whys = [skips.skipped(1024.0) for _ in range(10)]
    assert whys[:9] == [""] * 9 and whys[9].startswith("the gradients of 10 steps in a row")


def test_a_loss_scale_that_collapses_is_said() -> None:
    skips = Skips()
    assert skips.skipped(1.0) == ""
    skips.trained()
    assert skips.skipped(0.5) == "the gradients overflow float16 at any loss scale down to 1"
