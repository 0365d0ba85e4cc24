"""Signs that a training is not what it looks like: a flat loss, a step that hangs, a hungry GPU."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType

from tuneserve.errors import StageTimeout

log = logging.getLogger(__name__)

# A loss that fell by less than this share between the first and the last window is called flat.
_WINDOW = 30
_FALLEN = 0.01
# Said when steps wait for their rows for more than this share of the time.
_WAITING, _WAITING_STEPS = 0.10, 20
# A step is slow beyond so many of the usual ones, but never before so many seconds.
_SLOW_STEPS, _SLOW_SECONDS = 20, 120.0
_GRACE_SECONDS = 30.0
# In float16 a step whose gradients overflow is skipped and the loss scale halved: normal now and
# then. So many in a row are ten halvings that did not help; and a loss that may not even be taken
# as it is leaves small gradients nothing.
_MOST_SKIPS = 10
LEAST_LOSS_SCALE = 1.0
_FRAMES = 6


def flat(losses: Sequence[float]) -> str:
    """What to say of losses that do not fall; empty while they do, or are too few to tell."""
    if len(losses) < 3 * _WINDOW:
        return ""
    first, last = statistics.fmean(losses[:_WINDOW]), statistics.fmean(losses[-_WINDOW:])
    if last <= (1 - _FALLEN) * first:
        return ""
    return (
        f"the loss is flat: {first:.4f} over the first {_WINDOW} steps, {last:.4f} over the last; "
        "a higher train.learning_rate, a larger train.lora.r or other data may help"
    )


def hungry(waited: Sequence[float], seconds: Sequence[float]) -> str:
    """What to say when steps wait for their rows; empty when they do not."""
    if len(waited) < _WAITING_STEPS or sum(waited) <= _WAITING * sum(seconds):
        return ""
    share = sum(waited) / sum(seconds)
    return f"{share:.0%} of the time the GPU waits for rows: the disk or the CPU is too slow for it"


class Skips:
    """Steps in a row that the gradient scaler skipped."""

    def __init__(self) -> None:
        self._row = 0

    def trained(self) -> None:
        """A step was not skipped."""
        self._row = 0

    def skipped(self, scale: float) -> str:
        """A step was, and `scale` is the loss scale now: why not to go on; empty to go on."""
        self._row += 1
        if self._row >= _MOST_SKIPS:
            return f"the gradients of {self._row} steps in a row overflowed float16"
        if scale < LEAST_LOSS_SCALE:
            return f"the gradients overflow float16 at any loss scale down to {2 * scale:g}"
        return ""


class StallGuard:
    """A thread that says where a step hangs, and ends the training after a limit.

    Used as a context in the main thread; `beat` tells it that something was done.

    Args:
        limit_seconds: After so long without a beat the training is ended.
        slow_seconds: After so long, or some usual steps if that is longer, it says where it hangs.
    """

    def __init__(self, limit_seconds: float, slow_seconds: float = _SLOW_SECONDS) -> None:
        self._limit, self._slow = limit_seconds, slow_seconds
        self._last, self._step = time.monotonic(), 0.0
        self._said = False
        self._stop = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._look, daemon=True, name="stall-guard")
        self._before: object = None

    def __enter__(self) -> StallGuard:
        if threading.get_ident() == self._main:
            self._before = signal.signal(signal.SIGUSR2, self._end)
            self._thread.start()
        self._last = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            signal.signal(signal.SIGUSR2, self._before or signal.SIG_DFL)  # type: ignore[arg-type]

    def beat(self, step_seconds: float = 0.0) -> None:
        """Something was done; with how long a step took, where one was."""
        self._last, self._said = time.monotonic(), False
        self._step = step_seconds or self._step

    def _look(self) -> None:
        every = min(1.0, self._slow / 4, self._limit / 4)
        asked = 0.0
        while not self._stop.wait(every):
            idle = time.monotonic() - self._last
            if idle > max(self._slow, _SLOW_STEPS * self._step) and not self._said:
                self._said = True
                log.warning("nothing was done for %.0f s; it hangs at\n%s", idle, self._where())
            if idle > self._limit and not asked:
                asked = idle
                signal.pthread_kill(self._main, signal.SIGUSR2)
            if asked and idle > asked + _GRACE_SECONDS:  # not even Python runs any more
                faulthandler.dump_traceback(all_threads=True)
                os.kill(os.getpid(), signal.SIGKILL)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main)
        lines = traceback.format_stack(frame) if frame else ["nowhere\n"]
        return "".join(lines[-_FRAMES:]).rstrip()

    def _end(self, number: int, frame: FrameType | None) -> None:
        idle = time.monotonic() - self._last
        where = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame else ""
        raise StageTimeout(
            f"training hung for {idle:.0f} s, at\n{where.rstrip()}",
            expected=f"a step within {self._limit:.0f} s (train.stall_seconds)",
            hint="look at the GPU and the disk; run the same command again to go on from the last "
            "checkpoint",
        )
