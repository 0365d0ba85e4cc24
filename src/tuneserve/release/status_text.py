"""The status as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuneserve.progress import human_bytes


def status_text(status: Mapping[str, Any]) -> str:
    """A few lines a name: what serves, since when, how it is, and what served before."""
    if not status["names"]:
        return "nothing was released yet; `tuneserve run RUN.yaml` does"
    lines = [f"endpoint: {status['endpoint'] or '(the gateway is down)'}"]
    for name, entry in status["names"].items():
        mark = " (default)" if name == status.get("default") else ""
        lines.append(f"{name}{mark}: {entry['state']}, release {entry['release'] or '-'}")
        if entry["release"]:
            lines.append(f"  since {entry['since']}, {entry['health']}, {_load(entry)}")
        losses = entry.get("losses") or {}
        order = ("base", "adapter", "merged", "served")
        shown = ", ".join(f"{kind} {losses[kind]:.3f}" for kind in order if losses.get(kind))
        if shown:
            lines.append(f"  held-out loss: {shown}")
        if entry.get("model"):
            lines.append(f"  model: {entry['model']}")
        before = [
            item["release"] for item in entry["history"] if item["release"] != entry["release"]
        ]
        if before:
            lines.append(f"  before: {', '.join(before[-3:])} (`tuneserve rollback` goes back)")
    return "\n".join(lines)


def _load(entry: Mapping[str, Any]) -> str:
    parts = [human_bytes(entry["memory_bytes"])]
    if entry.get("requests_total") is not None:
        parts.append(f"{entry['requests_running']:.0f} requests running")
        parts.append(f"{entry['requests_total']:.0f} answered")
    return ", ".join(parts)
