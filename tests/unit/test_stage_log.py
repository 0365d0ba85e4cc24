"""What a stage says is kept for `tuneserve logs`, and nothing that fails there ends the stage."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tuneserve.errors import InputError
from tuneserve.release import control
from tuneserve.stagelog import kept_log, latest_log, stage_logs


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_lines_are_shown_and_kept_and_the_time_before_as_well(home: Path) -> None:
    for said in ("first", "second"):
        shown: list[str] = []
        with kept_log("support", "train", shown.append) as write:
            write(f"{said} time")
            # Followed while it runs: a line is there at once.
            assert latest_log("train").read_text().endswith(f" {said} time\n")
        assert shown == [f"{said} time"]
    path = home / "logs" / "support.train.log"
    assert control.log_files("train") == [path]
    assert "first time" in path.with_suffix(".log.1").read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with kept_log("other", "train", shown.append):
        os.utime(path, (1, 1))
    assert latest_log("train").name == "other.train.log"
    with pytest.raises(InputError, match="the stage merge has no log"):
        control.log_files("merge")


def test_neither_a_gone_reader_nor_a_full_disk_ends_the_stage(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError

    with kept_log("a", "train", gone) as write:
        write("one")
        write("two")
    assert [line[9:] for line in latest_log("train").read_text().splitlines()] == ["one", "two"]

    shown: list[str] = []
    (home / "logs" / "b.train.log").symlink_to("/dev/full")
    monkeypatch.setattr(Path, "is_file", lambda path: False)  # leave the full device in its place
    with kept_log("b", "train", shown.append) as write:
        write("one")
        write("two")
    assert shown == ["one", "two"]


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(home: Path) -> None:
    home.write_text("in the way")
    shown: list[str] = []
    with kept_log("a", "train", shown.append) as write:
        write("one")
    assert shown == ["one"] and stage_logs() == home / "logs"
