"""The memory ladder: what does not fit is tried smaller, with the same rows in the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from train_rows import make_context, pico_dataset
from tuneserve.artifacts import Artifact, file_sha256
from tuneserve.errors import OutOfMemory
from tuneserve.train import stage
from tuneserve.train.stage import run

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN = {
    "effective_batch": 4,
    "max_steps": 3,
    "learning_rate": 4e-3,
    "gradient_checkpointing": False,
    "save_steps": 1,
}
BOTTOM = {**TRAIN, "micro_batch": 1, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, pico_model: Path) -> Artifact:
    return pico_dataset(tmp_path_factory.mktemp("data") / "dataset", pico_model, rows=12)


def room_for(monkeypatch: pytest.MonkeyPatch, rows: int, *, after_calls: int = 0) -> list[int]:
    """Make forward passes of more than `rows` rows run out of memory; returns sizes asked for."""
    from tuneserve.train.trainer import RowTrainer

    original = RowTrainer.compute_loss
    asked: list[int] = []

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(inputs["input_ids"]))
        if asked[-1] > rows and len(asked) > after_calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(RowTrainer, "compute_loss", compute_loss)
    return asked


def test_half_the_micro_batch_and_twice_the_accumulation(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_context(
        tmp_path / "plain", pico_model, {"dataset": dataset}, TRAIN, {"micro_batch": 1}
    )
    run(plain)
    room_for(monkeypatch, 1)
    context = make_context(
        tmp_path / "ladder", pico_model, {"dataset": dataset}, TRAIN, {"micro_batch": 4}
    )
    metrics = run(context)
    assert (metrics["micro_batch"], metrics["gradient_accumulation"]) == (1, 4)
    assert metrics["effective_batch"] == 4 and metrics["steps"] == 3
    assert [text.split(" x ")[0] for text in metrics["did_not_fit"]] == [
        "micro-batch 4",
        "micro-batch 2",
    ]
    assert "2.00 GiB" in metrics["did_not_fit"][0]
    ran_out = {"end": "CUDA out of memory. Tried to allocate 2.00 GiB.", "fits": False}
    rung = "micro-batch {} x {} accumulated, without gradient checkpointing"
    assert metrics["attempts"] == [
        {"rung": rung.format(4, 1), "from_step": 0, "to_step": 0, **ran_out},
        {"rung": rung.format(2, 2), "from_step": 0, "to_step": 0, **ran_out},
        {"rung": rung.format(1, 4), "from_step": 0, "to_step": 3, "end": "trained", "fits": True},
    ]
    for name in ("adapter_model.safetensors", "loss.jsonl"):
        assert file_sha256(context.out / name) == file_sha256(plain.out / name)


def test_in_the_middle_it_goes_on_from_the_checkpoint(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = room_for(monkeypatch, 2, after_calls=3)  # smoke step, steps 1 and 2, then no more
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN, {"micro_batch": 4})
    metrics = run(context)
    assert asked == [4, 4, 4, 4, 2, 2, 2]  # then smoke step and both halves of step 3
    assert metrics["micro_batch"] == 2 and metrics["steps"] == 3
    steps = [json.loads(x)["step"] for x in (context.out / "loss.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 3]
    found = [(one["from_step"], one["to_step"], one["fits"]) for one in metrics["attempts"]]
    assert found == [(0, 2, False), (2, 3, True)]


def test_at_the_bottom_it_goes_on_as_long_as_it_comes_further(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when another program takes the card's memory for a while."""
    from tuneserve.train.trainer import RowTrainer

    original = RowTrainer.compute_loss
    calls: list[int] = []

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        # The smoke step is one call, each step four; the attempts fail in their second step.
        if len(calls) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(RowTrainer, "compute_loss", compute_loss)
    plain = make_context(tmp_path / "plain", pico_model, {"dataset": dataset}, BOTTOM)
    failing: set[int] = set()
    run(plain)
    calls.clear()
    failing = {6, 12}
    context = make_context(tmp_path / "bottom", pico_model, {"dataset": dataset}, BOTTOM)
    metrics = run(context)
    found = [(one["from_step"], one["to_step"], one["fits"]) for one in metrics["attempts"]]
    assert found == [(0, 1, False), (1, 2, False), (2, 3, True)]
    for name in ("adapter_model.safetensors", "training.json"):
        assert file_sha256(context.out / name) == file_sha256(plain.out / name)

    calls.clear()
    failing = {6, 7}  # and the second time in its smoke step
    context = make_context(tmp_path / "end", pico_model, {"dataset": dataset}, BOTTOM)
    with pytest.raises(OutOfMemory) as caught:
        run(context)
    assert len(caught.value.details["tried"]) == 2 and (context.work / "checkpoint-1").is_dir()
    assert list(context.out.iterdir()) == []


