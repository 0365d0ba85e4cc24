"""A plan takes the rows that `validate` made of the same data, and makes nothing itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import pico
from tuneserve.artifacts import Store
from tuneserve.calls import StageCall
from tuneserve.config import RunFile
from tuneserve.plan import plan_run
from tuneserve.plan.validated import validated_dataset
from tuneserve.process import run_stage
from tuneserve.runfile import parse_run

UNKNOWN = "data: not validated yet, so every row counts as long as data.max_length (256 tokens)"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tuneserve.release.entrance.check_early", lambda serve: None)
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = (json.dumps({"messages": chat}) for chat in pico.conversations(20))
    path.write_text("\n".join(rows) + "\n")
    return path


def run(base: Path, *paths: str, **changes: Any) -> RunFile:
    data = {"train": list(paths), "max_length": 256, "eval_fraction": 0}
    return parse_run(
        {
            "name": "t",
            "model": {"base": str(base)},
            "data": data,
            "quantize": {"methods": ["none"]},
            **changes,
        }
    )


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())


def test_a_plan_uses_what_validate_made(pico_model: Path, data: Path, home: Path) -> None:
    asked = run(pico_model, str(data))
    before = plan_run(asked)
    assert before["dataset"] is None and UNKNOWN in before["table"]
    assert before["train"]["steps"] is None and not home.exists()

    made = run_stage(StageCall("validate", asked, pico_model))
    held = files(home)
    rows = pq.read_table(Path(made.path or "") / "train.parquet")["input_ids"].to_pylist()
    longest = max(map(len, rows))
    assert len(rows) == 18 and longest < 256  # 2 of 20 are said twice
    after = plan_run(asked)
    assert after["dataset"] == made.artifact
    assert after["refused_for"][0].startswith("0 conversations are held out, and the gates decide")
    line = f"data: 18 rows of {made.artifact}, the longest of {longest} tokens"
    assert line in after["table"] and UNKNOWN not in after["table"]
    assert after["train"]["longest_row_tokens"] == longest
    # 18 rows in batches of 16, three times over: 3.375, rounded up.
    three = {"train": {"epochs": 3, "effective_batch": 16}}
    assert plan_run(run(pico_model, str(data), **three))["train"]["steps"] == 4
    assert files(home) == held

    # Other data, other settings of theirs, and data that went are not that dataset.
    data.write_text(data.read_text() + "\n")
    assert plan_run(asked)["dataset"] is None
    data.unlink()
    assert plan_run(asked)["dataset"] is None
    assert files(home) == held


def test_nothing_is_fetched_or_hashed_for_a_plan(
    pico_model: Path, data: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("nothing may be read")

    monkeypatch.setattr(StageCall, "key", fail)
    asked = run(pico_model, str(data))
    assert validated_dataset(asked, pico_model) is None  # there is no store
    root = home / "store"
    (root / "dataset-0123456789abcdef").mkdir(parents=True)
    monkeypatch.setattr(StageCall, "store", Store(root))
    assert validated_dataset(run(pico_model, "s3://bucket/a.jsonl"), pico_model) is None
    (home / "base").mkdir()
    assert validated_dataset(asked, home / "base") is None  # its weights are not here
    with pytest.raises(AssertionError):
        validated_dataset(asked, pico_model)
