"""The status as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuneserve.progress import human_bytes
from tuneserve.runs import in_one_line

_SHOWN = 3
_UNSEEN = (
    "(the gateway's state cannot be seen from here, outside the PID and network namespaces of the "
    "servers)"
)


def status_text(status: Mapping[str, Any]) -> str:
    """A few lines a name: what serves, since when, how it is, what served before, and how the last
    run ended.
    """
    ends = dict(status.get("last_runs") or {})
    under_way = dict(status.get("runs_under_way") or {})
    if not status["names"]:
        nothing = "nothing was released yet; `tuneserve run RUN.yaml` does"
        return "\n".join([nothing, *_ends(ends), *_under_way(under_way)])
    missing = _UNSEEN if status.get("gateway") == "unseen" else "(the gateway is down)"
    lines = [f"endpoint: {status['endpoint'] or missing}"]
    if status.get("asks_for_key"):
        kept = ", ".join(status.get("keys") or []) or "none is left: `tuneserve keys add` makes one"
        lines.append(f"  asks for an API key ({kept})")
    if status.get("tls_root"):
        lines.append(f"  clients must trust {status['tls_root']}")
    for name, entry in status["names"].items():
        mark = " (default)" if name == status.get("default") else ""
        down = entry["state"] == "down" and entry["release"]
        lines.append(
            f"{name}{mark}: {entry['state']}, release {entry['release'] or '-'}"
            + ("; `tuneserve up` starts it" if down else "")
        )
        if entry["release"]:
            lines.append(f"  since {entry['since']}, {entry['health']}, {_load(entry)}")
        losses = entry.get("losses") or {}
        order = ("base", "adapter", "merged", "served")
        shown = ", ".join(f"{kind} {losses[kind]:.3f}" for kind in order if losses.get(kind))
        if shown:
            lines.append(f"  held-out loss: {shown}")
        if entry.get("model"):
            lines.append(f"  model: {entry['model']}")
        if entry.get("warm"):
            kept = human_bytes(entry["warm_memory_bytes"])
            lines.append(f"  kept warm: {entry['warm']}, {kept} (a rollback to it is instant)")
        lines += _history(entry)
        if name in ends:
            lines.append(f"  last run: {_end(ends.pop(name))}")
        if name in under_way:
            lines.append(f"  {_now(under_way.pop(name))}")
    return "\n".join([*lines, *_ends(ends), *_under_way(under_way)])


def _load(entry: Mapping[str, Any]) -> str:
    parts = [human_bytes(entry["memory_bytes"])]
    if entry.get("device_memory_bytes"):
        parts.append(f"{human_bytes(entry['device_memory_bytes'])} on the GPU")
    if entry.get("requests_total") is not None:
        parts.append(f"{entry['requests_running']:.0f} requests running")
        parts.append(f"{entry.get('requests_per_second', 0.0):.2f} requests/s in the last minute")
        parts.append(f"{entry['requests_total']:.0f} since it started")
    return ", ".join(parts)


def _ends(ends: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{served}: nothing serves; last run: {_end(end)}" for served, end in ends.items()]


def _under_way(running: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{served}: {_now(run)}" for served, run in running.items()]


def _now(run: Mapping[str, Any]) -> str:
    return f"run under way: {run['stage'] or 'start'}, since {run['since'][:19]}Z"


def _end(end: Mapping[str, Any]) -> str:
    """How a run ended: a word where all is well, the reason where it is not."""
    said = f"{end['state']}, {end['ended'][:19]}Z"
    if not end["error"]:
        return said
    where = f" in {end['stage']}" if end["state"] in ("failed", "stale") and end["stage"] else ""
    return f"{end['state'].upper()}{where}, {end['ended'][:19]}Z: {in_one_line(end['error'])}"


def _history(entry: Mapping[str, Any]) -> list[str]:
    """The last releases before this one, latest first, with when each of them served."""
    before = [item for item in entry["history"] if item["release"] != entry["release"]]
    lines = [
        f"  before: {item['release']} ({item['since'] or '?'} to {item['until']})"
        for item in before[: -_SHOWN - 1 : -1]
    ]
    if lines:
        lines[0] += "; `tuneserve rollback` goes back to it"
    return lines
