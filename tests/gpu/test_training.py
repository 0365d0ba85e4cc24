"""What only a GPU shows of the train stage: utilization, the point that is left for
`plan --calibrate`, real memory that runs out, a kernel that hangs, and the best checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

sys.path.insert(0, str(Path(__file__).parent))
LENGTH = 256


def context_of(folder: Path, train: dict[str, Any], length: int = LENGTH) -> Any:
    from train_step import SHAPES, _make_base, _make_dataset

    from tuneserve.artifacts import Artifact
    from tuneserve.runfile import parse_run
    from tuneserve.stages import StageContext

    base = folder / "base"
    if not base.is_dir():
        _make_base(base, "tiny")
        _make_dataset(folder / "data", SHAPES["tiny"]["vocab_size"], 32, length, held_out=8)
    settings = {"lora": {"r": 8}, "effective_batch": 4, "max_steps": 6, "save_steps": 3, **train}
    run = {"name": "gpu", "model": {"base": str(base)}, "data": {"train": "random"}}
    for name in ("out", "work"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    inputs = {"dataset": Artifact("dataset-random", folder / "data", {})}
    parsed = parse_run({**run, "train": settings})
    return StageContext(parsed, base, inputs, folder / "out", folder / "work", {}, {})


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("checkpointing", [True, "offload"])
def test_best_checkpoint_utilization_and_point(tmp_path: Path, checkpointing: bool | str) -> None:
    from tuneserve.plan import calibrate
    from tuneserve.train.stage import run

    train = {"keep": "best", "eval_steps": 2, "gradient_checkpointing": checkpointing}
    context = context_of(tmp_path, {**train, "learning_rate": 1e-2})
    metrics = run(context)
    curve = [json.loads(line) for line in (context.out / "loss.jsonl").read_text().splitlines()]
    losses = {point["step"]: point["eval_loss"] for point in curve if "eval_loss" in point}
    assert metrics["best_step"] == min(losses, key=lambda step: losses[step])
    assert metrics["eval_loss"] == pytest.approx(min(losses.values()), abs=1e-6)
    assert 0 <= metrics["model_flop_utilization"] < 1  # of two tiny layers
    assert metrics["peak_gpu_bytes"] > 0
    (point,) = calibrate.read_points(calibrate.points_file())
    assert point.step.checkpointing == checkpointing and point.step.length == LENGTH
    found = calibrate.calibrate()
    assert found["points"] == 1 and found["after"]["worst"] <= found["before"]["worst"]
    assert calibrate.constants_file().is_file()


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit", "adamw_torch"])
def test_a_resumed_run_keeps_the_state_of_its_optimizer(tmp_path: Path, optimizer: str) -> None:
    """B07: 6 steps straight are 3 and 3 resumed, also of an optimizer in unified memory. Without
    its moments, step 4 would begin anew with the largest step there is."""
    from safetensors.torch import load_file

    from tuneserve.train.stage import run

    found = []
    train = {"optimizer": optimizer, "learning_rate": 1e-2}
    context = context_of(tmp_path, train)
    for _ in range(2):
        run(context)
        lines = (context.out / "loss.jsonl").read_text().splitlines()
        losses = [point["loss"] for point in map(json.loads, lines) if "loss" in point]
        found.append((losses, load_file(context.out / "adapter_model.safetensors")))
        state = torch.load(context.work / "checkpoint-6" / "optimizer.pt", weights_only=False)
        (moments,) = state["state"].values()  # one flat tensor
        moments = moments.get("__bnb_optimizer_quant_state__", moments)  # of 8 bits: by its blocks
        first = moments["absmax1" if "absmax1" in moments else "exp_avg"]
        assert first.count_nonzero() > first.numel() / 2
        shutil.rmtree(context.work / "checkpoint-6")  # a kill in step 6
        shutil.rmtree(context.out)
        context.out.mkdir()
    (straight, adapter), (resumed, again) = found
    assert len(straight) == 6 and resumed == pytest.approx(straight, rel=1e-3)
    for name, tensor in adapter.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-2, atol=1e-3)


def test_memory_that_runs_out_is_explained_and_tried_smaller(tmp_path: Path) -> None:
    from tuneserve.train.stage import run

    train = {"effective_batch": 16, "gradient_checkpointing": False, "method": "lora"}
    peaks = {}
    for rows in (1, 16):
        context = context_of(tmp_path, {**train, "max_steps": 2}, length=8192)
        context.hints["micro_batch"] = rows
        peaks[rows] = run(context)["peak_gpu_bytes"]
    context = context_of(tmp_path, {**train, "max_steps": 2}, length=8192)
    context.hints["micro_batch"] = 16
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(sum(peaks.values()) / 2 / total)
    try:
        metrics = run(context)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert metrics["did_not_fit"] and metrics["micro_batch"] < 16
    assert metrics["micro_batch"] * metrics["gradient_accumulation"] == 16
    first = json.loads((context.out / "memory.json").read_text())["first_oom"]
    assert any(phase.startswith("smoke") for phase in first["phases"]) and first["what"]
    assert (context.work / "first_oom.pickle").stat().st_size > 0


HANGS = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import torch
from test_training import context_of
from tuneserve.train import trainer
from tuneserve.train.stage import run
plain = trainer.RowTrainer.compute_loss
calls = []
def compute_loss(self, *args, **named):
    calls.append(0)
    if len(calls) == 4:
        torch.cuda._sleep(int(3e10))  # 15 seconds that the next read of a loss waits for
    return plain(self, *args, **named)
trainer.RowTrainer.compute_loss = compute_loss
run(context_of(Path({folder!r}), {{"stall_seconds": 3}}))
"""


