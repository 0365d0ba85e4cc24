"""Fitting the plan to a machine: measured points in, constants out, and the plan uses them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tuneserve.errors import RunFileError
from tuneserve.plan import calibrate
from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.constants import DEFAULT, MIB, Constants
from tuneserve.plan.memory import train_peak
from tuneserve.plan.trainstep import Step

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))


def leave(true: Constants, batches: list[tuple[int, int]], context: int | None) -> None:
    arch = arch_from_config(CONFIG)
    for micro_batch, length in batches:
        step = Step(micro_batch, length, arch.linears, 16, True, kernels="fused")
        parts = train_peak(arch, step, true).components
        reserved = sum(size for name, size in parts.items() if name != "CUDA context")
        calibrate.record(CONFIG, step, reserved, reserved + context if context else None)


def test_another_machine_is_found_from_its_trainings() -> None:
    true = Constants(fused_slack_bytes=900 * MIB, fused_slack_tensors=9.0)
    leave(true, [(1, 512), (2, 1024), (4, 2048), (8, 2048), (16, 2048), (16, 4096)], 400 * MIB)
    found = calibrate.calibrate()
    assert found["points"] == 6
    assert found["before"]["worst"] > 0.25 and found["after"]["worst"] < 0.05
    here = calibrate.machine_constants()
    assert here.cuda_context_bytes == 400 * MIB
    assert here.fused_slack_tensors == pytest.approx(9, rel=0.1)
    assert here.edge_tensors == DEFAULT.edge_tensors


def test_one_training_moves_it_but_not_all_the_way() -> None:
    leave(Constants(fused_slack_bytes=900 * MIB), [(4, 2048)], None)
    found = calibrate.calibrate()
    assert DEFAULT.fused_slack_bytes < found["constants"]["fused_slack_bytes"] < 900 * MIB
    assert found["constants"]["cuda_context_bytes"] == DEFAULT.cuda_context_bytes
    assert found["after"]["mape"] < found["before"]["mape"]


def test_without_a_training_it_says_so() -> None:
    with pytest.raises(RunFileError, match="no training on a GPU"):
        calibrate.calibrate()
    assert calibrate.machine_constants() == DEFAULT
    assert not calibrate.constants_file().exists()


def test_lines_of_another_version_are_left_out() -> None:
    leave(DEFAULT, [(1, 512)], None)
    with calibrate.points_file().open("a") as stream:
        stream.write('{"config": {}}\nhalf a li')
    assert len(calibrate.read_points(calibrate.points_file())) == 1


def test_measured_points_within_what_is_promised() -> None:
    """Mean at most 8 %, worst at most 15 %, on the architectures nothing was fitted on too."""
    sys.path.insert(0, str(ROOT / "bench"))
    import bench_plan

    saved: dict[str, Any] = json.loads(bench_plan.POINTS.read_text())
    known = bench_plan.shapes()
    errors = {True: [], False: []}  # type: ignore[var-annotated]
    for point in saved["points"]:
        planned = bench_plan.predicted_bytes(point, known[point["shape"]])
        errors[point["held_out"]].append(abs(planned / point["peak_reserved_bytes"] - 1))
    assert len(errors[True]) >= 5 and sum(map(len, errors.values())) >= 19
    for found in errors.values():
        assert sum(found) / len(found) <= 0.08 and max(found) <= 0.15
