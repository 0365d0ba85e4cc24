"""What was where when memory ran out for the first time: a table by phase, and what dominated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.progress import human_bytes

REPORT = "first_oom.json"
SNAPSHOT = "first_oom.pickle"
# Shares of the card above which these are what has to be looked at first.
_FOREIGN, _UNUSABLE = 0.10, 0.15


def peaks_by_phase(timeline: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Largest samples of every phase, in the order in which the phases came."""
    found: dict[str, dict[str, int]] = {}
    for point in timeline:
        phase = found.setdefault(str(point["phase"]), {})
        for key, value in point.items():
            if key.endswith("_bytes"):
                phase[key] = max(int(value), phase.get(key, 0))
    return found


def dominated(
    total_bytes: int,
    free_bytes: int,
    allocated_bytes: int,
    reserved_bytes: int,
    components: Mapping[str, int],
) -> str:
    """One sentence about what to look at.

    Args:
        total_bytes: Of the card.
        free_bytes: What nobody holds.
        allocated_bytes: In tensors of this process.
        reserved_bytes: Held by its allocator.
        components: The plan's components of the peak; may be empty.
    """
    foreign = total_bytes - free_bytes - reserved_bytes - components.get("CUDA context", 0)
    if foreign > _FOREIGN * total_bytes:
        return f"other processes hold {human_bytes(foreign)} of the card"
    unusable = reserved_bytes - allocated_bytes
    if unusable > _UNUSABLE * total_bytes:
        return f"{human_bytes(unusable)} are reserved in pieces that nothing fits into"
    largest = sorted(components.items(), key=lambda item: -item[1])[:2]
    if not largest:
        return f"{human_bytes(allocated_bytes)} are in tensors"
    return "most of it: " + ", ".join(f"{name} {human_bytes(size)}" for name, size in largest)


def read_report(work: Path) -> dict[str, Any] | None:
    """The report that an attempt left; None without one."""
    try:
        found: dict[str, Any] = json.loads((work / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def keep_report(
    work: Path,
    timeline: Sequence[Mapping[str, Any]],
    components: Mapping[str, int],
    rank: int = 0,
) -> dict[str, Any] | None:
    """Write table, sentence and torch's own snapshot into the work folder, the first time only.

    To be called while the failed attempt's tensors are still alive. Of ranks that run out at the
    same time, the report of one is kept.
    """
    import torch

    if (work / REPORT).exists():
        return None
    report: dict[str, Any] = {"phases": peaks_by_phase(timeline), "planned": dict(components)}
    report["rank"] = rank
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        report["what"] = dominated(total, free, allocated, reserved, components)
        dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
        if dump is not None:  # for pytorch.org/memory_viz
            part = work / f"{SNAPSHOT}.{rank}"
            dump(str(part))
            part.replace(work / SNAPSHOT)
    else:
        largest = max((int(p["rss_bytes"]) for p in timeline), default=0)
        report["what"] = f"the process had {human_bytes(largest)} resident"
    write_json_atomic(work / REPORT, report)
    return report
