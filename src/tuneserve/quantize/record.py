"""What an export leaves for people: quant_log.csv, quantize.json and quant_loss.png.

None of it holds a time or a path, so that equal inputs give equal files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneserve.pictures import optional
from tuneserve.quantize.calibration import Calibration

if TYPE_CHECKING:
    from tuneserve.quantize.engine import EngineResult
    from tuneserve.quantize.modules import ModuleLog

LOG_NAME = "quant_log.csv"
RECORD_NAME = "quantize.json"
PLOT_NAME = "quant_loss.png"
# Of like lightness, so that all stand out from white and from near black.
_INK = "#7f7f7f"
_COLOURS = ("#2f8fdd", "#e0762f", "#3d9c5a", "#c25bb0", "#b08a1e", "#d0504f", "#6f7fd8")
_MARKS = ("o", "s", "^", "D")


def write_log(folder: Path, modules: list[ModuleLog]) -> None:
    """One line a module: loss, tokens seen, damping."""
    with (folder / LOG_NAME).open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(("layer", "module", "loss", "samples", "damp", "fallback"))
        for m in modules:
            loss = "" if m.loss is None else f"{m.loss:.10f}"
            damp = "" if m.damp is None else f"{m.damp:.5f}"
            rows.writerow((m.layer, m.module, loss, m.samples, damp, int(m.fallback)))


def write_record(
    folder: Path,
    *,
    method: str,
    bits: int,
    group_size: int,
    calibration: Calibration,
    engine: EngineResult,
    smoke: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything about the export as JSON; returns what was written."""
    losses = {m.name: m.loss for m in engine.modules if m.loss is not None}
    record = {
        "method": method,
        "bits": bits,
        "group_size": group_size,
        "sym": method == "gptq",
        "desc_act": False,
        "calibration": {
            "rows": len(calibration.rows),
            "tokens": calibration.tokens,
            "rows_read": calibration.rows_read,
            "rows_too_short": calibration.rows_too_short,
            "rows_duplicate": calibration.rows_duplicate,
            "sources": calibration.sources,
            "sha256": calibration.hashes,
        },
        "batch_size": engine.batch_size,
        "device": engine.device,
        "linear_in_float32": engine.linear_in_float32,
        "losses": losses,
        "damping": {m.name: m.damp for m in engine.modules if m.damp is not None},
        "fallbacks": [m.name for m in engine.modules if m.fallback],
        "notes": engine.notes,
        "smoke": smoke,
        "versions": _versions("torch", "transformers", "gptqmodel"),
    }
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    (folder / RECORD_NAME).write_text(text, encoding="utf-8")
    return record


def worst_table(modules: list[ModuleLog], most: int = 10) -> str:
    """The modules with the largest losses, as aligned text; empty when none has a loss."""
    ranked = sorted(
        (m for m in modules if m.loss is not None), key=lambda m: (-(m.loss or 0.0), m.name)
    )[:most]
    if not ranked:
        return ""
    rows = [("module", "loss", "damping")]
    rows += [(m.name, f"{m.loss:.3g}", "" if m.damp is None else f"{m.damp:.3g}") for m in ranked]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}  {loss:>9}  {damp:>7}" for name, loss, damp in rows)


@optional
def draw_losses(folder: Path, modules: list[ModuleLog], title: str) -> None:
    """Loss and damping per layer, one line per kind of module, losses on a logarithmic axis.

    No ground of its own and mid-tone ink, so that it reads on light and on dark pages.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    figure.patch.set_alpha(0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    losses = _by_kind(modules, lambda m: m.loss if m.loss is not None and m.loss > 0 else None)
    damping = _by_kind(modules, lambda m: m.damp)
    kinds = sorted({*losses, *damping})
    for at, kind in enumerate(kinds):
        for axes, values in ((upper, losses), (lower, damping)):
            if kind in values:
                axes.plot(
                    *zip(*values[kind], strict=True),
                    color=_COLOURS[at % len(_COLOURS)],
                    marker=_MARKS[at // len(_COLOURS) % len(_MARKS)],
                    markersize=3,
                    label=kind,
                )
    upper.set_title(title, color=_INK)
    upper.set_ylabel("loss (squared error per token)")
    lower.set_ylabel("damping")
    lower.set_xlabel("layer")
    if losses:
        upper.set_yscale("log")
        upper.legend(fontsize="small", ncols=2, frameon=False, labelcolor=_INK)
    for axes in (upper, lower):
        axes.patch.set_alpha(0)
        axes.tick_params(colors=_INK, which="both")
        axes.grid(color=_INK, alpha=0.25)
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
        for spine in axes.spines.values():
            spine.set_color(_INK)
    if not damping:  # AWQ has none
        lower.remove()
    figure.savefig(folder / PLOT_NAME, dpi=110, transparent=True, metadata={"Software": None})


def _by_kind(
    modules: list[ModuleLog], value: Callable[[ModuleLog], float | None]
) -> dict[str, list[tuple[int, float]]]:
    """(layer, value) by kind of module, where there is a value."""
    found: dict[str, list[tuple[int, float]]] = {}
    for m in modules:
        if (number := value(m)) is not None:
            found.setdefault(m.module, []).append((m.layer, number))
    return found


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