def test_the_bottom_says_what_was_tried(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(monkeypatch, 0)
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN, {"micro_batch": 2})
    with pytest.raises(OutOfMemory) as caught:
        run(context)
    assert caught.value.exit_status == 3
    assert [text.partition(": CUDA")[0] for text in caught.value.details["tried"]] == [
        "micro-batch 2 x 2 accumulated, without gradient checkpointing",
        "micro-batch 1 x 4 accumulated, without gradient checkpointing",
        "micro-batch 1 x 4 accumulated, with gradient checkpointing",
    ]
    assert "max_length" in caught.value.hint
    assert caught.value.details["first_oom"]["what"].startswith("the process had ")
    assert list(context.out.iterdir()) == []
    hints = {"micro_batch": 1, "advice": ["train.lora.r: 8 saves 116.2 MiB (a smaller adapter)"]}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN, hints)
    with pytest.raises(OutOfMemory, match="the first time, the process had ") as caught:
        run(context)
    assert "\n    1. train.lora.r: 8 saves 116.2 MiB (a smaller adapter)\n" in caught.value.hint


def test_killed_in_the_smoke_step_begins_one_rung_lower(
    tmp_path: Path, pico_model: Path, dataset: Artifact
) -> None:
    """The kernel's answer to too little memory leaves no error: only the note of what was tried."""
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN, {"micro_batch": 4})
    note = {"micro_batch": 4, "checkpointing": False, "phase": "smoke"}
    (context.work / "rung.json").write_text(json.dumps(note))
    metrics = run(context)
    assert metrics["micro_batch"] == 2
    assert metrics["did_not_fit"] == [
        "micro-batch 4 x 1 accumulated, without gradient checkpointing: killed in its first step"
    ]
    # A kill later than that says nothing about memory: the same rung again.
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN, {"micro_batch": 4})
    (context.work / "rung.json").write_text(json.dumps({**note, "phase": "train"}))
    assert run(context)["micro_batch"] == 4


def test_killed_in_the_smoke_step_at_the_bottom_it_is_tried_once_more(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed by hand or with its machine, a training goes on; twice is no accident."""
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, BOTTOM)
    top = stage.Rung(stage.recipe_of(context, 64), True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else one rung is below
    for attempt in "ab":
        monkeypatch.setenv("TUNESERVE_ATTEMPT", attempt)
        assert stage._start(context, top) == top
        for phase in ("load", "smoke"):
            stage._note(context, top, phase)
    with pytest.raises(OutOfMemory) as caught:
        stage._start(context, top)
    assert caught.value.details["tried"] == [f"{top}: killed in its first step"] * 2
    assert stage._start(context, top) == top  # the next call has patience anew


def test_more_than_the_target_is_too_much_where_there_is_a_rung_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tuneserve.train.attempt import check_room

    check_room(1)  # without a GPU there is nothing to judge
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**30)
    check_room(None)
    check_room(3 * 2**30)
    with pytest.raises(OutOfMemory, match="3.0 GiB") as caught:
        check_room(2 * 2**30)
    assert "2.0 GiB" in caught.value.expected
