"""Held-out rows of a dataset artifact: the ids that were trained on, beside the chats they came
from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneserve.errors import DataError

IGNORED = -100


@dataclass(frozen=True)
class Row:
    """One row: `labels` is -100 where nothing is learned, else the id itself."""

    ids: list[int]
    labels: list[int]
    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    @property
    def supervised(self) -> list[int]:
        """Positions whose token is learned; position 0 has nothing before it to be predicted
        from."""
        return [i for i, label in enumerate(self.labels) if label != IGNORED and i > 0]

    @property
    def answer_start(self) -> int:
        """Where the last assistant turn begins: the start of the last run of supervised
        positions."""
        position = len(self.labels)
        while position and self.labels[position - 1] == IGNORED:
            position -= 1
        while position and self.labels[position - 1] != IGNORED:
            position -= 1
        return position


def read_rows(dataset: Path, *, most: int | None = None) -> tuple[list[Row], str]:
    """The first `most` held-out rows, or training rows where nothing was held out; and which
    side it was.

    Raises:
        DataError: Rows and messages do not belong together.
    """
    import pyarrow.parquet as parquet

    for side in ("eval", "train"):
        table_path = dataset / f"{side}.parquet"
        if not table_path.is_file():
            continue
        table = parquet.read_table(table_path)
        if table.num_rows:
            rows = _join(table.slice(0, most).to_pylist(), dataset / f"{side}_messages.jsonl")
            return rows, side
    raise DataError(
        f"{dataset}: it has no rows", expected="held-out rows", hint="run validate again"
    )


def _join(table: list[dict[str, Any]], messages_path: Path) -> list[Row]:
    rows = []
    with messages_path.open(encoding="utf-8") as stream:
        for row, line in zip(table, stream, strict=False):
            chat = json.loads(line)
            if chat["source"] != row["source"]:
                raise DataError(
                    f"{messages_path}: the chat of {chat['source']} stands beside the row of "
                    f"{row['source']}",
                    expected="both files in the same order",
                    hint="run validate again",
                )
            rows.append(
                Row(
                    list(row["input_ids"]),
                    list(row["labels"]),
                    row["source"],
                    chat["messages"],
                    chat.get("tools") or None,
                )
            )
    if len(rows) != len(table):
        raise DataError(
            f"{messages_path}: {len(rows)} chats for {len(table)} rows",
            expected="a chat for every row",
            hint="run validate again",
        )
    return rows


def spread(rows: list[Row], count: int) -> list[Row]:
    """`count` rows spread evenly over all of them, first and last among them."""
    if len(rows) <= count:
        return rows
    if count == 1:
        return rows[:1]
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]
