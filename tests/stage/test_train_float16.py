"""Training as on a GPU without bfloat16: float16 products, float32 adapters, a scaled loss."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pico import make_pico
from train_rows import make_context
from tuneserve.artifacts import Artifact, file_sha256
from tuneserve.errors import AdapterError, ModelError, RunFileError, TrainingDiverged
from tuneserve.lm import hardware
from tuneserve.stages import StageContext
from tuneserve.train import launch
from tuneserve.train.stage import run
from tuneserve.train.trainer import RowTrainer
from tuneserve.train.watch import Watch

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN = {
    "effective_batch": 4,
    "max_steps": 4,
    "learning_rate": 4e-3,
    "save_steps": 2,
    "optimizer": "adamw_torch",
    "lora": {"r": 8},
}
STRAIGHT = ("adapter_model.safetensors", "loss.jsonl", "training.json")
# float16 has 11 significant bits: a step of 2**-11 is 5e-4 of a value.
TOLERANCE = 5e-3
SHIM = Path(__file__).parents[1] / "rank_shim.py"


@pytest.fixture
def float16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "compute_dtype", lambda device: torch.float16)
        yield


@pytest.fixture
def float16_ranks(float16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_RANK", (str(SHIM),))
    monkeypatch.setenv("RANK_SHIM_DTYPE", "float16")


def curve_of(context: StageContext) -> list[dict[str, Any]]:
    lines = (context.out / "loss.jsonl").read_text().splitlines()
    return [point for point in map(json.loads, lines) if "loss" in point]


def scaler_of(context: StageContext, step: int) -> dict[str, Any]:
    path = context.work / f"checkpoint-{step}" / "scaler.pt"
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def overflow_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make one number of the gradient infinite in these steps."""
    clip = RowTrainer._clip_grad_norm

    def poisoned(self: Any, model: Any) -> Any:
        if self.state.global_step + 1 in steps:
            first = next(p for p in model.parameters() if p.grad is not None)
            first.grad.view(-1)[0] = math.inf
        return clip(self, model)

    monkeypatch.setattr(RowTrainer, "_clip_grad_norm", poisoned)


def factors_before_steps(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Filled with the adapter's B factors as each step begins."""
    found: list[torch.Tensor] = []
    begin = Watch.on_step_begin

    def recorded(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parts = [p.flatten() for n, p in kwargs["model"].named_parameters() if ".lora_B." in n]
        found.append(torch.cat(parts).detach().clone())
        begin(self, args, state, control, **kwargs)

    monkeypatch.setattr(Watch, "on_step_begin", recorded)
    return found


@pytest.mark.parametrize(
    ("capability", "dtype", "trained"),
    [
        ((7, 0), torch.float16, torch.float32),  # V100
        ((7, 5), torch.float16, torch.float32),  # T4, RTX 20
        ((8, 0), torch.bfloat16, torch.bfloat16),  # A100
        ((8, 9), torch.bfloat16, torch.bfloat16),  # L4, RTX 40
    ],
)
def test_the_type_follows_the_card(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    trained: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = hardware.compute_dtype(torch.device("cuda", 0))
    assert (found, hardware.adapter_dtype(found)) == (dtype, trained)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"method": "lora", "effective_batch": 8},
        {"lora": {"r": 8, "use_dora": True}},
        {"lora": {"r": 8, "modules_to_save": ["embed_tokens", "lm_head"]}},
    ],
    ids=["nf4", "16 bits", "dora", "whole modules"],
)
def test_losses_are_those_of_float32(
    tmp_path: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    base = make_pico(tmp_path / "base", tied="modules_to_save" not in extra.get("lora", {}))
    curves, held_out = {}, {}
    for dtype in (torch.float32, torch.float16):
        monkeypatch.setattr(hardware, "compute_dtype", lambda device, dtype=dtype: dtype)
        folder = tmp_path / str(dtype)
        folder.mkdir()
        context = make_context(folder, base, {"dataset": dataset}, {**TRAIN, **extra})
        held_out[dtype] = run(context)["eval_loss"]
        curves[dtype] = curve_of(context)
    exact, ours = curves[torch.float32], curves[torch.float16]
    assert [p["loss"] for p in ours] == pytest.approx([p["loss"] for p in exact], rel=TOLERANCE)
    assert [p["grad_norm"] for p in ours] == pytest.approx(
        [p["grad_norm"] for p in exact], rel=3 * TOLERANCE
    )
    assert held_out[torch.float16] == pytest.approx(held_out[torch.float32], rel=TOLERANCE)
    assert ours[-1]["loss"] < ours[0]["loss"] - 1
    adapter = load_file(context.out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    sidecar = json.loads((context.out / "training.json").read_text())
    assert sidecar["compute_dtype"] == "float16"
    assert scaler_of(context, 4)["_growth_tracker"] == 4  # none of the four was skipped


def test_a_step_that_overflows_is_skipped_and_the_run_goes_on_the_same(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    float16: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And 2 + 2 resumed are 4 straight, to the byte, the scaler's state included."""
    overflow_at(monkeypatch, 2)
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN)
    with monkeypatch.context() as patch:
        factors = factors_before_steps(patch)
        metrics = run(context)
    first, skipped, third, _ = curve_of(context)
    assert (metrics["steps"], metrics["skipped_steps"]) == (4, 1)
    assert skipped["skipped"] and "skipped" not in {**first, **third}
    assert skipped["grad_norm"] is None and math.isfinite(skipped["loss"])
    assert len(factors) == 4
    assert not torch.equal(factors[0], factors[1]) and torch.equal(factors[1], factors[2])
    assert not torch.equal(factors[2], factors[3])
    # The rate's schedule waits as well: the third step is at what the second would have had.
    assert third["learning_rate"] == skipped["learning_rate"] > first["learning_rate"]
    before, after = scaler_of(context, 2), scaler_of(context, 4)
    assert before["scale"] == after["scale"] == skipped["loss_scale"] >= 1024
    assert (before["_growth_tracker"], after["_growth_tracker"]) == (0, 2)
    straight = {name: file_sha256(context.out / name) for name in STRAIGHT}

    shutil.rmtree(context.work / "checkpoint-4")  # as if it had been killed in step 3 or 4
    again = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN)
    assert run(again)["skipped_steps"] == 1
    assert {name: file_sha256(again.out / name) for name in STRAIGHT} == straight
    assert scaler_of(again, 4) == after


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (torch.bfloat16, torch.float16, "products bfloat16 or float32, now float16"),
        (torch.float16, torch.float32, "products float16, now bfloat16 or float32"),
    ],
    ids=str,
)
def test_no_going_on_on_a_card_of_the_other_kind(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    first: torch.dtype,
    second: torch.dtype,
    said: str,
) -> None:
    """The optimizer's state has another form there; the checkpoint stays, and is good at home."""
    train = {**TRAIN, "max_steps": 4}
    monkeypatch.setattr(hardware, "compute_dtype", lambda device: first)
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, train)
    run(context)
    shutil.rmtree(context.work / "checkpoint-4")
    shutil.rmtree(context.out)
    context.out.mkdir()
    monkeypatch.setattr(hardware, "compute_dtype", lambda device: second)
    with pytest.raises(AdapterError, match=f"checkpoint-2: made with {said}") as caught:
        run(context)
    assert "go on as it was made" in (caught.value.hint or "")
    assert list(context.out.iterdir()) == []
    monkeypatch.setattr(hardware, "compute_dtype", lambda device: first)
    assert run(context)["steps"] == 4


