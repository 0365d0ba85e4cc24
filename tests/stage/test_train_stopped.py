"""A stop in the smoke step is no lack of memory, however the process ended: real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shim import executed, run_file
from tuneserve.calls import StageCall
from tuneserve.errors import OutOfMemory, StageKilled
from tuneserve.process import _signal_number, run_stage
from tuneserve.stages import StageContext
from tuneserve.stops import kernel_kills, new_attempt, note_stop, was_stopped
from tuneserve.train import stage

WAIT_SECONDS = 60

# As `tuneserve train` does it, with less patience for a child that does not hear.
_PARENT = """
import json, signal, sys
from tuneserve import process
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda got, _: sys.exit(128 + got))
process._TERM_SECONDS = 0.3
process.run_stage(process.StageCall.from_json(json.load(open(sys.argv[1]))))
"""


@pytest.mark.parametrize(
    ("whom", "how", "takes", "memory"),
    [
        ("parent", signal.SIGTERM, "deaf", False),
        ("parent", signal.SIGINT, "deaf", False),
        ("parent", signal.SIGTERM, "dies", False),
        ("parent", signal.SIGTERM, "leaves", False),
        ("parent", signal.SIGKILL, "deaf", False),
        ("parent", signal.SIGHUP, "deaf", False),
        ("child", signal.SIGTERM, "dies", False),
        ("child", signal.SIGTERM, "leaves", False),
        ("child", signal.SIGINT, "leaves", False),
        ("child", signal.SIGKILL, "deaf", True),
    ],
)
def test_only_a_kill_from_outside_means_memory(
    tmp_path: Path, pico_model: Path, whom: str, how: signal.Signals, takes: str, memory: bool
) -> None:
    fifo, request = tmp_path / "fifo", tmp_path / "call.json"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    settings = {"do": "smoke step", "takes": takes, "fifo": str(fifo)}
    asked = StageCall("train", run_file(tmp_path), pico_model, settings=settings)
    request.write_text(json.dumps(asked.to_json()))
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(request)], stderr=subprocess.DEVNULL
    )
    assert select.select([reading], [], [], WAIT_SECONDS)[0]
    child = json.loads(os.read(reading, 1000))[0]
    os.kill(parent.pid if whom == "parent" else child, how)
    parent.wait(WAIT_SECONDS)
    assert select.select([reading], [], [], WAIT_SECONDS)[0] and os.read(reading, 1) == b""
    os.close(reading)

    (work,) = (tmp_path / "store" / ".work").iterdir()
    assert json.loads((work / "rung.json").read_text())["phase"] == "smoke"
    context = StageContext(asked.run, None, {}, work, work)
    top = stage.Rung(stage.recipe_of(context, 64), True)
    found = stage._start(context, top)
    assert (top.recipe.micro_batch, found.recipe.micro_batch) == (4, 2 if memory else 4)


@pytest.mark.parametrize(
    ("phase", "tried"), [("train", [4, 2, 1]), ("smoke", [4, 2, 1]), ("load", [4])]
)
def test_what_the_kernel_killed_for_memory_goes_on_with_less(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch, phase: str, tried: list[int]
) -> None:
    """At any time, and without another command; while loading no rung would help."""
    vmstat, log = tmp_path / "vmstat", tmp_path / "tried"
    vmstat.write_text("oom_kill 3\n")
    monkeypatch.setattr("tuneserve.stops._PROC", tmp_path)
    settings = {"do": "kernel", "phase": phase, "vmstat": str(vmstat), "tried": str(log)}
    asked = StageCall("train", run_file(tmp_path), pico_model, settings=settings)
    said: list[str] = []
    if phase == "load":
        with pytest.raises(OutOfMemory, match="killed while the base was loaded") as caught:
            run_stage(asked, log_line=said.append)
        assert caught.value.exit_status == 3
    else:
        assert run_stage(asked, log_line=said.append).metrics["micro_batch"] == 1
    assert [int(line) for line in log.read_text().split()] == tried
    assert "the kernel killed the training for want of memory: going on with less in use" in said


def test_a_kill_that_the_kernel_did_not_count_is_told(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    monkeypatch.setattr("tuneserve.stops._PROC", tmp_path)
    asked = StageCall("train", run_file(tmp_path), pico_model, settings={"do": "killed"})
    with pytest.raises(StageKilled) as caught:
        run_stage(asked, log_line=lambda line: None)
    assert "out_of_memory" not in caught.value.details and executed(tmp_path) == ["train"]
    assert caught.value.details["signal"] == signal.SIGKILL


@pytest.mark.parametrize(
    ("stage", "number"), [("train", signal.SIGTERM), ("quantize", signal.SIGKILL)]
)
def test_a_kill_that_asks_for_an_end_is_not_repeated(
    tmp_path: Path,
    pico_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    number: signal.Signals,
) -> None:
    """Whoever sends another signal wants an end, whatever else the kernel killed meanwhile; and a
    stage without a ladder of its own would be killed again.
    """
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 3\n")
    monkeypatch.setattr("tuneserve.stops._PROC", tmp_path)
    settings = {"do": "kernel", "phase": "", "vmstat": str(vmstat), "signal": number}
    asked = StageCall(stage, run_file(tmp_path), pico_model, settings=settings)
    with pytest.raises(StageKilled) as caught:
        run_stage(asked, log_line=lambda line: None)
    assert executed(tmp_path) == [stage] and vmstat.read_text() == "oom_kill 4\n"
    memory = number == signal.SIGKILL
    assert caught.value.details.get("out_of_memory", False) is memory
    assert ("want of memory meanwhile" in caught.value.hint) is memory


@pytest.mark.parametrize(
    ("groups", "files", "kills"),
    [
        ("0::/job/run\n", {"job/run/memory.events": 2, "job/memory.events": 5}, 2),
        ("0::/job/run\n", {"job/memory.events": 5}, 5),
        ("0::/of/the/host\n", {"memory.events": 3}, 3),
        ("0::/../away\n", {"memory.events": 3}, 3),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.oom_control": 6}, 6),
        ("9:cpu,memory:/docker/1\n", {"memory/memory.oom_control": 4, "memory.events": 1}, 4),
        ("0::/\n", {}, 8),
        ("2:cpu:/job\n", {"memory/job/memory.oom_control": 6}, 8),
        ("what?\n", {}, 8),
        (None, {"memory.events": 3}, 8),
    ],
)
def test_kills_are_those_of_our_control_group(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str | None,
    files: dict[str, int],
    kills: int,
) -> None:
    """The machine counts those of every other container too: it is asked last."""
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 8\n")
    if groups is not None:
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "cgroup").write_text(groups)
    for name, count in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"oom 9\nunder_oom 0\noom_kill {count}\noom_group_kill 0\n")
    monkeypatch.setattr("tuneserve.stops._PROC", tmp_path)
    monkeypatch.setattr("tuneserve.stops._GROUPS", tmp_path / "groups")
    assert kernel_kills() == kills


def test_a_stop_speaks_of_its_own_attempt_alone(tmp_path: Path) -> None:
    first, second = new_attempt(tmp_path), new_attempt(tmp_path)
    note_stop(first)
    assert list(tmp_path.iterdir()) == []  # nothing to conclude from: no folder is kept for it
    (tmp_path / "rung.json").touch()
    note_stop(first)
    note_stop(first)
    assert was_stopped(tmp_path, first["TUNESERVE_ATTEMPT"])
    assert not was_stopped(tmp_path, second["TUNESERVE_ATTEMPT"])
    note_stop(second)  # before it came to a step of its own: what is known of the first stays
    assert was_stopped(tmp_path, first["TUNESERVE_ATTEMPT"])
    assert not was_stopped(tmp_path, "")
    note_stop(new_attempt(tmp_path / "gone"))
    note_stop({})


@pytest.mark.parametrize(
    ("status", "number"),
    [(0, 0), (1, 0), (-15, 15), (143, 15), (-9, 9), (137, 9), (130, 2), (255, 0)],
)
def test_the_signal_in_an_exit_status(status: int, number: int) -> None:
    assert _signal_number(status) == number
