"""A switch that is killed at any of its steps leaves something that the next command puts right."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

import release_stub as stub
from release_house import House, wait_for
from tuneserve.release import control, state
from tuneserve.release.address import Listen, check_port
from tuneserve.release.layout import current_release, layout
from tuneserve.release.stage import release
from tuneserve.release.supervisor import GATEWAY, Keeper, server_program

# Runs an action in which the N-th change to the outside world is replaced by kill -9 of ourselves.
_KILLED = """
import os, pickle, signal, sys
from tuneserve.release import control, entrance, layout, promote, stage, state, supervisor
count = int(sys.argv[1])

def dying(function):
    def call(*arguments, **options):
        global count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

state.write_json_atomic = dying(state.write_json_atomic)
entrance.write_json_atomic = dying(entrance.write_json_atomic)
promote.point = dying(promote.point)
for name in ("put", "start", "stop", "remove"):
    setattr(supervisor.Keeper, name, dying(getattr(supervisor.Keeper, name)))
action, argument = pickle.loads(bytes.fromhex(sys.argv[2]))
def gateway(listen):
    places = layout.layout()
    promote.Servers(places, supervisor.Keeper(places)).ensure_gateway(listen)
{"release": stage.release, "promote": control.promote_release, "gateway": gateway}[action](argument)
"""


def run_and_kill(step: int, action: str, argument: object) -> int:
    code = pickle.dumps((action, argument)).hex()
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(step), code], env=os.environ, capture_output=True
    )
    assert done.returncode in (0, -9), done.stderr.decode()[-3000:]
    return done.returncode


def check_order(house: House, allowed: set[str]) -> str:
    """After the next command: one release serves, and state, symlink and processes say so."""
    shown = control.status()["names"]["default"]
    assert shown["state"] == "serving", shown
    active = shown["release"]
    assert active in allowed
    assert current_release(layout(), "default") == active
    assert house.chat().headers["x-tuneserve-release"] == active
    entry = state.read(layout()).names["default"]
    assert entry.active == active and entry.promoting is None
    up = {name for name, info in Keeper(layout()).all().items() if info.up}
    assert up == {GATEWAY, server_program(active)}
    return str(active)


def test_kill_9_at_every_step_of_a_move_to_another_port(house: House) -> None:
    made = release(house.request())["release"]
    known = Listen(**state.read(layout()).gateway)
    ports = known.port, stub.free_port()
    for step in range(20):
        goal = next(port for port in ports if port != house.port)
        status = run_and_kill(step, "gateway", replace(known, port=goal))
        endpoint = control.status()["endpoint"]
        house.port = Listen(**state.read(layout()).gateway).port
        assert endpoint == f"{house.url}/v1"
        assert check_order(house, {made}) == made
        (left,) = set(ports) - {house.port}
        check_port(replace(known, port=left))
        if status == 0:
            assert house.port == goal and step > 3
            return
    raise AssertionError("the move never came to its end")


def room_for(house: House, rollout: str) -> dict[str, str]:
    """`hold` is for a device with room for one server; what holds it keeps the others out."""
    return {"memory": str(house.folder / "memory")} if rollout == "hold" else {}


def test_kill_9_while_the_one_server_there_is_room_for_is_a_candidate(house: House) -> None:
    room = room_for(house, "hold")
    first = release(house.request("a", behaviour=room))["release"]
    request = house.request("b", rollout="hold", behaviour={**room, "start_seconds": 3600})
    code = pickle.dumps(("release", request)).hex()
    releasing = subprocess.Popen([sys.executable, "-c", _KILLED, "1000", code])
    wait_for(lambda: (house.folder / "memory").read_text() not in ("", first))
    releasing.kill()
    releasing.wait()
    assert check_order(house, {first}) == first


@pytest.mark.full
@pytest.mark.parametrize("rollout", ["blue_green", "hold"])
def test_kill_9_at_every_step_of_a_release(house: House, rollout: str) -> None:
    room = room_for(house, rollout)
    first = release(house.request("a", behaviour=room))["release"]
    for step in range(40):
        request = house.request(f"b{step}", rollout=rollout, behaviour=room)
        status = run_and_kill(step, "release", request)
        known = set(state.read(layout()).releases)
        active = check_order(house, known)
        if status == 0:
            assert step > 5, "the steps were not counted"
            assert active != first
            return
    raise AssertionError("the release never came to its end")


@pytest.mark.parametrize("rollout", ["blue_green", pytest.param("hold", marks=pytest.mark.full)])
def test_kill_9_at_every_step_of_a_promotion(house: House, rollout: str) -> None:
    room = room_for(house, rollout)
    first = release(house.request("a", behaviour=room))["release"]
    second = release(house.request("b", rollout=rollout, behaviour=room))["release"]
    target = first
    for step in range(20):
        status = run_and_kill(step, "promote", target)
        active = check_order(house, {first, second})
        if status == 0:
            assert active == target and step > 3
            return
        target = first if active == second else second
    raise AssertionError("the promotion never came to its end")
