"""Requests per second from the access log's tail."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tuneserve.release import traffic
from tuneserve.release.traffic import recent


def write(path: Path, times: Iterable[float], uri: str = "/v1/models") -> Path:
    lines = [json.dumps({"ts": at, "request": {"uri": uri}}) for at in times]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_what_the_tail_does_not_tell_of_is_not_counted_as_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "access.log", [1000 + number / 100 for number in range(6000)])
    assert recent(path, "main", now=1060.0) == {"main": 100.0}
    line = len(path.read_bytes()) // 6000
    monkeypatch.setattr(traffic, "_TAIL_BYTES", 1000 * (line + 1))  # the last ten seconds or so
    assert recent(path, "main", now=1060.0)["main"] == pytest.approx(100, rel=0.01)


def test_a_log_that_was_just_rotated_tells_of_its_own_time(tmp_path: Path) -> None:
    path = write(tmp_path / "access.log", [1055 + number / 100 for number in range(500)])
    assert recent(path, "main", now=1060.0) == {"main": 8.33}  # 500 in a minute: nothing before
    (tmp_path / "access-2026-11-30T06-59-19.123.log.gz").write_bytes(b"")
    assert recent(path, "main", now=1060.0) == {"main": 100.0}
    write(path, [1059.9])  # one request says nothing of a tenth of a second
    assert recent(path, "main", now=1060.0) == {"main": 1.0}


def test_a_minute_of_rest_is_a_minute(tmp_path: Path) -> None:
    (tmp_path / "access-old.log").write_bytes(b"")
    path = write(tmp_path / "access.log", [100.0, 1030.0, 1040.0, 1050.0])
    assert recent(path, "main", now=1060.0) == {"main": 0.05}
