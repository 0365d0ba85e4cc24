"""Progress lines for people: throttled, with rate and time left, on whatever the log goes to."""

from __future__ import annotations

import logging
import time
from types import TracebackType

log = logging.getLogger(__name__)


def human_seconds(seconds: float) -> str:
    """A duration as people say it: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def human_bytes(count: float) -> str:
    """A byte count in binary units: ``913 B``, ``12.4 MiB``, ``3.1 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def many(count: int, what: str) -> str:
    """A count with its noun: ``1 pass``, ``2 passes``, ``3 rows``."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{count} {what if count == 1 else plural}"


class Progress:
    """Counts work and logs a line at most every `every_seconds`, at the first step and at the
    end.
    """

    def __init__(
        self, what: str, *, total: int | None, unit: str = "step", every_seconds: float = 5.0
    ) -> None:
        self.what, self.total, self.unit, self.every_seconds = what, total, unit, every_seconds
        self.done = 0
        self._started = time.monotonic()
        self._said = float("-inf")
        self._said_done = 0
        self._first: tuple[float, int] | None = None  # when the first count came, and how many

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None and self.done != self._said_done:
            self._say("", force=True)

    def advance(self, count: int = 1, detail: str = "") -> None:
        """Count `count` more units done; `detail` is shown when a line is due."""
        self.done += count
        if self._first is None:
            self._first = time.monotonic(), self.done
        self._say(detail, force=False)

    def _say(self, detail: str, *, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._said < self.every_seconds:
            return
        self._said, self._said_done = now, self.done
        elapsed = max(now - self._started, 1e-9)
        parts = [f"{self.done}/{self.total}" if self.total else f"{self.done}"]
        if self.total and 0 < self.done < self.total:
            # What is done before the first count (a model that loads) is not done again.
            first = self._first
            since, counted = first if first and self.done > first[1] else (self._started, 0)
            rate = max(now - since, 1e-9) / (self.done - counted)
            parts.append(f"{human_seconds(rate * (self.total - self.done))} left")
        elif elapsed >= 1:
            parts.append(f"in {human_seconds(elapsed)}")
        if detail:
            parts.append(detail)
        units = self.unit if self.unit.endswith("B") else f"{self.unit}s"  # 3 steps, but 3 MiB
        log.info("%s: %s %s, %s", self.what, parts[0], units, ", ".join(parts[1:]) or "done")


class Clock:
    """Seconds of each step since the one before."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """The step that ends now."""
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now

    def rounded(self) -> dict[str, float]:
        """The laps to a tenth of a second, as a manifest carries them."""
        return {name: round(taken, 1) for name, taken in self.laps.items()}

    def add(self, laps: dict[str, float]) -> None:
        """Steps that were measured elsewhere, up to now."""
        self.laps.update(laps)
        self._last = time.monotonic()

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {taken:.1f} s" if taken < 60 else f"{name} {human_seconds(taken)}"
            for name, taken in self.laps.items()
        )
