"""A picture of where the adapter changed the weights, by layer and module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneserve.pictures import optional

PLOT_NAME = "change.png"

# Without a ground and in mid tones it reads on light and on dark pages: what changed more is less
# transparent, which stands out from white and from black alike.
_INK, _CHANGED = "#7f7f7f", (0.18, 0.56, 0.87)
_FAINTEST = 0.06
# As they are applied, where a family uses these names; others follow by name.
_ORDER = ("q_proj", "k_proj", "v_proj", "qkv", "o_proj", "gate", "up_proj", "down_proj")
_LABELS = 12


def change_by_layer(
    tensors: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[int, float]], dict[str, float]]:
    """The change's norm over the weights' norm, from a proof's `tensors`.

    Experts of a layer count as one module: the norm over all of them together.

    Returns:
        By module and layer, modules in the order of `_ORDER`; and of what is in no layer, by name.
    """
    squares: dict[tuple[str, int | None], list[float]] = {}
    for name, report in tensors.items():
        relative = report.get("delta_relative")
        if relative is None:
            continue
        inside = re.match(r"(?:.*?\.)?(\d+)\.(.+)", name)
        module, layer = (inside[2], int(inside[1])) if inside else (name, None)
        module = re.sub(r"\.\d+(?=\.)", "", module.removesuffix(".weight"))
        changed = report["delta_norm"] ** 2
        found = squares.setdefault((module, layer), [0.0, 0.0])
        found[0] += changed
        found[1] += changed / relative**2 if relative else 0.0
    layers: dict[str, dict[int, float]] = {}
    others: dict[str, float] = {}
    for (module, layer), (changed, base) in squares.items():
        value = math.sqrt(changed / base) if base else 0.0
        if layer is None:
            others[module] = value
        else:
            layers.setdefault(module, {})[layer] = value
    return {module: layers[module] for module in sorted(layers, key=_place)}, others


@optional
def plot_change(tensors: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Draw it; False, and no file, where no module of a layer was changed."""
    layers, others = change_by_layer(tensors)
    if not layers:
        return False
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    first = min(min(cells) for cells in layers.values())
    last = max(max(cells) for cells in layers.values())
    values = [
        [100 * cells.get(layer, math.nan) for layer in range(first, last + 1)]
        for cells in layers.values()
    ]
    colours = LinearSegmentedColormap.from_list(
        "change", [(*_CHANGED, _FAINTEST), (*_CHANGED, 1.0)]
    )
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(layers)), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    shown = axes.imshow(
        values,
        aspect="auto",
        cmap=colours,
        vmin=0,
        extent=(first - 0.5, last + 0.5, len(layers), 0),
    )
    axes.set_yticks([row + 0.5 for row in range(len(layers))], list(layers))
    step = max(1, math.ceil((last - first + 1) / _LABELS))
    axes.set_xticks(range(first, last + 1, step))
    axes.set_xlabel("layer")
    axes.set_title(_title(layers, others), fontsize=9, color=_INK)
    bar = figure.colorbar(shown, ax=axes, pad=0.01)
    bar.set_label("change, % of the weights' norm", color=_INK)
    bar.outline.set_edgecolor(_INK)
    for each in (axes, bar.ax):
        each.tick_params(colors=_INK)
        each.patch.set_alpha(0)
        for spine in each.spines.values():
            spine.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    figure.savefig(path, dpi=110, transparent=True, metadata={"Software": None})
    return True


def _title(layers: Mapping[str, Mapping[int, float]], others: Mapping[str, float]) -> str:
    value, module, layer = max(
        (value, module, layer) for module, cells in layers.items() for layer, value in cells.items()
    )
    parts = [f"most: {module} of layer {layer}, {100 * value:.2g} %"]
    parts += [f"{name}: {100 * value:.2g} %" for name, value in others.items()]
    return "; ".join(parts)


def _place(module: str) -> tuple[int, str]:
    for place, part in enumerate(_ORDER):
        if part in module:
            return place, module
    return len(_ORDER), module
