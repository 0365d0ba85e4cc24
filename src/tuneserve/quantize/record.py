"""What an export leaves for people: quant_log.csv, quantize.json and quant_loss.png.

None of it holds a time or a path, so that equal inputs give equal files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneserve.quantize.calibration import Calibration

if TYPE_CHECKING:
    from tuneserve.quantize.engine import EngineResult, ModuleLog

LOG_NAME = "quant_log.csv"
RECORD_NAME = "quantize.json"
PLOT_NAME = "quant_loss.png"


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


def draw_losses(folder: Path, modules: list[ModuleLog], title: str) -> None:
    """Loss per layer, one line per kind of module, on a logarithmic axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds: dict[str, list[tuple[int, float]]] = {}
    for m in modules:
        if m.loss is not None and m.loss > 0:
            kinds.setdefault(m.module, []).append((m.layer, m.loss))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, points in sorted(kinds.items()):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=kind)
    axes.set(xlabel="layer", ylabel="loss (squared error per token)", title=title)
    if kinds:
        axes.set_yscale("log")
        axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(folder / PLOT_NAME, dpi=110)


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
