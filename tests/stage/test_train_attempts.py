"""Attempts at one training, in real child processes: another as long as it comes further, and all
within one limit of time.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shim import executed, interpreter, requests, run_file
from tuneserve.calls import StageCall
from tuneserve.errors import BudgetSpent, OutOfMemory, StageTimeout
from tuneserve.process import run_stage
from tuneserve.stops import was_stopped

_ADVICE = ["train.lora.r: 8 saves 116.2 MiB (a smaller adapter)"]
_NOWHERE = ["", 0, "oom"]  # killed before it noted anything
_RUNGS = [
    f"micro-batch {rows} x {16 // rows} accumulated, with gradient checkpointing"
    for rows in (4, 2, 1)
]


def scripted(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch, script: list[Any], **run: Any
) -> StageCall:
    """A training whose attempts go by a script (`shim._killed_as_told`)."""
    vmstat = folder / "vmstat"
    vmstat.write_text("oom_kill 3\n")
    monkeypatch.setattr("tuneserve.stops._PROC", folder)
    monkeypatch.setenv("TUNESERVE_HOME", str(folder / "home"))
    settings = {"do": "script", "script": script, "vmstat": str(vmstat)}
    hints = {"advice": _ADVICE}
    return StageCall("train", run_file(folder, **run), base, settings=settings, hints=hints)


def limit(folder: Path, seconds: float) -> dict[str, Any]:
    """The section `engines` with a limit for the training."""
    return {"train": {"python": interpreter(folder), "max_seconds": seconds}}


@pytest.mark.parametrize(
    ("before", "wrapped"),
    [([], False), ([["train", 50, "oom"]], False), ([["train", 50, "oom"]], True)],
)
def test_after_two_kills_without_coming_further_it_ends_with_the_plans_advice(
    tmp_path: Path,
    pico_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: list[Any],
    wrapped: bool,
) -> None:
    """Whatever an earlier attempt had noted; also where a wrapper says it with status 137."""
    script = [*before, _NOWHERE, _NOWHERE, ["train", 0, "done"]]
    asked = scripted(tmp_path, pico_model, monkeypatch, script)
    if wrapped:  # by a shell that waits for its child
        path = Path(asked.interpreter())
        path.write_text(path.read_text().replace("\nexec ", "\n") + "exit $?\n")
    said: list[str] = []
    with pytest.raises(OutOfMemory) as caught:
        run_stage(asked, log_line=said.append)
    assert executed(tmp_path) == ["train"] * (len(before) + 2)
    assert type(caught.value) is OutOfMemory and caught.value.exit_status == 3
    assert not caught.value.retryable
    assert caught.value.details["tried"] == [
        *[f"{_RUNGS[0]}: killed later on, for want of memory" for _ in before],
        *["killed before it began, for want of memory"] * 2,
    ]
    assert f"\n    1. {_ADVICE[0]}\n" in caught.value.hint
    killed = "the kernel killed the training for want of memory: "
    assert [line for line in said if line.startswith(killed)] == [
        *[f"{killed}going on with less in use" for _ in before],
        f"{killed}it had come no further, and is tried once more",
    ]
    store = tmp_path / "store"
    assert [path.name for path in store.iterdir() if not path.name.startswith(".")] == []
    (work,) = (store / ".work").iterdir()
    assert (work / "checkpoint-50").is_dir() == bool(before)
    assert not (work / "rung.json").exists()  # so the next call begins at the top
    assert run_stage(asked, log_line=said.append).artifact
    assert (tmp_path / "tried.log").read_text().split() == ["4"] * (len(before) + 1)


def test_coming_further_is_patience_anew(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower rung, or at the bottom a further checkpoint. Manifest and log name all attempts."""
    script = [
        *(["train", 0, "oom"], _NOWHERE, ["smoke", 0, "oom"], _NOWHERE, ["train", 50, "oom"]),
        *(_NOWHERE, ["train", 100, "oom"], _NOWHERE, ["train", 0, "done"]),
    ]
    asked = scripted(tmp_path, pico_model, monkeypatch, script, engines=limit(tmp_path, 600))
    made = run_stage(asked, log_line=lambda line: None)
    assert len(executed(tmp_path)) == len(script)
    assert (tmp_path / "tried.log").read_text().split() == ["4", "2", "1", "1", "1"]
    memory = ", for want of memory"
    nowhere = ("", f"killed before it began{memory}")
    assert [(one["rung"], one["end"]) for one in made.metrics["attempts"]] == [
        (_RUNGS[0], f"killed later on{memory}"),
        nowhere,
        (_RUNGS[1], f"killed in its first step{memory}"),
        nowhere,
        (_RUNGS[2], f"killed later on{memory}"),
        nowhere,
        (_RUNGS[2], f"killed later on{memory}"),
        nowhere,
    ]
    steps = [(one["from_step"], one["to_step"]) for one in made.metrics["attempts"]]
    assert steps == [*[(0, 0)] * 4, (0, 50), (50, 50), (50, 100), (100, 100)]
    kept = (tmp_path / "home" / "logs" / "shim.train.log").read_text()
    assert kept.count("train at work") == len(script)  # one log of all of them
    assert kept.count("the kernel killed the training") == len(script) - 1
    # Each attempt has what is left of the limit, not the limit anew.
    assert len({request["ends"] for request in requests(tmp_path)}) == 1


