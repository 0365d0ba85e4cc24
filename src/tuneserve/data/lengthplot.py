"""A picture of how long the rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuneserve.pictures import optional

# Without a ground, in mid tones: reads on light and on dark pages.
_INK, _LIMIT = "#7f7f7f", "#d9534f"
# Fonts with Chinese, Japanese and Korean letters, by how common they are on servers and desktops.
_CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Microsoft YaHei",
    "SimHei",
    "Arial Unicode MS",
    "Unifont",
)


@optional
def plot_lengths(
    path: Path,
    lengths: npt.NDArray[np.int64],
    supervised: npt.NDArray[np.int64],
    *,
    max_length: int,
    title: str,
) -> None:
    """Histograms of the tokens and of the supervised tokens per row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    families = font_families()
    with matplotlib.rc_context({"font.family": families}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        figure.patch.set_alpha(0)
        for axes, values, name, color in zip(
            figure.subplots(1, 2),
            (lengths, supervised),
            ("tokens a row", "supervised tokens a row"),
            ("#2f8fdd", "#2f9c6a"),
            strict=True,
        ):
            _plain(axes)
            axes.hist(values, bins=min(60, max(10, int(np.sqrt(len(values))))), color=color)
            axes.set_xlabel(name)
            axes.set_ylabel("rows")
            if len(values):
                middle = float(np.median(values))
                axes.axvline(middle, color=_INK, linewidth=1, linestyle=":")
                axes.set_title(
                    f"median {middle:.0f}, longest {values.max()}", fontsize=9, color=_INK
                )
                if values.max() > 0.8 * max_length:
                    axes.axvline(max_length, color=_LIMIT, linewidth=1)
        figure.suptitle(drawable(title, families), fontsize=10, color=_INK)
        # No date in the file: the same data gives the same bytes.
        figure.savefig(path, dpi=110, transparent=True, metadata={"Software": None})


def _plain(axes: Any) -> None:
    """Axes in the ink alone."""
    axes.patch.set_alpha(0)
    axes.tick_params(colors=_INK)
    axes.grid(color=_INK, alpha=0.25)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


def font_families() -> list[str]:
    """Fonts to draw with: the default, then those on this machine that have Chinese letters."""
    from matplotlib import font_manager

    known = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _CJK_FONTS if name in known)]


def drawable(text: str, families: list[str]) -> str:
    """The text, with letters that no font has written as escapes instead of as empty boxes."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    maps: list[Any] = [
        FT2Font(font_manager.findfont(name, fallback_to_default=True)).get_charmap()
        for name in families
    ]
    return "".join(
        char
        if any(ord(char) in known for known in maps)
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    ).replace("$", r"\$")
