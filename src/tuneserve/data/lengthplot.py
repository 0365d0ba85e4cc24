"""A picture of how long the rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
        for axes, values, name, color in zip(
            figure.subplots(1, 2),
            (lengths, supervised),
            ("tokens a row", "supervised tokens a row"),
            ("#33658a", "#2f9c6a"),
            strict=True,
        ):
            axes.hist(values, bins=min(60, max(10, int(np.sqrt(len(values))))), color=color)
            axes.set_xlabel(name)
            axes.set_ylabel("rows")
            if len(values):
                middle = float(np.median(values))
                axes.axvline(middle, color="black", linewidth=1, linestyle=":")
                axes.annotate(
                    f"median {middle:.0f}", (middle, 0.93), xycoords=("data", "axes fraction")
                )
                if values.max() > 0.8 * max_length:
                    axes.axvline(max_length, color="#b3261e", linewidth=1)
        figure.suptitle(drawable(title, families), fontsize=10)
        # No date in the file: the same data gives the same bytes.
        figure.savefig(path, dpi=110, metadata={"Software": None})


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
