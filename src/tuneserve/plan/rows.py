"""What the plan needs to know about the data: how many rows, how long, and with tools or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DataShape:
    """Row lengths in tokens, longest first; tool calls anywhere in the conversations; the id of the
    dataset artifact, where they are read from one."""

    lengths: tuple[int, ...]
    has_tool_calls: bool = False
    dataset: str = ""

    @property
    def rows(self) -> int:
        """Training rows."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.lengths[0] if self.lengths else 0


def data_shape(folder: Path, dataset: str = "") -> DataShape:
    """Read the columns that matter here of the dataset artifact of this id; the token ids
    themselves stay on disk.
    """
    import pyarrow.compute
    import pyarrow.parquet

    column = pyarrow.parquet.read_table(folder / "train.parquet", columns=["input_ids"])[0]
    lengths = sorted(pyarrow.compute.list_value_length(column).to_pylist(), reverse=True)
    has_tool_calls = _has_tool_calls(folder / "train_messages.jsonl")
    return DataShape(tuple(lengths), has_tool_calls, dataset)


def data_shape_from_metrics(metrics: Mapping[str, Any] | None) -> DataShape | None:
    """The same from `{"lengths": [...], "has_tool_calls": bool}`; None when nothing is known."""
    if not metrics or not metrics.get("lengths"):
        return None
    lengths: Sequence[int] = metrics["lengths"]
    return DataShape(
        tuple(sorted(lengths, reverse=True)), bool(metrics.get("has_tool_calls", False))
    )


def _has_tool_calls(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if '"tool' not in line:  # spares parsing of nearly all rows
                continue
            row = json.loads(line)
            if row.get("tools") or any(m.get("tool_calls") for m in row["messages"]):
                return True
    return False
