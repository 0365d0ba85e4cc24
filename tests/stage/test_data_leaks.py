"""What validate holds out is trained on nowhere, be it as part of a longer conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_bases as bases
from tuneserve.data.stage import run
from tuneserve.errors import DataError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base for reading only."""
    folder: Path = bases.make_base(tmp_path_factory.mktemp("base") / "tiny")
    return folder


@pytest.fixture(autouse=True)
def tokenizer_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing transformers takes seconds."""
    bases.load_tokenizer_here(monkeypatch)


def texts_of(out: Path, side: str) -> list[tuple[str, ...]]:
    """The contents of each conversation of a side."""
    lines = (out / f"{side}_messages.jsonl").read_text(encoding="utf-8").split("\n")
    return [tuple(m["content"] for m in json.loads(line)["messages"]) for line in lines if line]


def test_a_held_out_conversation_that_begins_a_trained_one(tmp_path: Path, base: Path) -> None:
    train = bases.write_jsonl(
        tmp_path / "train.jsonl",
        [bases.chat("else", "x"), bases.chat("u1", "a1", "u2", "a2"), bases.chat("u1", "b1")],
    )
    held = bases.write_jsonl(
        tmp_path / "held.jsonl", [bases.chat("new", "x"), bases.chat("u1 ", "a1\n")]
    )
    with pytest.raises(DataError, match="eval_overlap: a held-out conversation is") as caught:
        run(bases.make_context(tmp_path, base, [train], eval=[str(held)]))
    assert "held.jsonl:2 is the beginning of train.jsonl:2" in caught.value.message
    assert caught.value.exit_status == 2 and caught.value.details["eval_overlap"] == 1
    # A longer held-out one says more than what is trained on.
    bases.write_jsonl(held, [bases.chat("u1", "b1", "u2", "b2")])
    again = tmp_path / "again"
    again.mkdir()
    metrics = run(bases.make_context(again, base, [train], eval=[str(held)]))
    assert (metrics["train_rows"], metrics["eval_rows"]) == (3, 1)


@pytest.mark.parametrize("seed", range(6))
def test_the_split_leaks_no_answer(tmp_path: Path, base: Path, seed: int) -> None:
    """Every conversation of three exchanges is there from its first exchange on."""
    rows = []
    for number in range(12):
        turns = [f"{kind} {number}.{turn}" for turn in range(3) for kind in ("ask", "say")]
        rows += [bases.chat(*turns[:2]), bases.chat(*turns[:4]), bases.chat(*turns)]
    path = bases.write_jsonl(tmp_path / "rows.jsonl", rows)
    run(bases.make_context(tmp_path, base, [path], eval_fraction=0.3, seed=seed))
    held, trained = (texts_of(tmp_path / "out", side) for side in ("eval", "train"))
    assert held and trained and len(held) + len(trained) == 36
    assert {t[0] for t in held}.isdisjoint(t[0] for t in trained)


def test_one_first_turn_for_all_can_still_be_split(tmp_path: Path, base: Path) -> None:
    rows = [bases.chat("hi", "Hello!", f"ask {n}", f"say {n}") for n in range(80)]
    path = bases.write_jsonl(tmp_path / "rows.jsonl", [*rows, bases.chat("hi", "Hello!")])
    metrics = run(bases.make_context(tmp_path, base, [path], eval_fraction=0.2))
    assert 4 <= metrics["eval_rows"] <= 32  # 16 of 80, give or take three deviations
    assert ("hi", "Hello!") in texts_of(tmp_path / "out", "train")


def test_a_few_chats_of_one_greeting_can_be_split(tmp_path: Path, base: Path) -> None:
    first = ("Hello", "Hello! How can I help you today?")
    rows = [bases.chat(*first), *(bases.chat(*first, f"ask {n}", f"say {n}") for n in range(20))]
    path = bases.write_jsonl(tmp_path / "rows.jsonl", rows)
    metrics = run(bases.make_context(tmp_path, base, [path], eval_fraction=0.2))
    assert 1 <= metrics["eval_rows"] <= 9  # 4 of 20, give or take three deviations
    assert metrics["eval_rows"] + metrics["train_rows"] == 21
    assert first in texts_of(tmp_path / "out", "train")


def test_a_greeting_in_the_held_out_file_is_a_warning(tmp_path: Path, base: Path) -> None:
    first = ("Hello", "Hello! How can I help you today?")
    rows = [bases.chat(*first, f"ask {n}", f"say {n}") for n in range(8)]
    train = bases.write_jsonl(tmp_path / "train.jsonl", rows)
    held = bases.write_jsonl(tmp_path / "held.jsonl", [bases.chat("a", "b"), bases.chat(*first)])
    metrics = run(bases.make_context(tmp_path, base, [train], eval=[str(held)]))
    assert (metrics["train_rows"], metrics["eval_rows"]) == (8, 2)
    assert metrics["warnings"] == {"eval_greeting": 1}
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["warning_places"] == {"eval_greeting": ["held.jsonl:2"]}


def test_a_parquet_of_windows_text_ends_with_its_row(tmp_path: Path, base: Path) -> None:
    answers: Any = pa.array([b"yes", b"caf\xe9", b"no"]).view(pa.string())
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "completion": answers}), path)
    with pytest.raises(DataError, match="bad_encoding 1") as caught:
        run(bases.make_context(tmp_path, base, [path]))
    assert caught.value.exit_status == 2
    assert "rows.parquet:2:1: bad_encoding: column completion: byte 0xE9" in caught.value.message
