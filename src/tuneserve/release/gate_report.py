"""The gate report as people read it: gates.md and its pictures.

Pictures have no background and mid-tone ink, so that they read on light and on dark pages.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tuneserve.pictures import optional
from tuneserve.release.decisions import GateReport
from tuneserve.release.gates import MODELS
from tuneserve.release.judging import Measured

REPORT_NAME = "gates.md"
LOSS_PLOT = "losses.png"
KL_PLOT = "kl.png"
MODULES_PLOT = "quant_loss.png"
_INK, _BLUE, _ORANGE = "#7f7f7f", "#2f8fdd", "#e0762f"
_SHOWN_AS = {
    "passed": "passed",
    "refused": "**refused**",
    "undecided": "**undecided**",
    "overridden": "passed, undecided",
}


def write_report(
    folder: Path, title: str, report: GateReport, measured: Measured, model: Path
) -> Path:
    """Write gates.md and the pictures there is something to draw for.

    Args:
        folder: Where to.
        title: The report's heading.
        report: The decisions.
        measured: Divergences a token.
        model: The candidate's folder; an export's per-module losses are shown with the rest.

    Returns:
        The path of gates.md.
    """
    pictures = []
    if any(value is not None for value in report.losses.values()):
        draw_losses(folder / LOSS_PLOT, report)
        pictures.append((LOSS_PLOT, "held-out loss of each model, with the bounds"))
    if len(measured.kl_served):
        draw_divergence(folder / KL_PLOT, measured)
        pictures.append((KL_PLOT, "divergence of the served from the merged model, per token"))
    if (model / MODULES_PLOT).is_file():
        shutil.copyfile(model / MODULES_PLOT, folder / MODULES_PLOT)
        pictures.append((MODULES_PLOT, "loss of each quantized module"))
    path = folder / REPORT_NAME
    path.write_text(markdown(title, report, pictures), encoding="utf-8")
    return path


def markdown(title: str, report: GateReport, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The report as Markdown."""
    lines = [f"# {title}", "", verdict(report), ""]
    lines += loss_table(report)
    if report.gates:
        lines += ["| gate | decision | found | wanted |", "|---|---|---|---|"]
        lines += [
            f"| {escaped(gate.name)} | {_SHOWN_AS[gate.decision]} | {escaped(gate.found)} "
            f"| {escaped(gate.wanted)} |"
            for gate in report.gates
        ]
        lines.append("")
    if report.would_pass:
        lines += ["What would have passed:", ""]
        lines += [
            f"- {gate.name}: `{gate.would_pass}`" for gate in report.refused if gate.would_pass
        ]
        lines.append("")
    if hopeless := [gate.name for gate in report.refused if gate.hopeless]:
        lines += [f"No sensible threshold passes {', '.join(hopeless)}.", ""]
    if report.rungs:
        columns = ("method", "decision", "reason", "would_pass")
        lines += ["| export | decision | why | would have passed with |", "|---|---|---|---|"]
        lines += [
            f"| {' | '.join(escaped(rung.get(name, '')) for name in columns)} |"
            for rung in report.rungs
        ]
        lines.append("")
    for name, text in pictures:
        lines += [f"![{text}]({name})", ""]
    lines += [f"- {name}: {value}" for name, value in report.facts.items()]
    lines += [f"- skipped: {reason}" for reason in report.skipped]
    return "\n".join(lines).rstrip() + "\n"


def verdict(report: GateReport) -> str:
    """One sentence."""
    refused = report.refused
    if refused:
        names = ", ".join(gate.name for gate in refused)
        return f"**Refused** by {len(refused)} of {len(report.gates)} gates: {names}."
    if not report.gates:
        return "No gate was asked."
    return f"**Passed** all {len(report.gates)} gates."


def loss_table(report: GateReport) -> list[str]:
    """Losses as the lines of a Markdown table; empty when nothing was measured."""
    if all(value is None for value in report.losses.values()):
        return []
    lines = ["| model | held-out loss (nats per supervised token) | bounds |", "|---|---|---|"]
    for name, loss in report.losses.items():
        bounds = report.intervals.get(name)
        shown = f"{bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else ""
        lines.append(f"| {name} | {'not measured' if loss is None else f'{loss:.4f}'} | {shown} |")
    return [*lines, ""]


@optional
def draw_losses(path: Path, report: GateReport) -> None:
    """A bar a model, with the interval of its loss."""
    names = [name for name in MODELS if report.losses.get(name) is not None]
    values = [float(report.losses[name] or 0.0) for name in names]
    figure, axes = _figure(height=0.5 * len(names) + 1.2)
    colours = [_ORANGE if name == "served" else _BLUE for name in names]
    axes.barh(names, values, color=colours, height=0.6)
    for at, (name, value) in enumerate(zip(names, values, strict=True)):
        low, high = report.intervals.get(name, (value, value))
        axes.plot([low, high], [at, at], color=_INK, linewidth=3, solid_capstyle="butt")
        axes.text(max(high, value), at, f"  {value:.3f}", color=_INK, va="center")
    axes.invert_yaxis()
    axes.set_xlim(left=0, right=1.15 * max([*values, *(h for _, h in report.intervals.values())]))
    axes.set_xlabel("held-out loss, nats per supervised token")
    _save(figure, path)


@optional
def draw_divergence(path: Path, measured: Measured) -> None:
    """How many tokens diverge how far from the merged model, on a logarithmic axis."""
    figure, axes = _figure()
    least = 1e-6
    both = np.concatenate((measured.kl_served, measured.kl_rtn))
    top = max(float(both.max(initial=least)), 10 * least)
    bins = np.geomspace(least, top * 1.01, 41)
    for values, colour, label in (
        (measured.kl_rtn, _BLUE, "plain 4-bit rounding"),
        (measured.kl_served, _ORANGE, "served"),
    ):
        shown = f"{label}, mean {values.mean():.4f}" if len(values) else label
        axes.hist(np.maximum(values, least), bins, histtype="step", color=colour, label=shown,
                  linewidth=2)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("divergence from the merged model, nats (lower bound)")
    axes.set_ylabel("tokens")
    axes.legend(frameon=False, labelcolor=_INK)
    _save(figure, path)


def escaped(text: str) -> str:
    """Text that stays inside its cell or line, and whose tags are seen."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")


def _figure(height: float = 3.6) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.tick_params(colors=_INK, which="both")
    axes.grid(color=_INK, alpha=0.25)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120, transparent=True, metadata={"Software": None})
