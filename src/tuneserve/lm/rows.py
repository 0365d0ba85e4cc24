"""The token rows that `validate` wrote, held compactly: flat ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tuneserve.errors import DataError

IGNORED = -100
"""Label of a position that is not supervised (the value torch's cross entropy ignores)."""

_COLUMNS = ("input_ids", "labels", "source")


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


def read_rows(path: Path) -> Rows:
    """Read a dataset artifact's `train.parquet` or `eval.parquet`.

    Raises:
        DataError: The file or a column is missing, or ids and labels of a row differ in length.
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
    ids, starts = _flat(table.column("input_ids"))
    labels, label_starts = _flat(table.column("labels"))
    if not np.array_equal(starts, label_starts):
        size = min(len(starts), len(label_starts))
        row = int(np.argmax(starts[:size] != label_starts[:size])) - 1
        raise DataError(
            f"{path}: ids and labels of row {row} differ in length",
            expected="one label a token",
            hint="run `tuneserve validate` again",
        )
    return Rows(ids, labels, starts, table.column("source").to_pylist())


def _flat(column: object) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    import pyarrow.compute as pc

    chunks = column.chunks  # type: ignore[attr-defined]
    values = [np.asarray(chunk.flatten(), dtype=np.int32) for chunk in chunks]
    sizes = [np.asarray(pc.list_value_length(chunk).fill_null(0), np.int64) for chunk in chunks]
    flat = np.concatenate(values) if values else np.empty(0, np.int32)
    ends = np.cumsum(np.concatenate(sizes)) if sizes else np.empty(0, np.int64)
    return flat, np.concatenate((np.zeros(1, np.int64), ends))
