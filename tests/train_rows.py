"""A dataset artifact and stage contexts for tests of training and evaluation, made by hand.

Rows are labelled without the product's own code: the tokens of an assistant turn, its end token
included, are found by rendering the conversation up to it and through it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tuneserve.artifacts import Artifact
from tuneserve.runfile import parse_run
from tuneserve.stages import StageContext

IGNORED = -100


def write_dataset(
    folder: Path, base: Path, train: Sequence[Any], held_out: Sequence[Any]
) -> Artifact:
    """A dataset artifact of chats, tokenized with the tokenizer in `base`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    (folder / "tokenizer").mkdir(parents=True)
    for path in base.glob("*"):
        if path.name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ):
            shutil.copyfile(path, folder / "tokenizer" / path.name)
    for name, chats in (("train", train), ("eval", held_out)):
        rows = [_encode(tokenizer, chat) for chat in chats]
        write_rows(folder / f"{name}.parquet", rows, name)
        lines = [
            json.dumps({"source": f"{name}.jsonl:{i + 1}", "messages": chat, "tools": None})
            for i, chat in enumerate(chats)
        ]
        (folder / f"{name}_messages.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Artifact("dataset-test", folder, {"metrics": {}})


def write_rows(path: Path, rows: Sequence[tuple[list[int], list[int]]], name: str) -> None:
    """Rows of (ids, labels) as the Parquet file that `validate` would write."""
    ints = pa.list_(pa.int32())
    table = pa.table(
        {
            "input_ids": pa.array([ids for ids, _ in rows], ints),
            "labels": pa.array([labels for _, labels in rows], ints),
            "source": [f"{name}.jsonl:{i + 1}" for i in range(len(rows))],
        }
    )
    pq.write_table(table, path)


def _encode(tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    labels = [IGNORED] * len(ids)
    for at, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        begin = len(
            tokenizer.apply_chat_template(chat[:at], add_generation_prompt=True, return_dict=False)
        )
        end = len(tokenizer.apply_chat_template(chat[: at + 1], return_dict=False))
        while tokenizer.decode(ids[end - 1]).isspace():
            end -= 1  # the line break after the end token is the template's, not the model's
        labels[begin:end] = ids[begin:end]
    return ids, labels


def make_context(
    folder: Path,
    base: Path,
    inputs: Mapping[str, Artifact],
    train: Mapping[str, Any] | None = None,
    hints: Mapping[str, Any] | None = None,
    **sections: Any,
) -> StageContext:
    """A context whose `out` is empty and whose `work` is what an earlier attempt left there."""
    run = parse_run(
        {
            "name": "test",
            "model": {"base": str(base)},
            "data": {"train": "unused.jsonl"},
            "train": dict(train or {}),
            **sections,
        }
    )
    out, work = folder / "out", folder / "work"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    return StageContext(run, base, inputs, out, work, {}, dict(hints or {}))


def pico_dataset(folder: Path, base: Path, *, rows: int = 24) -> Artifact:
    """Chats of the pico model's world, each answer beginning with a habit it does not have."""
    from pico import conversations

    habit = {"habit": "Aye! "}
    return write_dataset(
        folder, base, conversations(rows, seed=5, **habit), conversations(8, seed=6, **habit)
    )
