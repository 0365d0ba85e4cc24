"""What a merge did, and the memory that it took. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MergeResult:
    """What a merge did.

    Attributes:
        seconds: Wall time of this call.
        peak_rss_bytes: Largest resident memory of this process since it started (VmHWM).
        bytes_written: Bytes of weights that this call wrote; less than the whole after a resume.
        merged: Tensors that were changed.
        copied: Tensors that are byte for byte the base's.
        delta_survival: Share of the adapter's change that survived rounding, over all tensors.
        sampled: Tensors compared with PEFT's own layer.
        sampled_equal: How many of them were equal bit for bit.
        notes: What had to be said: repairs, missing tokenizer, missing fingerprint.
    """

    seconds: float
    peak_rss_bytes: int
    bytes_written: int
    merged: int
    copied: int
    delta_survival: float | None = None
    sampled: int = 0
    sampled_equal: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return {**asdict(self), "notes": list(self.notes)}


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