def test_at_the_bottom_a_kill_without_a_further_checkpoint_is_the_last(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [["train", 50, "oom"], ["train", 0, "oom"], ["train", 0, "oom"], ["train", 0, "done"]]
    asked = scripted(tmp_path, pico_model, monkeypatch, script)
    with pytest.raises(OutOfMemory) as caught:
        run_stage(asked, log_line=lambda line: None)
    assert (tmp_path / "tried.log").read_text().split() == ["4", "2", "1"]
    assert caught.value.exit_status == 3 and f"1. {_ADVICE[0]}" in caught.value.hint
    assert caught.value.details["tried"] == [
        f"{rung}: killed later on, for want of memory" for rung in _RUNGS
    ]


def test_the_limit_of_a_stage_covers_all_its_attempts(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [["train", 50, "oom"], ["train", 0, "hang"], ["train", 0, "done"]]
    asked = scripted(tmp_path, pico_model, monkeypatch, script, engines=limit(tmp_path, 12))
    began = time.time()
    with pytest.raises(
        StageTimeout, match="train took longer than 12 s, all its attempts"
    ) as caught:
        run_stage(asked, log_line=lambda line: None)
    assert caught.value.exit_status == 5 and "resumes at its last checkpoint" in caught.value.hint
    (ends,) = {request["ends"] for request in requests(tmp_path)}
    assert began + 12 <= ends <= time.time()
    (work,) = (tmp_path / "store" / ".work").iterdir()
    state = json.loads((work / "rung.json").read_text())
    assert state["micro_batch"] == 2 and was_stopped(work, state["attempt"])
    assert (work / "checkpoint-50").is_dir()
    # Another call has the whole limit again, and goes on where this one was.
    made = run_stage(asked, log_line=lambda line: None)
    assert (tmp_path / "tried.log").read_text().split() == ["4", "2", "2"]
    assert requests(tmp_path)[-1]["ends"] > ends + 12
    assert [one["end"] for one in made.metrics["attempts"]] == [
        "killed later on, for want of memory",
        "stopped",
    ]


def test_an_attempt_for_which_no_time_is_left_is_not_begun(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an orchestrator tries a call again whose first attempt took the time."""
    script = [["train", 0, "done"]]
    asked = scripted(tmp_path, pico_model, monkeypatch, script, engines=limit(tmp_path, 60))
    spent = replace(asked, ends=time.time() - 1)
    assert StageCall.from_json(json.loads(json.dumps(spent.to_json()))).limited() == spent
    with pytest.raises(StageTimeout, match="stage train took longer than 60 s"):
        run_stage(spent, log_line=lambda line: None)
    assert executed(tmp_path) == [] and not (tmp_path / "store" / ".work").exists()
    with pytest.raises(BudgetSpent):  # the nearer of the two is named
        run_stage(replace(asked, deadline=time.time() - 1), log_line=lambda line: None)
    assert run_stage(asked, log_line=lambda line: None).artifact  # a new call: time anew
