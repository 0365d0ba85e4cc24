"""Which training rows calibrate the export."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tuneserve.config import QuantizeSection
from tuneserve.errors import QuantizeError
from tuneserve.quantize.calibration import choose, enough


def dataset(folder: Path, rows: list[list[int]], name: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    table = pyarrow.table(
        {
            "input_ids": pyarrow.array(rows, pyarrow.list_(pyarrow.int32())),
            "labels": pyarrow.array(rows, pyarrow.list_(pyarrow.int32())),
            "source": [f"chats.jsonl:{i + 1}" for i in range(len(rows))],
        }
    )
    pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    return folder


def rows_of(*lengths: int) -> list[list[int]]:
    return [[i + 1] * length for i, length in enumerate(lengths)]


def test_rows_are_taken_evenly_over_the_lengths(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", rows_of(*range(11, 111)))  # 100 rows, 11 to 110 tokens
    found = choose(folder, count=10, max_tokens=512, min_tokens=1)
    # Longest first; the middle of each tenth: ranks 5, 15, ... of 100.
    assert [len(row) for row in found.rows] == [105, 95, 85, 75, 65, 55, 45, 35, 25, 15]
    assert found.tokens == 600


def test_the_choice_does_not_depend_on_the_order_in_the_file(tmp_path: Path) -> None:
    rows = rows_of(*[20] * 40, *range(11, 60))
    shuffled = rows[:]
    random.Random(1).shuffle(shuffled)
    one = choose(dataset(tmp_path / "a", rows), count=16, max_tokens=64, min_tokens=1)
    two = choose(dataset(tmp_path / "b", shuffled), count=16, max_tokens=64, min_tokens=1)
    assert one.rows == two.rows and one.hashes == two.hashes


def test_hashes_and_sources_belong_to_the_rows(tmp_path: Path) -> None:
    rows = rows_of(30, 12, 25, 18, 40, 22, 16, 35)
    found = choose(dataset(tmp_path / "d", rows), count=8, max_tokens=32, min_tokens=1)
    for row, source, digest in zip(found.rows, found.sources, found.hashes, strict=True):
        original = rows[int(source.rpartition(":")[2]) - 1]
        assert row == original[:32]
        assert digest == hashlib.sha256(struct.pack(f"<{len(row)}i", *row)).hexdigest()


def test_d10_held_out_rows_are_never_read(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", rows_of(*range(20, 40)))
    dataset(folder, [[7] * 500], "eval")
    found = choose(folder, count=20, max_tokens=512, min_tokens=1)
    assert max(map(len, found.rows)) == 39
    (folder / "train.parquet").unlink()
    with pytest.raises(QuantizeError, match="train.parquet cannot be read"):
        choose(folder, count=20, max_tokens=512, min_tokens=1)


@pytest.mark.parametrize(
    ("lengths", "kept", "tokens", "short"),
    [([64], 1, 64, 0), ([2] * 300, 0, 0, 300), ([10] * 9 + [11] * 7, 7, 77, 9)],
)
def test_d01_too_little_is_refused_with_the_real_counts(
    tmp_path: Path, lengths: list[int], kept: int, tokens: int, short: int
) -> None:
    folder = dataset(tmp_path / "d", rows_of(*lengths))
    with pytest.raises(QuantizeError) as caught:
        choose(folder, count=256, max_tokens=512, min_tokens=1)
    assert f"{kept} rows with {tokens} tokens are left" in caught.value.message
    assert f"{short} of 10 tokens or fewer" in caught.value.message
    assert caught.value.details["rows"] == kept
    assert [path.name for path in folder.iterdir()] == ["train.parquet"]


def test_d01_enough_rows_with_too_few_tokens_are_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", rows_of(*[20] * 50))
    with pytest.raises(QuantizeError, match="50 rows with 1000 tokens") as caught:
        choose(folder, count=256, max_tokens=512, min_tokens=1024)
    assert caught.value.expected == "at least 8 rows and 1024 tokens"
    assert choose(folder, count=256, max_tokens=512, min_tokens=1000).tokens == 1000


@pytest.mark.parametrize(
    ("lengths", "changes", "words"),
    [
        ([64] * 7, {}, "7 rows with 448 tokens are left for calibration (7 rows, 0 of 10"),
        ([5] * 300, {}, "0 rows with 0 tokens are left for calibration (300 rows, 300 of 10"),
        # the even spread takes ranks 1, 3, ... of 4 x 400 and 12 x 11: 2 and 6; the longest 8
        # would have 4 x 400 + 4 x 11 = 1644
        ([400] * 4 + [11] * 12, {"calibration_rows": 8}, "8 rows with 866 tokens"),
        ([400] * 4 + [11] * 12, {"calibration_rows": 8, "min_calibration_tokens": 866}, ""),
        ([64] * 16, {}, ""),
        ([64] * 3, {"calibration_rows": 3, "min_calibration_tokens": 192}, ""),
        ([300] * 8, {"calibration_max_tokens": 127}, "8 rows with 1016 tokens"),
        ([], {}, "0 rows"),
    ],
)
def test_the_plan_knows_from_lengths_what_is_refused(
    tmp_path: Path, lengths: list[int], changes: dict[str, int], words: str
) -> None:
    section = QuantizeSection(**changes)
    found = enough(lengths, section)
    assert (words in found) if words else found == ""
    folder = dataset(tmp_path / "d", rows_of(*lengths))
    limits = {
        "count": section.calibration_rows,
        "max_tokens": section.calibration_max_tokens,
        "min_tokens": section.min_calibration_tokens,
    }
    if not words:
        assert choose(folder, **limits).rows
        return
    with pytest.raises(QuantizeError) as caught:
        choose(folder, **limits)
    for part in ("rows", "tokens"):  # the same counts after the training
        assert f"{caught.value.details[part]} {part}" in found


@pytest.mark.parametrize(
    ("lengths", "count", "advice"),
    [
        ([20] * 7, 256, ""),
        ([20] * 20, 8, "raise quantize.calibration_rows, "),
        ([90] * 20, 8, "raise quantize.calibration_rows, raise quantize.calibration_max_tokens, "),
        ([90] * 12, 256, "raise quantize.calibration_max_tokens, "),
    ],
)
def test_advice_names_only_what_would_help(
    tmp_path: Path, lengths: list[int], count: int, advice: str
) -> None:
    folder = dataset(tmp_path / "d", rows_of(*lengths))
    with pytest.raises(QuantizeError) as caught:
        choose(folder, count=count, max_tokens=64, min_tokens=2000)
    expected = f"train on more rows, {advice}or add none to quantize.methods"
    assert caught.value.hint.startswith(expected)
    assert "awq or none" not in caught.value.hint  # it would fail in the same words


def test_repeated_rows_count_once(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", [[1] * 30] * 100 + rows_of(*range(31, 40)))
    found = choose(folder, count=256, max_tokens=512, min_tokens=1)
    assert len(found.rows) == 10 and found.rows_duplicate == 99 and found.rows_read == 109


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "d", [[i, 900] * 10 for i in range(9)])
    with pytest.raises(QuantizeError, match="token id 900 .* 512 embedding rows"):
        choose(folder, count=9, max_tokens=64, min_tokens=1, vocabulary=512)
    assert len(choose(folder, count=9, max_tokens=64, min_tokens=1, vocabulary=901).rows) == 9
