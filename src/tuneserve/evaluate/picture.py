"""A picture of what training did to each held-out conversation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tuneserve.pictures import optional

PLOT_NAME = "rows.png"

# Without a ground and in mid tones: reads on light and on dark pages.
_INK, _BETTER, _WORSE = "#7f7f7f", "#2f8fdd", "#e0762f"


@optional
def plot_rows(base: Sequence[float], tuned: Sequence[float], path: Path) -> None:
    """A dot a conversation: its loss before and after, nats per supervised token.

    Losses that are not finite have no place in it.

    Args:
        base: Mean loss of each row by the base model.
        tuned: The same by the tuned one, in the same order.
        path: PNG to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.4), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    pairs = [p for p in zip(base, tuned, strict=True) if all(map(math.isfinite, p))]
    top = 1.05 * max([value for pair in pairs for value in pair] or [0.1])
    axes.plot([0, top], [0, top], color=_INK, linewidth=1, linestyle=":")
    for label, colour, chosen in (
        ("better", _BETTER, [pair for pair in pairs if pair[1] < pair[0]]),
        ("not better", _WORSE, [pair for pair in pairs if pair[1] >= pair[0]]),
    ):
        if chosen:
            name = f"{label}: {len(chosen)} of {len(pairs)}"
            axes.plot(*zip(*chosen, strict=True), "o", color=colour, alpha=0.7, label=name)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel("base model, nats per supervised token", color=_INK)
    axes.set_ylabel("with the adapter", color=_INK)
    axes.tick_params(colors=_INK)
    axes.grid(color=_INK, alpha=0.25)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    if pairs:
        axes.legend(frameon=False, labelcolor=_INK)
    figure.savefig(path, dpi=110, transparent=True, metadata={"Software": None})