def test_a_kernel_that_hangs_is_reported_and_ended(tmp_path: Path) -> None:
    """Python gets to run again when the kernel ends; what is raised names the limit."""
    code = HANGS.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.returncode != 0
    assert "StageTimeout" in done.stderr and "training hung for" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("method", ["qlora", "lora"])
def test_float16_as_on_a_card_without_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Losses of float32 within float16's rounding, in fused nodes; 6 steps straight are 3 + 3
    resumed, and a step that overflows is skipped."""
    from safetensors.torch import load_file

    from tuneserve.lm import hardware
    from tuneserve.train.stage import run
    from tuneserve.train.trainer import RowTrainer

    def losses(context: Any) -> list[float]:
        lines = (context.out / "loss.jsonl").read_text().splitlines()
        return [point["loss"] for point in map(json.loads, lines) if "loss" in point]

    train = {"method": method, "learning_rate": 1e-2}
    found = {}
    for dtype in (torch.float32, torch.float16):
        monkeypatch.setattr(hardware, "compute_dtype", lambda device, dtype=dtype: dtype)
        context = context_of(tmp_path, train)
        run(context)
        found[dtype] = losses(context)
    assert found[torch.float16] == pytest.approx(found[torch.float32], rel=1e-2)
    adapter = load_file(context.out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    checkpoint = context.work / "checkpoint-6"
    assert torch.load(checkpoint / "scaler.pt", weights_only=True)["_growth_tracker"] == 6

    shutil.rmtree(checkpoint)
    shutil.rmtree(context.out)
    context.out.mkdir()
    run(context)
    assert losses(context) == pytest.approx(found[torch.float16], rel=1e-3)
    assert torch.load(checkpoint / "scaler.pt", weights_only=True)["_growth_tracker"] == 6

    clip = RowTrainer._clip_grad_norm

    def poisoned(self: Any, model: Any) -> Any:
        if self.state.global_step == 1:
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf
        return clip(self, model)

    monkeypatch.setattr(RowTrainer, "_clip_grad_norm", poisoned)
    context = context_of(tmp_path, train)
    assert run(context)["steps"] == 6
    points = [json.loads(line) for line in (context.out / "loss.jsonl").read_text().splitlines()]
    assert [p["step"] for p in points if p.get("skipped")] == [2]
