"""Held-out conversations are counted as conversations, however many rows each becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

import data_bases as bases
from tuneserve.data.stage import run
from tuneserve.errors import RunFileError
from tuneserve.ladder import check_held_out


def test_rows_of_one_conversation_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that rewrites history makes a row of each answer: nine of three chats."""
    bases.load_tokenizer_here(monkeypatch)
    base = bases.make_base(tmp_path / "base", source=bases.REWRITING)
    train = [bases.chat(f"What is {i}?", f"It is {i}.") for i in range(10)]
    held = [
        bases.chat(*(f"{side} {chat} {turn}" for turn in range(3) for side in ("ask", "say")))
        for chat in range(3)
    ]
    paths = [bases.write_jsonl(tmp_path / f"{n}.jsonl", r) for n, r in (("t", train), ("h", held))]
    context = bases.make_context(tmp_path, base, paths[:1], eval=[str(paths[1])])
    metrics = run(context)
    assert (metrics["eval_rows"], metrics["eval_conversations"]) == (9, 3)
    with pytest.raises(RunFileError, match="3 conversations are held out"):
        check_held_out(context.run, metrics["eval_conversations"])
