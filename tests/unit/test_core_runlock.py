"""Locks that end with their holder, and the records that say who that was."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuneserve.devices import card_ids, visible_gpus
from tuneserve.errors import DeviceBusy, InputError
from tuneserve.runfile import parse_run
from tuneserve.runlock import held_descriptors, hold
from tuneserve.runs import RunRecord, Runs

_HOLDER = """
import json, os, signal, sys
from tuneserve.runfile import parse_run
from tuneserve.runlock import hold
from tuneserve.runs import RunRecord, Runs
run = parse_run(json.loads(sys.argv[1]))
with hold(run, "first", "2026-01-02T03:04:05+00:00"):
    with Runs().recording(RunRecord("first", run.name, run.serve.name, stage="train")):
        print("held", flush=True)
        signal.pause()
"""


def given(**changes: Any) -> dict[str, Any]:
    return {
        "name": "weekly",
        "model": {"base": "org/name"},
        "data": {"train": "d.jsonl"},
        "overlap": {"when_busy": "refuse"},
        **changes,
    }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "home"


def start(run: dict[str, Any]) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, json.dumps(run)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_the_second_run_of_a_name_is_refused_with_the_first_ones_id(home: Path) -> None:
    holder = start(given())
    try:
        with pytest.raises(DeviceBusy) as caught, hold(parse_run(given()), "second", "now"):
            pass
        said = caught.value.message
        assert "served name 'default' is held by run first (weekly, process" in said
        assert f"process {holder.pid}) since 2026-01-02T03:04:05+00:00" in said
        assert held_descriptors() == ()
        other = parse_run(given(serve={"name": "another"}))
        with hold(other, "third", "now"):  # another name is free
            assert len(held_descriptors()) == 1
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_holder_and_the_record_says_what_happened(
    home: Path, how: signal.Signals
) -> None:
    holder = start(given())
    assert [r.id for r in Runs().running()] == ["first"]
    assert Runs().mark_stale() == []
    holder.send_signal(how)
    holder.wait()
    with hold(parse_run(given()), "second", "now"):
        assert Runs().running() == []
        (stale,) = Runs().mark_stale()
    assert stale.id == "first" and stale.state == "stale" and stale.ended
    assert f"process {holder.pid}" in stale.error and "during train" in stale.error
    assert Runs().mark_stale() == []  # once is enough


def test_a_run_that_waits_starts_when_the_other_ends(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder = start(given())
    waiting = parse_run(given(overlap={"when_busy": "wait", "max_wait_seconds": 60}))
    looks: list[float] = []

    def look_again(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()

    monkeypatch.setattr(
        "tuneserve.runlock.time", SimpleNamespace(sleep=look_again, monotonic=time.monotonic)
    )
    with caplog.at_level(logging.INFO), hold(waiting, "second", "now"):
        assert looks == [1.0, 1.0, 1.0], "it looks again until the other is gone, and then no more"
        assert holder.returncode == -signal.SIGKILL
        (note,) = (home / "locks").glob("*.lock")
        assert json.loads(note.read_text())["run"] == "second"
    said = [r.getMessage() for r in caplog.records if "waiting" in r.getMessage()]
    assert len(said) == 1 and "'default' is held by run first (weekly, process" in said[0]


def test_waiting_has_an_end(home: Path) -> None:
    holder = start(given())
    try:
        patient = parse_run(given(overlap={"when_busy": "wait", "max_wait_seconds": 1}))
        with pytest.raises(DeviceBusy, match="held by run first"), hold(patient, "second", "now"):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_a_card_is_held_for_all_homes(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    holder = start(given())
    try:
        monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "another"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        elsewhere = parse_run(given(serve={"name": "another"}))
        with pytest.raises(DeviceBusy, match="GPU 0 is held by run first"):
            with hold(elsewhere, "second", "now"):
                pass
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        with hold(elsewhere, "third", "now"):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_a_card_is_the_same_by_number_and_by_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "gpus"
    for address, uuid in (("0000:41:00.0", "GPU-bb22-1"), ("0000:01:00.0", "GPU-aa11-0")):
        (driver / address).mkdir(parents=True)
        (driver / address / "information").write_text(
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t 0\n"
        )
    monkeypatch.setattr("tuneserve.devices._DRIVER_CARDS", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-aa,MIG-7,9")
    assert card_ids() == ["GPU-bb22-1", "GPU-aa11-0", "MIG-7", "9"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-bb22-1")
    other = parse_run(given(serve={"name": "another"}))
    with hold(parse_run(given()), "first", "now"):  # named twice: it does not wait for itself
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb22")
        with pytest.raises(DeviceBusy, match="GPU GPU-bb22 is held by run first"):
            with hold(other, "second", "now"):
                pass
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with hold(other, "third", "now"):
            pass


def test_a_link_in_the_shared_folder_is_not_followed(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    shared = tmp_path / "tmp" / "tuneserve-gpus"
    shared.mkdir()
    (shared / "0.lock").symlink_to(precious)
    with pytest.raises(InputError, match=r"0\.lock cannot be opened"):
        with hold(parse_run(given()), "first", "now"):
            pass
    assert precious.read_text() == "keep me" and held_descriptors() == ()


def test_a_child_keeps_the_lock_until_it_is_gone_too(home: Path) -> None:
    from tuneserve.process import run_child

    code = (
        "import os, sys\n"
        "from tuneserve.child import end_with_parent\n"
        "held = [int(n) for n in os.environ['TUNESERVE_HELD_LOCKS'].split(',')]\n"
        "end_with_parent()\n"
        "print([os.get_inheritable(n) for n in held])"
    )
    lines: list[str] = []
    with hold(parse_run(given()), "first", "now"):
        status, _ = run_child([sys.executable, "-c", code], log_line=lines.append)
    assert (status, lines) == (0, ["[False]"])


@pytest.mark.parametrize(
    ("listed", "expected"), [("", []), ("-1", []), ("0,2", ["0", "2"]), ("GPU-ab, -1", ["GPU-ab"])]
)
def test_the_cards_are_those_cuda_would_show(
    listed: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == expected


def test_what_was_settled_last_is_what_counts(home: Path) -> None:
    runs = Runs()
    for number, (state, served) in enumerate(
        [("promoted", "a"), ("unchanged", "a"), ("cancelled", "a"), ("refused", "b")]
    ):
        with runs.recording(RunRecord(f"r{number}", "n", served)) as record:
            record.state = state
    last = runs.last_settled("a")
    assert last is not None and last.id == "r0"
    with runs.recording(RunRecord("r9", "n", "a")) as record:
        record.state = "failed"
    last = runs.last_settled("a")
    assert last is not None and last.id == "r0"
    assert runs.last_settled("c") is None
    assert sorted(p.name for p in runs.root.glob("*.lock")) == []
