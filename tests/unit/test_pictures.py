"""Every picture that a stage leaves reads on light and on dark pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tuneserve.data.lengthplot import plot_lengths
from tuneserve.evaluate.picture import plot_rows
from tuneserve.merge.picture import plot_change
from tuneserve.quantize.modules import ModuleLog
from tuneserve.quantize.record import PLOT_NAME, draw_losses
from tuneserve.release.gate_report import draw_divergence
from tuneserve.release.gate_report import draw_losses as draw_gate_losses
from tuneserve.release.gates import GateReport
from tuneserve.release.judging import Measured
from tuneserve.train.curves import plot_loss, plot_memory

SOME = np.random.default_rng(0)


def lengths(path: Path) -> None:
    tokens = SOME.integers(20, 900, 400)
    plot_lengths(path, tokens, tokens // 2, max_length=896, title="support: 400 rows")


def loss(path: Path) -> None:
    points = [{"step": step, "loss": 3 / step} for step in range(1, 60)]
    plot_loss([*points, {"step": 59, "eval_loss": 0.4}], path)


def memory(path: Path) -> None:
    timeline = [{"seconds": n, "rss_bytes": n * 2**26} for n in range(30)]
    plot_memory({"timeline": timeline, "planned_peak_bytes": 2**31}, path)


def change(path: Path) -> None:
    modules = ("self_attn.q_proj", "mlp.down_proj")
    plot_change(
        {
            f"model.layers.{layer}.{module}.weight": {
                "delta_norm": 1.0,
                "delta_relative": 0.01 * (layer + 1),
            }
            for layer in range(12)
            for module in modules
        },
        path,
    )


def rows(path: Path) -> None:
    base = SOME.uniform(1, 3, 60)
    plot_rows(base.tolist(), (base * SOME.uniform(0.3, 1.1, 60)).tolist(), path)


def exported(path: Path) -> None:
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    modules = [
        ModuleLog(layer=layer, module=kind, loss=1e-3 * (at + layer + 1), samples=9, damp=0.01)
        for layer in range(8)
        for at, kind in enumerate(kinds)
    ]
    draw_losses(path.parent, modules, "support: GPTQ")
    (path.parent / PLOT_NAME).rename(path)


def gate_losses(path: Path) -> None:
    losses = {"base": 2.9, "adapter": 0.6, "merged": 0.6, "served": 0.7}
    report = GateReport(losses, intervals={"served": (0.65, 0.75)})
    draw_gate_losses(path, report)


def divergence(path: Path) -> None:
    served, rounded = (SOME.exponential(scale, 500) for scale in (0.01, 0.05))
    draw_divergence(path, Measured(served, rounded))


PICTURES = [lengths, loss, memory, change, rows, exported, gate_losses, divergence]
# What is drawn stands out from either ground as WCAG 2.2 asks of graphics (1.4.11): 3 to 1.
GROUNDS = {"light": 1.0, "dark": 0.0056}  # relative luminance of white and of GitHub's #0d1117
LEAST_CONTRAST = 3.0


def luminance(colours: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB values from 0 to 1 (WCAG 2.2)."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_a_picture_reads_on_light_and_on_dark_pages(
    draw: Callable[[Path], None], tmp_path: Path
) -> None:
    from matplotlib.image import imread

    path = tmp_path / "picture.png"
    draw(path)
    pixels = imread(path)
    alpha = pixels[..., 3]
    assert alpha[0, 0] == 0 and (alpha == 0).mean() > 0.2, "it has a ground of its own"
    drawn = luminance(pixels[..., :3][alpha > 0.95])
    assert drawn.size > 500
    for name, ground in GROUNDS.items():
        contrast = (np.maximum(drawn, ground) + 0.05) / (np.minimum(drawn, ground) + 0.05)
        assert contrast.min() >= LEAST_CONTRAST, f"{name}: {contrast.min():.2f}"


def test_each_stage_that_measures_has_one() -> None:
    """The names that stages give their pictures; a stage without one has a table instead."""
    sources = Path(__file__).parents[2] / "src" / "tuneserve"
    for room, name in {
        "data": "lengths.png",
        "train": "loss.png",
        "merge": "change.png",
        "evaluate": "rows.png",
        "quantize": "quant_loss.png",
        "release": "losses.png",
    }.items():
        assert any(name in path.read_text() for path in (sources / room).glob("*.py")), room


def test_a_loss_that_is_not_finite_has_no_place_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "rows.png"
    plot_rows([2.0, 3.0, 4.0], [1.0, float("inf"), float("nan")], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_fails_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plot_rows([2.0], [1.0], tmp_path / "no-such-folder" / "rows.png")
    assert "plot_rows: the picture could not be drawn" in caplog.text
    assert list(tmp_path.iterdir()) == []
