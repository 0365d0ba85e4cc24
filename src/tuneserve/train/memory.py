"""The memory timeline of a training process: sampled from beside it, in a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

_MAX_POINTS = 600


class MemoryTimeline:
    """Samples resident memory, and on a GPU what torch allocated and reserved.

    When there are `_MAX_POINTS` samples, every second one is dropped and the interval doubles.
    """

    def __init__(self, cuda: bool, every_seconds: float = 0.5) -> None:
        self._cuda, self._every = cuda, every_seconds
        self._phase = "load"
        self._points: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="memory-timeline")

    def __enter__(self) -> MemoryTimeline:
        self._points.append(self._point())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def phase(self, name: str) -> None:
        """Name what happens from now on: load, smoke, train, evaluate, save."""
        self._points.append(self._point())  # the end of the phase before, however short it was
        self._phase = name
        self._points.append(self._point())

    def to_json(self, planned_peak_bytes: int | None) -> dict[str, Any]:
        """The timeline and its peaks, in bytes and seconds."""
        points = list(self._points)
        result: dict[str, Any] = {
            "planned_peak_bytes": planned_peak_bytes,
            "peak_rss_bytes": max((p["rss_bytes"] for p in points), default=0),
            "timeline": points,
        }
        if self._cuda:
            import torch

            result["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
            result["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        return result

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self._points.append(self._point())
            if len(self._points) >= _MAX_POINTS:
                del self._points[1::2]
                self._every *= 2

    def _point(self) -> dict[str, Any]:
        point = {
            "seconds": round(time.monotonic() - self._started, 2),
            "phase": self._phase,
            "rss_bytes": resident_bytes(),
        }
        if self._cuda:
            import torch

            point["allocated_bytes"] = torch.cuda.memory_allocated()
            point["reserved_bytes"] = torch.cuda.memory_reserved()
        return point


def of_ranks(timelines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Timelines of several processes, by rank, as one: the largest peaks, and all of them."""
    peaks = {
        name: max(timeline[name] for timeline in timelines)
        for name in timelines[0]
        if name.startswith("peak_")
    }
    return {**peaks, "timeline": timelines[0]["timeline"], "ranks": list(timelines)}


def held_bytes() -> int:
    """What this process holds now: of the GPU, as torch's allocator reserves it, else of RAM."""
    import torch

    return torch.cuda.memory_reserved() if torch.cuda.is_available() else resident_bytes()


def resident_bytes() -> int:
    """Resident memory of this process now (`/proc/self/statm`)."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
