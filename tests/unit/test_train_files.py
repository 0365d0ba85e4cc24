"""Checkpoints' seals, the loss curve's file and the reader of rows: no torch needed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneserve.errors import AdapterError, DataError
from tuneserve.lm.rows import read_rows
from tuneserve.train.checkpoints import SEAL, check_shape, latest_whole, seal
from tuneserve.train.curves import keep_curve, plot_loss, plot_memory, read_curve, rewind_curve


def checkpoint(work: Path, step: int, *, sealed: bool = True) -> Path:
    folder = work / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "optimizer.pt").write_bytes(bytes([step]) * 100)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    if sealed:
        seal(folder)
    return folder


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    newest = checkpoint(tmp_path, 10)
    (tmp_path / "loss.jsonl").touch()
    assert latest_whole(tmp_path) == (newest, 10)
    assert newest.is_dir()


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert latest_whole(tmp_path) is None


@pytest.mark.parametrize("damage", ["unsealed", "missing", "short", "flipped", "bad seal"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    older = checkpoint(tmp_path, 5)
    newest = checkpoint(tmp_path, 10, sealed=damage != "unsealed")
    victim = newest / "optimizer.pt"
    if damage == "missing":
        victim.unlink()
    elif damage == "short":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "flipped":
        victim.write_bytes(b"\xff" + victim.read_bytes()[1:])
    elif damage == "bad seal":
        (newest / SEAL).write_text('{"files": ')
    with caplog.at_level(logging.WARNING):
        assert latest_whole(tmp_path) == (older, 5)
    assert "step 10 is damaged" in caplog.text
    assert not newest.exists() and older.is_dir()


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "{}", '{"files": []}', '{"files": {}}', '{"files": {"optimizer.pt": 3}}']
    + ['{"files": {"optimizer.pt": ["x", "y"]}}', "\x00\x00"],
)
def test_a_seal_that_is_none_is_damage(tmp_path: Path, text: str) -> None:
    """One that names no file would let a checkpoint without its optimizer count."""
    older = checkpoint(tmp_path, 5)
    newest = checkpoint(tmp_path, 10)
    (newest / SEAL).write_text(text)
    assert latest_whole(tmp_path) == (older, 5)
    assert not newest.exists()


def test_a_seal_with_another_shape_is_damage(tmp_path: Path) -> None:
    older, newest = checkpoint(tmp_path, 5), checkpoint(tmp_path, 10)
    sealed = json.loads((newest / SEAL).read_text())
    (newest / SEAL).write_text(json.dumps({**sealed, "shape": [1]}))
    assert latest_whole(tmp_path) == (older, 5)


def test_what_is_no_folder_is_removed_alone(tmp_path: Path) -> None:
    work, away = tmp_path / "work", tmp_path / "away"
    work.mkdir()
    away.mkdir()
    (away / "kept").touch()
    older = checkpoint(work, 5)
    (work / "checkpoint-6").write_text("a file")
    (work / "checkpoint-7").symlink_to(tmp_path / "nowhere")
    (work / "checkpoint-8").symlink_to(away)
    assert latest_whole(work) == (older, 5)
    assert [path.name for path in work.iterdir()] == ["checkpoint-5"]
    assert (away / "kept").is_file()


def test_a_checkpoint_of_other_steps_is_refused_and_kept(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 5)
    check_shape(folder, {"steps": 8, "effective_batch": 6})  # made before seals said so
    seal(folder, {"steps": 8, "effective_batch": 6})
    check_shape(folder, {"steps": 8, "effective_batch": 6})
    with pytest.raises(AdapterError, match="effective_batch 6, now 7") as caught:
        check_shape(folder, {"steps": 8, "effective_batch": 7})
    assert "steps 8" not in caught.value.message
    assert latest_whole(tmp_path) == (folder, 5)


def test_the_curve_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": 1 / s}) + "\n" for s in (1, 2, 3)))
    with path.open("a") as stream:
        stream.write('{"step": 4, "lo')  # a kill in the middle of a line
    assert [point["step"] for point in read_curve(path)] == [1, 2, 3]
    rewind_curve(path, 2)
    assert read_curve(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    rewind_curve(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize("line", [b"\xff\xfe", b"\0\0\0", b"null", b"{}", b'{"step": "2"}', b"7"])
def test_a_broken_line_ends_the_curve(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + line + b'\n{"step": 3, "loss": 3.0}\n')
    assert read_curve(path) == [{"step": 1, "loss": 1.0}]


@pytest.mark.parametrize("left", [None, b"", b'{"step": 1, "lo'])
def test_lines_that_the_disk_lost_come_from_the_checkpoint(
    tmp_path: Path, left: bytes | None
) -> None:
    """Without them the run would count too few steps at its end, each time it goes on."""
    path = tmp_path / "loss.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": 1 / s}) + "\n" for s in (1, 2)))
    folder = checkpoint(tmp_path, 2, sealed=False)
    keep_curve(path, folder)
    if left is None:
        path.unlink()
    else:
        path.write_bytes(left)
    rewind_curve(path, 2)
    assert read_curve(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_pictures_are_transparent_and_the_same_each_time(tmp_path: Path) -> None:
    points: list[dict[str, Any]] = [{"step": s, "loss": 5 / s} for s in range(1, 30)]
    points.append({"step": 29, "eval_loss": 0.5})
    memory = {
        "planned_peak_bytes": 2**30,
        "timeline": [{"seconds": s, "rss_bytes": 2**29 + s} for s in range(5)],
    }
    for name in ("a", "b"):
        plot_loss(points, tmp_path / f"loss-{name}.png")
        plot_memory(memory, tmp_path / f"memory-{name}.png")
    for kind in ("loss", "memory"):
        first = (tmp_path / f"{kind}-a.png").read_bytes()
        assert first == (tmp_path / f"{kind}-b.png").read_bytes()
        assert first[25] == 6  # PNG colour type: RGB with alpha, so any page shows through


def write_rows(path: Path, ids: list[Any], labels: list[Any]) -> Path:
    ints = pa.list_(pa.int32())
    source = [f"a.jsonl:{i + 1}" for i in range(len(ids))]
    columns = {"input_ids": pa.array(ids, ints), "labels": pa.array(labels, ints), "source": source}
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    ids = [[5, 6, 7], [8], [9, 10], []]
    labels = [[-100, 6, 7], [8], [9, -100], []]
    rows = read_rows(write_rows(tmp_path / "train.parquet", ids, labels))
    assert [rows.row(i)[0].tolist() for i in range(4)] == ids
    assert [rows.row(i)[1].tolist() for i in range(4)] == labels
    assert rows.lengths.tolist() == [3, 1, 2, 0]
    # The first token of a row is never predicted, so its label does not count.
    assert rows.supervised().tolist() == [2, 0, 0, 0]
    assert rows.sources[2] == "a.jsonl:3"


def test_no_rows_are_rows_too(tmp_path: Path) -> None:
    rows = read_rows(write_rows(tmp_path / "eval.parquet", [], []))
    assert len(rows) == 0 and rows.supervised().tolist() == []


def test_labels_of_another_length_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.parquet", [[1, 2], [3, 4]], [[1, 2], [3]])
    with pytest.raises(DataError, match="row 1 differ in length"):
        read_rows(path)


def test_a_missing_file_or_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train.parquet"):
        read_rows(tmp_path / "train.parquet")
    pq.write_table(pa.table({"input_ids": [[1]]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="labels"):
        read_rows(tmp_path / "other.parquet")
