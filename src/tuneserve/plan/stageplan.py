"""One stage's predicted needs against what there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuneserve.plan.memory import Peak


@dataclass(frozen=True)
class StagePlan:
    """One stage against what there is.

    Attributes:
        device: ``GPU`` or ``RAM``: what `peak` is measured in.
        available_bytes: What the stage may take there; None where that is not known (a supposed
            card).
        disk_bytes: What it leaves on disk.
        host: What it takes of the host's memory beside a GPU; empty where `peak` is of that.
        host_available_bytes: What it may take there; None where that is not known.
    """

    name: str
    device: str
    peak: Peak
    available_bytes: int | None
    disk_bytes: int
    host: Peak = Peak({})
    host_available_bytes: int | None = None

    @property
    def short(self) -> list[tuple[str, int, int]]:
        """Where it does not fit, as far as is known: ``GPU`` or ``RAM``, needed and available."""
        places = (
            (self.device, self.peak, self.available_bytes),
            ("RAM", self.host, self.host_available_bytes),
        )
        return [
            (where, peak.needed_bytes, room)
            for where, peak, room in places
            if room is not None and peak.needed_bytes > room
        ]

    @property
    def fits(self) -> bool:
        """Whether it fits as far as is known."""
        return not self.short

    def to_json(self) -> dict[str, Any]:
        """As `--json` carries it."""
        return {
            "device": self.device,
            "peak_bytes": self.peak.total_bytes,
            "needed_bytes": self.peak.needed_bytes,
            "available_bytes": self.available_bytes,
            "disk_bytes": self.disk_bytes,
            "components": dict(self.peak.components),
            "host_bytes": self.host.needed_bytes,
            "host_available_bytes": self.host_available_bytes,
            "host_components": dict(self.host.components),
            "fits": self.fits,
        }
