"""The loss curve as a file that survives kills, and pictures that read on light and dark pages."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuneserve.pictures import optional

# Mid grey and two hues of like lightness: all stand out from white and from near black alike.
_INK, _LOSS, _EVAL = "#7f7f7f", "#2f8fdd", "#e0762f"
_SMOOTHED_OVER_STEPS = 10


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Points of a loss curve, up to a line that a kill or a fault of the disk left broken."""
    points = []
    if path.is_file():
        for line in path.read_bytes().splitlines():
            try:
                point = json.loads(line)
            except ValueError:
                break
            if not isinstance(point, dict) or not isinstance(point.get("step"), int):
                break
            points.append(point)
    return points


def keep_curve(path: Path, checkpoint: Path) -> None:
    """Copy the curve into a checkpoint: lines that the disk has not got yet may be lost later."""
    if path.is_file():
        shutil.copyfile(path, checkpoint / path.name)


def rewind_curve(path: Path, step: int) -> None:
    """Drop what is after `step`: those steps will be trained again. The checkpoint's own copy
    counts where it has one.
    """
    kept = path.with_name(f"checkpoint-{step}") / path.name
    points = [p for p in read_curve(kept if kept.is_file() else path) if p["step"] <= step]
    path.write_text("".join(json.dumps(point) + "\n" for point in points), encoding="utf-8")


@optional
def plot_loss(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss over steps: each step faint, the mean of 10 firm, held-out loss as dots."""
    steps = [p["step"] for p in points if "loss" in p]
    losses = [p["loss"] for p in points if "loss" in p]
    figure, axes = _figure()
    axes.plot(steps, losses, color=_LOSS, alpha=0.35, linewidth=1)
    axes.plot(steps, _running_mean(losses), color=_LOSS, linewidth=2, label="training")
    held_out = [(p["step"], p["eval_loss"]) for p in points if "eval_loss" in p]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o", color=_EVAL, label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per supervised token")
    axes.set_ylim(bottom=0)
    _save(figure, axes, path)


@optional
def plot_memory(timeline: dict[str, Any], path: Path) -> None:
    """Memory over time, with the plan's number as a line where there is one."""
    points = timeline["timeline"]
    figure, axes = _figure()
    seconds = [p["seconds"] for p in points]
    gpu = bool(points) and "reserved_bytes" in points[0]
    kinds = {"reserved_bytes": "reserved", "allocated_bytes": "allocated"} if gpu else {}
    for (key, label), colour in zip(
        (kinds or {"rss_bytes": "resident"}).items(), (_LOSS, _EVAL), strict=False
    ):
        axes.plot(seconds, [p[key] / 2**30 for p in points], color=colour, label=label)
    for number, rank in enumerate(timeline.get("ranks", [])[1:], 1):
        key, label = ("reserved_bytes", "reserved") if gpu else ("rss_bytes", "resident")
        line = [(p["seconds"], p[key] / 2**30) for p in rank["timeline"]]
        axes.plot(
            *zip(*line, strict=True), color=_INK, linewidth=1, label=f"{label}, rank {number}"
        )
    if timeline["planned_peak_bytes"]:
        planned = timeline["planned_peak_bytes"] / 2**30
        axes.axhline(planned, color=_INK, linestyle="--", label="planned peak")
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB on the GPU" if gpu else "GiB")
    axes.set_ylim(bottom=0)
    _save(figure, axes, path)


def _running_mean(values: Sequence[float]) -> list[float]:
    width = _SMOOTHED_OVER_STEPS
    return [math.fsum(part) / len(part) for part in _windows(values, width)]


def _windows(values: Sequence[float], width: int) -> list[Sequence[float]]:
    return [values[max(0, at - width + 1) : at + 1] for at in range(len(values))]


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.tick_params(colors=_INK)
    axes.grid(color=_INK, alpha=0.25)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(frameon=False, labelcolor=_INK)
    figure.savefig(path, dpi=120, transparent=True, metadata={"Software": None})
