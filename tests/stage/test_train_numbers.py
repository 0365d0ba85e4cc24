"""Held-out losses that are not finite, evaluations that take long, positions that end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pico import CHAT_TEMPLATE
from train_rows import IGNORED, make_context, pico_dataset, write_rows
from tuneserve.artifacts import Artifact
from tuneserve.errors import TrainingDiverged
from tuneserve.lm.loss import RowLosses, pad_rows
from tuneserve.lm.rows import Rows, read_rows
from tuneserve.train import attempt, collective
from tuneserve.train.recipe import make_recipe
from tuneserve.train.stage import run
from tuneserve.train.watching import StallGuard

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN = {"effective_batch": 4, "max_steps": 3, "learning_rate": 4e-3, "save_steps": 1}


@pytest.mark.parametrize(("bad_step", "extra"), [(2, {"eval_steps": 1, "keep": "best"}), (3, {})])
def test_a_held_out_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    bad_step: int,
    extra: dict[str, Any],
) -> None:
    original, calls = attempt.row_losses, []

    def losses(*args: Any, **kwargs: Any) -> RowLosses:
        found = original(*args, **kwargs)
        calls.append(1)
        if not extra or len(calls) == bad_step:
            found.sums[[2, 5]] = float("nan"), float("inf")
        return found

    monkeypatch.setattr(attempt, "row_losses", losses)
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, {**TRAIN, **extra})
    with pytest.raises(TrainingDiverged) as caught:
        run(context)
    assert caught.value.message == (
        f"step {bad_step}: the loss of 2 of 8 held-out rows is not finite: eval.jsonl:3, "
        "eval.jsonl:6"
    )
    assert caught.value.details == {"step": bad_step, "rows": ["eval.jsonl:3", "eval.jsonl:6"]}
    assert caught.value.exit_status == 2 and list(context.out.iterdir()) == []
    if extra:  # what was the best before is as it was
        note = json.loads((context.work / "best" / "best.json").read_text())
        assert note["step"] == 1 and np.isfinite(note["loss"])


def test_every_rank_stops_for_a_row_of_another(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of 2 has rows 1, 3, 5, 7, all fine; rank 0 found row 4 bad."""
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, TRAIN)
    held_out = read_rows(dataset.path / "eval.parquet")
    seen: list[int] = []

    def losses(model: Any, rows: Rows, mine: Any, done: Any) -> RowLosses:
        seen.extend(mine)
        return RowLosses(np.full(len(mine), 2.0), np.full(len(mine), 4))

    def totals(numbers: list[float]) -> list[float]:
        others = [float("nan"), 16, 0, 0, 0, 0, 1, 0, 0, 0]
        return [a + b for a, b in zip(numbers, others, strict=True)]

    monkeypatch.setattr(attempt, "row_losses", losses)
    monkeypatch.setattr(collective, "rank", lambda: 1)
    monkeypatch.setattr(collective, "ranks", lambda: 2)
    recipe = make_recipe(context.run.train, 24, 2)
    tried = attempt.Attempt(context, held_out, held_out, recipe, True, None)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(collective, "totals", totals)
        with pytest.raises(TrainingDiverged, match=r"step 7: the loss of 1 of .*: eval.jsonl:5\n"):
            tried._held_out_loss(torch.nn.Module(), 7)
    assert seen == [1, 3, 5, 7]
    # 4 rows of 2 nats over 4 tokens each
    assert tried._held_out_loss(torch.nn.Module(), 7) == 0.5


def test_every_batch_of_an_evaluation_is_a_sign_of_life(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an evaluation longer than `train.stall_seconds` would be taken for a hanging step."""
    beats: list[float] = []
    during: list[int] = []
    beat, original = StallGuard.beat, attempt.row_losses

    def counted(self: StallGuard, seconds: float = 0.0) -> None:
        beats.append(seconds)
        beat(self, seconds)

    def losses(*args: Any, **kwargs: Any) -> RowLosses:
        before = len(beats)
        found = original(*args, **kwargs, batch_tokens=1)  # eight rows, eight batches
        during.append(len(beats) - before)
        return found

    monkeypatch.setattr(StallGuard, "beat", counted)
    monkeypatch.setattr(attempt, "row_losses", losses)
    train = {**TRAIN, "eval_steps": 1}
    run(make_context(tmp_path, pico_model, {"dataset": dataset}, train))
    assert during[:2] == [8, 8]


def test_a_width_is_rounded_up_but_not_beyond_the_positions() -> None:
    lengths = [97, 3]
    ids = np.arange(100, dtype=np.int32)
    rows = Rows(ids, ids, np.array([0, 97, 100]), ["a:1", "a:2"])
    for multiple, limit, width in ((8, None, 104), (8, 100, 100), (8, 128, 104), (1, 100, 97)):
        batch = pad_rows(rows, [0, 1], multiple, limit)
        assert batch["input_ids"].shape == (2, width), (multiple, limit)
        assert batch["attention_mask"].sum(-1).tolist() == lengths
    assert pad_rows(rows, [1], 8, 100)["input_ids"].shape == (1, 8)


def test_a_model_of_100_positions_trains_on_rows_of_100_tokens(
    tmp_path: Path, pico_model: Path
) -> None:
    """GPT-2's positions are a table; 100 is no multiple of 8."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    base = tmp_path / "base"
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=100, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(pico_model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(base)
    data = pico_dataset(tmp_path / "data", pico_model, rows=4)
    ids = [(7 * at) % 512 for at in range(100)]
    row = (ids, [IGNORED] * 50 + ids[50:])
    for side in ("train", "eval"):
        write_rows(data.path / f"{side}.parquet", [row] * 2, side)
    train = {**TRAIN, "method": "lora", "lora": {"target_modules": ["c_attn"]}}
    metrics = run(make_context(tmp_path, base, {"dataset": data}, train, {"micro_batch": 2}))
    assert metrics["steps"] == 3 and np.isfinite(metrics["eval_loss"])
