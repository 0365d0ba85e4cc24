"""`serve.while_training: stop`: the server gives its memory to the heavy stages and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from release_house import House, keeper, processes_of, wait_for
from tuneserve.calls import StageCall, StageResult
from tuneserve.config import RunFile
from tuneserve.errors import DeviceBusy, OutOfMemory
from tuneserve.release import control, rest, state
from tuneserve.release.layout import layout
from tuneserve.release.rest import AtRest
from tuneserve.release.stage import release
from tuneserve.release.supervisor import server_program
from tuneserve.runfile import parse_run

LOSSES = {"base": 3.0, "adapter": 1.0, "merged": 1.0}


def run_file(house: House, while_training: str = "stop") -> RunFile:
    serve = {"port": house.port, "drain_timeout_seconds": 5, "ready_timeout_seconds": 30}
    return parse_run(
        {
            "name": "test",
            "model": {"base": str(house.folder / "a")},
            "data": {"train": "unused.jsonl"},
            "serve": {**serve, "while_training": while_training},
        }
    )


@pytest.fixture(autouse=True)
def nothing_made_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "_is_there", lambda call: call.settings.get("made", False))


def alive(release_id: str) -> bool:
    info = keeper().info(server_program(release_id))
    return info is not None and info.up


def test_it_rests_for_the_heavy_stages_and_serves_for_the_release(house: House) -> None:
    made = release(house.request(losses=LOSSES))["release"]
    run, seen = run_file(house), []

    def execute(call: StageCall) -> StageResult:
        seen.append((call.stage, alive(made)))
        if call.stage == "train" and not call.settings:
            assert control.status()["names"]["default"]["state"] == "at rest"
            with pytest.raises(DeviceBusy, match="serving stopped while a run trains"):
                control.up()
        return StageResult(call.stage, {})

    with AtRest(run, execute) as at_rest:
        at_rest.execute(StageCall("plan", run))
        at_rest.execute(StageCall("train", run, settings={"made": True}))
        for stage in ("train", "merge", "evaluate", "release", "quantize", "release"):
            at_rest.execute(StageCall(stage, run))
    assert seen == [
        ("plan", True), ("train", True),
        ("train", False), ("merge", False), ("evaluate", False), ("release", True),
        ("quantize", False), ("release", True),
    ]  # fmt: skip
    assert house.chat().headers["x-tuneserve-release"] == made


def test_it_comes_back_when_a_stage_fails(house: House) -> None:
    made = release(house.request(losses=LOSSES))["release"]
    run = run_file(house)

    def execute(call: StageCall) -> StageResult:
        assert not alive(made)
        # And the keeper with the gateway dies meanwhile.
        os.kill(int((layout().root / "supervisord.pid").read_text()), signal.SIGKILL)
        wait_for(lambda: not processes_of(house.folder))
        raise OutOfMemory("training does not fit")

    with pytest.raises(OutOfMemory), AtRest(run, execute) as at_rest:
        at_rest.execute(StageCall("train", run))
    assert house.chat().headers["x-tuneserve-release"] == made
    assert state.read(layout()).names["default"].active == made


KILLED = """
import json, sys, time
from pathlib import Path
from tuneserve.calls import StageCall
from tuneserve.config import RunFile
from tuneserve.release import rest
rest._is_there = lambda call: False
run = RunFile.model_validate(json.loads(Path(sys.argv[1]).read_text()))
def execute(call):
    Path(sys.argv[2]).touch()
    time.sleep(600)
with rest.AtRest(run, execute) as at_rest:
    at_rest.execute(StageCall("train", run))
"""


@pytest.mark.parametrize("what", ["status", "run"])
def test_the_next_command_brings_it_back_after_a_kill(
    house: House, tmp_path: Path, what: str
) -> None:
    made = release(house.request(losses=LOSSES))["release"]
    run = run_file(house)
    path, trains = tmp_path / "run.json", tmp_path / "trains"
    path.write_text(json.dumps(run.model_dump(mode="json")))
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path), str(trains)])
    wait_for(trains.exists)
    assert not alive(made)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if what == "status":
        assert control.status()["names"]["default"]["state"] == "serving"
    else:
        with AtRest(run, lambda call: pytest.fail("no stage was asked for")):
            assert alive(made)
    assert house.chat().headers["x-tuneserve-release"] == made


def test_a_server_on_another_card_goes_on(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = release(house.request("a", losses=LOSSES))["release"]
    there = release(house.request("b", name="other", losses=LOSSES))["release"]
    pids = [keeper().members(server_program(each))[0] for each in (here, there)]
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"""#!/bin/sh
case "$1" in
*query-gpu*) echo "0, GPU-aaaa, H200, 1000, 500"; echo "1, GPU-bbbb, H200, 1000, 500" ;;
*gpu_uuid*) echo "GPU-aaaa, {pids[0]}, vllm, 9"; echo "GPU-bbbb, {pids[1]}, vllm, 9" ;;
*) echo "{pids[1]}, 9" ;;
esac
""")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run, seen = run_file(house), []

    def execute(call: StageCall) -> StageResult:
        seen.append((alive(here), alive(there)))
        if seen[-1] == (False, True):
            assert house.chat(path="/other/v1").headers["x-tuneserve-release"] == there
            states = {name: entry["state"] for name, entry in control.status()["names"].items()}
            assert states == {"default": "at rest", "other": "serving"}
            with AtRest(run, execute):  # somebody else's run: what rests is not left behind
                pass
        return StageResult(call.stage, {})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with AtRest(run, execute) as at_rest:
        at_rest.execute(StageCall("train", run))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb,0")  # train.gpus is 1: its first card
    smi.write_text(smi.read_text().replace(str(pids[0]), "1"))
    with AtRest(run, execute) as at_rest:
        at_rest.execute(StageCall("train", run))
    assert seen == [(False, True), (False, False)]  # one that is not seen is asked to rest as well
    assert house.chat().headers["x-tuneserve-release"] == here
    assert house.chat(path="/other/v1").headers["x-tuneserve-release"] == there


def test_sharing_stops_nothing(house: House) -> None:
    made = release(house.request(losses=LOSSES))["release"]
    run = run_file(house, "share")
    found: list[Any] = []

    def execute(call: StageCall) -> StageResult:
        found.append(alive(made))
        return StageResult(call.stage, {})

    with AtRest(run, execute) as at_rest:
        at_rest.execute(StageCall("train", run))
    assert found == [True]


def test_nothing_served_is_nothing_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    serve = {"while_training": "stop"}
    run = parse_run(
        {"name": "test", "model": {"base": "x/y"}, "data": {"train": "u.jsonl"}, "serve": serve}
    )
    with AtRest(run, lambda call: StageResult(call.stage, {"done": 1})) as at_rest:
        assert at_rest.execute(StageCall("train", run)).metrics == {"done": 1}