def test_gradients_that_overflow_at_any_scale_end_the_run(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    float16: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overflow_at(monkeypatch, *range(2, 20))
    train = {**TRAIN, "max_steps": 16, "save_steps": 1}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, train)
    with pytest.raises(TrainingDiverged) as caught:
        run(context)
    assert caught.value.message.startswith(
        "step 11: the gradients of 10 steps in a row overflowed float16; the last rows are train."
    )
    assert "compute capability 8.0" in (caught.value.hint or "")
    assert caught.value.details["step"] == 11 and len(caught.value.details["rows"]) == 4
    assert list(context.out.iterdir()) == []


def test_a_loss_that_is_not_finite_is_no_matter_of_scale(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    float16: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = RowTrainer.compute_loss

    def infinite(self: Any, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        loss = compute(self, model, inputs, *rest, **kwargs)
        return loss * math.inf if self.state.global_step == 2 else loss

    monkeypatch.setattr(RowTrainer, "compute_loss", infinite)
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN)
    with pytest.raises(TrainingDiverged, match="step 3: loss inf at learning rate") as caught:
        run(context)
    assert "more than float16's 65504" in (caught.value.hint or "")
    assert list(context.out.iterdir()) == []


@pytest.mark.parametrize("method", ["qlora", "lora"])
def test_weights_that_float16_cannot_hold_are_named(
    tmp_path: Path, dataset: Artifact, float16: None, method: str
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    base = make_pico(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors[name][3, 5] = 1e5  # bfloat16 goes to 3e38
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    context = make_context(tmp_path, base, {"dataset": dataset}, {**TRAIN, "method": method})
    with pytest.raises(ModelError) as caught:
        run(context)
    assert caught.value.message == f"{base}: 1 tensors are not finite in float16: {name}"
    assert "65504" in caught.value.expected
    assert list(context.out.iterdir()) == [] and not list(context.work.glob("checkpoint-*"))


def test_zero_is_refused(
    tmp_path: Path, pico_model: Path, dataset: Artifact, float16_ranks: None
) -> None:
    train = {**TRAIN, "gpus": 2, "zero": 2, "method": "lora"}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, train)
    with pytest.raises(RunFileError, match="train.zero: 2 on a GPU without bfloat16"):
        run(context)


def test_two_processes_scale_alike(
    tmp_path: Path, pico_model: Path, dataset: Artifact, float16_ranks: None
) -> None:
    curves = []
    for gpus in (1, 2):
        folder = tmp_path / str(gpus)
        folder.mkdir()
        train = {**TRAIN, "max_steps": 3, "gpus": gpus}
        context = make_context(folder, pico_model, {"dataset": dataset}, train)
        run(context)
        curves.append([point["loss"] for point in curve_of(context)])
    assert curves[1] == pytest.approx(curves[0], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", torch.float16), ("gemma3_text", torch.float32)]
)
def test_a_family_that_float16_does_not_hold(
    tmp_path: Path, float16: None, family: str, dtype: torch.dtype
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert hardware.model_dtype(torch.device("cuda", 0), tmp_path) == dtype
