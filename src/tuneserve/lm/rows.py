"""The token rows that `validate` wrote, held compactly: flat ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuneserve.errors import DataError

IGNORED = -100
"""Label of a position that is not supervised (the value torch's cross entropy ignores)."""

_COLUMNS = ("input_ids", "labels", "source")
# Ids that are compared at a time: the masks of all would take more memory than the rows.
_CHECKED = 2**22


@dataclass(frozen=True)
class Rows:
    """Rows of a dataset artifact's Parquet file.

    Attributes:
        ids: All rows' token ids after each other.
        labels: As long as `ids`: the same ids where supervised, else `IGNORED`.
        starts: Where each row begins, and the end: one longer than there are rows.
        sources: ``file:line`` of each row.
    """

    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    sources: Sequence[str]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Ids and labels of one row."""
        begin, end = self.starts[index], self.starts[index + 1]
        return self.ids[begin:end], self.labels[begin:end]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.starts)

    def supervised(self) -> npt.NDArray[np.int64]:
        """Supervised tokens of each row; its first is never predicted and does not count."""
        marked = self.labels != IGNORED
        marked[self.starts[:-1][self.lengths > 0]] = False
        totals = np.concatenate(([0], np.cumsum(marked)))
        return totals[self.starts[1:]] - totals[self.starts[:-1]]


def check_ids(rows: Rows, vocabulary: int, file: str) -> None:
    """Every id must be a row of the embedding, every label one or exactly `IGNORED`.

    A GPU would stop at the first other one with an assertion that names nothing.

    Raises:
        DataError: The first that is not, with its row, position and value.
    """
    for begin in range(0, len(rows.ids), _CHECKED):
        ids, labels = rows.ids[begin : begin + _CHECKED], rows.labels[begin : begin + _CHECKED]
        wrong_id = (ids < 0) | (ids >= vocabulary)
        wrong = wrong_id | ((labels != IGNORED) & ((labels < 0) | (labels >= vocabulary)))
        if wrong.any():
            first = int(wrong.argmax())
            raise _wrong(rows, begin + first, bool(wrong_id[first]), vocabulary, file)


def _wrong(rows: Rows, at: int, in_ids: bool, vocabulary: int, file: str) -> DataError:
    row = int(np.searchsorted(rows.starts, at, side="right")) - 1
    position = at - int(rows.starts[row])
    kind, value, allowed = "token id", int(rows.ids[at]), ""
    if not in_ids:
        kind, value, allowed = "label", int(rows.labels[at]), f", or {IGNORED}"
    return DataError(
        f"{file}: {rows.sources[row]}: {kind} {value} at position {position} is none of the "
        f"model's {vocabulary} embeddings",
        expected=f"0 to {vocabulary - 1}{allowed}: rows tokenized with the tokenizer of this base",
        hint="run `tuneserve validate` with this base",
        details={"source": rows.sources[row], "position": position, "value": value,
                 "vocabulary": vocabulary},
    )  # fmt: skip


def read_rows(path: Path) -> Rows:
    """Read a dataset artifact's `train.parquet` or `eval.parquet`.

    Raises:
        DataError: The file or a column is missing, holds other than numbers of 32 bits, or ids and
            labels of a row differ in length.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=list(_COLUMNS))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(
            f"{path}: cannot be read ({error})",
            expected=f"a Parquet file with the columns {', '.join(_COLUMNS)}",
            hint="run `tuneserve validate` again",
        ) from error
    ids, starts = _flat(path, table, "input_ids")
    labels, label_starts = _flat(path, table, "labels")
    if not np.array_equal(starts, label_starts):
        size = min(len(starts), len(label_starts))
        row = int(np.argmax(starts[:size] != label_starts[:size])) - 1
        raise DataError(
            f"{path}: ids and labels of row {row} differ in length",
            expected="one label a token",
            hint="run `tuneserve validate` again",
        )
    return Rows(ids, labels, starts, table.column("source").to_pylist())


def _flat(path: Path, table: Any, name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = table.column(name).chunks
    try:
        flat = [chunk.flatten() for chunk in chunks]
        if any(chunk.null_count for chunk in [*chunks, *flat]):
            raise pa.ArrowInvalid("nulls")
        if any(len(chunk) and not pa.types.is_integer(chunk.type) for chunk in flat):
            raise pa.ArrowInvalid(str(flat[0].type))
        flat = [chunk.cast(pa.int32()) for chunk in flat]
    except (pa.ArrowException, AttributeError) as error:
        raise DataError(
            f"{path}: {name} does not hold lists of 32-bit numbers alone ({error})",
            expected="one list of token ids a row",
            hint="run `tuneserve validate` again",
        ) from error
    sizes = [np.asarray(pc.list_value_length(chunk), np.int64) for chunk in chunks]
    values = [np.asarray(chunk, np.int32) for chunk in flat]
    ids = np.concatenate(values) if values else np.empty(0, np.int32)
    ends = np.cumsum(np.concatenate(sizes)) if sizes else np.empty(0, np.int64)
    return ids, np.concatenate((np.zeros(1, np.int64), ends))
