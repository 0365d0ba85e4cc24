"""Token rows are checked before anything is loaded onto a GPU: ids, labels, types."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train_rows import IGNORED, write_rows
from tuneserve.errors import DataError
from tuneserve.lm.rows import Rows, check_ids, read_rows

VOCABULARY = 97
GOOD: tuple[list[int], list[int]] = ([0, 5, 96], [IGNORED, 5, 96])


@pytest.mark.parametrize(
    ("ids", "labels", "what", "position"),
    [
        ([1, 97, 2], [IGNORED, IGNORED, 2], "token id 97", 1),  # A02
        ([1, 5, -1], [IGNORED, 5, IGNORED], "token id -1", 2),
        ([1, 5, 6], [IGNORED, 5, 97], "label 97", 2),
        ([1, 5, 6], [IGNORED, -1, 6], "label -1", 1),
        ([1, 5, 6], [-101, 5, 6], "label -101", 0),
    ],
)
def test_a02_ids_and_labels(
    tmp_path: Path, ids: list[int], labels: list[int], what: str, position: int
) -> None:
    write_rows(tmp_path / "train.parquet", [GOOD, ([], []), (ids, labels), GOOD], "chats")
    rows = read_rows(tmp_path / "train.parquet")
    with pytest.raises(DataError) as caught:
        check_ids(rows, VOCABULARY, "train.parquet")
    assert caught.value.message == (
        f"train.parquet: chats.jsonl:3: {what} at position {position} is none of the model's 97 "
        "embeddings"
    )
    assert "0 to 96" in caught.value.expected and "validate" in caught.value.hint
    assert ("-100" in caught.value.expected) == what.startswith("label")


@pytest.mark.parametrize("at", [0, 999_999])
def test_checking_takes_little_memory(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr("tuneserve.lm.rows._CHECKED", 1000)
    ids = np.full(10**6, 5, dtype=np.int32)
    rows = Rows(ids, ids.copy(), np.array([0, 500_000, 10**6]), ["a:1", "a:2"])
    tracemalloc.start()
    try:
        check_ids(rows, VOCABULARY, "train.parquet")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    rows.labels[at] = 97
    place = "a:1: label 97 at position 0 " if at == 0 else "a:2: label 97 at position 499999 "
    with pytest.raises(DataError, match=place):
        check_ids(rows, VOCABULARY, "train.parquet")


def test_good_rows_pass(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet", [GOOD, GOOD], "chats")
    check_ids(read_rows(tmp_path / "train.parquet"), VOCABULARY, "train.parquet")
    write_rows(tmp_path / "train.parquet", [], "chats")
    check_ids(read_rows(tmp_path / "train.parquet"), VOCABULARY, "train.parquet")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[2**32 + 5, 1]], pa.list_(pa.int64())),  # as 32 bits it would be 5
        ([[5, None]], pa.list_(pa.int32())),
        ([None], pa.list_(pa.int32())),
        ([[1.5, 2.0]], pa.list_(pa.float64())),
        ([5], pa.int32()),
        ([["5"]], pa.list_(pa.string())),
    ],
)
def test_columns_of_other_types(tmp_path: Path, values: list[Any], kind: pa.DataType) -> None:
    ids = pa.array(values, kind)
    pq.write_table(
        pa.table({"input_ids": ids, "labels": ids, "source": ["a:1"]}), tmp_path / "x.parquet"
    )
    with pytest.raises(DataError, match="input_ids does not hold lists of 32-bit numbers alone"):
        read_rows(tmp_path / "x.parquet")
    ids = pa.array([[5, 6]], pa.list_(pa.int64()))
    pq.write_table(
        pa.table({"input_ids": ids, "labels": ids, "source": ["a:1"]}), tmp_path / "x.parquet"
    )
    assert read_rows(tmp_path / "x.parquet").ids.tolist() == [5, 6]
