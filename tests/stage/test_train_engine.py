"""`engines.train` with another trainer: the example of Unsloth, which without it is plain PEFT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from train_rows import pico_dataset
from tuneserve.calls import StageCall, open_store
from tuneserve.process import run_stage
from tuneserve.runfile import parse_run

ENGINE = Path(__file__).resolve().parents[2] / "deploy" / "engines" / "unsloth" / "python"


@pytest.mark.full
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_its_adapter_is_merged_like_ours(
    tmp_path: Path, pico_model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNSLOTH_PYTHON", sys.executable)
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    train: dict[str, Any] = {"method": method, "effective_batch": 8, "max_steps": 12}
    run = parse_run(
        {
            "name": "engine",
            "model": {"base": str(pico_model)},
            "data": {"train": "unused.jsonl"},
            "train": {**train, "learning_rate": 4e-3, "lora": {"r": 8}},
            "engines": {"train": {"python": str(ENGINE)}},
            "store": {"root": str(tmp_path / "store")},
        }
    )
    store = open_store(run)
    dataset = "dataset-" + "1" * 16
    with store.draft(dataset) as draft:
        pico_dataset(draft.path, pico_model)
        store.commit(draft, "validate", {"metrics": {}})
    hints = {"micro_batch": 4}
    trained = run_stage(StageCall("train", run, pico_model, {"dataset": dataset}, hints=hints))
    assert trained.metrics["engine"] == "plain PEFT" and trained.metrics["steps"] == 12
    assert trained.metrics["final_loss"] < 0.8 * trained.metrics["first_loss"]
    assert trained.artifact and trained.path
    sidecar = json.loads((Path(trained.path) / "training.json").read_text())
    assert (sidecar["quantization"] is None) == (method == "lora")
    inputs = {"adapter": trained.artifact}
    merged = run_stage(
        StageCall("merge", run, pico_model, inputs, settings={"base_weights": "original"})
    )
    assert merged.path
    proof = json.loads((Path(merged.path) / "mergeproof.json").read_text())
    assert proof
    plain = parse_run({**run.model_dump(mode="json"), "engines": {}})
    ours = StageCall("train", plain, pico_model, {"dataset": dataset})
    theirs = StageCall("train", run, pico_model, {"dataset": dataset})
    assert ours.key()["versions"]["unsloth"] is None and theirs.key()["versions"].keys() == (
        ours.key()["versions"].keys()
    )
