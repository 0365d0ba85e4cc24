"""Commands that look, from where they see less than the gateway's own; all processes are real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest

from release_house import House, keeper, wait_for
from tuneserve.errors import ServerError
from tuneserve.release import control, entrance, promote, state
from tuneserve.release.layout import layout
from tuneserve.release.sessions import process_start
from tuneserve.release.stage import release
from tuneserve.release.supervisor import GATEWAY, server_program


def test_a_gateway_that_cannot_be_looked_into_is_still_ours(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a service manager gave capabilities."""

    def unseen(pids: Iterable[int]) -> frozenset[int] | None:
        return None if list(pids) else frozenset()

    monkeypatch.setattr(entrance, "ports_of", unseen)
    release(house.request("a", dataset=None))
    session = keeper()._session(GATEWAY)
    second = release(house.request("b", dataset=None))["release"]
    assert control.status()["endpoint"] == f"{house.url}/v1"
    assert keeper()._session(GATEWAY) == session
    assert house.chat().headers["x-tuneserve-release"] == second
    other = type(house)(house.folder)  # another port
    release(other.request("b", dataset=None))
    assert control.status()["endpoint"] == f"{other.url}/v1"
    assert other.chat().headers["x-tuneserve-release"] == second


def test_a_gateway_of_other_namespaces_is_left_alone(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    made = release(house.request("a", dataset=None))["release"]
    session = keeper()._session(GATEWAY)
    record = layout().conf / "namespaces"
    here = record.read_text()
    record.write_text(here.replace("net:", "net:9"))
    where = "run this in the serving container's PID and network namespace"
    control.status()
    assert "other PID or network namespaces" in caplog.text
    with pytest.raises(ServerError, match="other PID or network namespaces") as caught:
        release(house.request("b", dataset=None))
    assert caught.value.hint == where
    assert keeper()._session(GATEWAY) == session
    assert house.chat().headers["x-tuneserve-release"] == made
    record.unlink()  # as of an earlier version
    assert control.status()["endpoint"] == f"{house.url}/v1"
    record.write_text(here)
    assert release(house.request("b", dataset=None))["endpoint"] == f"{house.url}/v1"
    assert keeper()._session(GATEWAY) == session


def test_a_look_while_everything_ends_starts_no_gateway(house: House) -> None:
    release(house.request(dataset=None))
    with entrance.ending(layout()):
        keeper().stop(GATEWAY)
        assert control.status()["gateway"] == "stopped"
    assert control.status()["gateway"] in ("starting", "running")


def test_a_look_neither_raises_nor_waits_for_a_server(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(promote, "check_chat", lambda *_, **__: pytest.fail("asked a chat"))
    monkeypatch.setattr(promote, "wait_until_up", lambda *_, **__: pytest.fail("waited"))
    monkeypatch.setattr("tuneserve.release.status._PATIENCE_SECONDS", 0.0)
    made = release(house.request(dataset=None))["release"]  # the proofs have their own ways
    layout().name_link("default").unlink()  # as a killed run leaves it
    keeper().stop(server_program(made))
    (layout().keys).write_text("Bearer tsk-of-nobody-at-all\n")
    layout().keys.chmod(0o600)
    assert control.status()["names"]["default"]["state"] in ("restarting", "serving")
    assert "keys:1: a key without a name above" in caplog.text
    wait_for(lambda: house.chat().is_success)
    keeper().stop(server_program(made))
    layout().name_link("default").unlink()
    (house.folder / "a" / "config.json").unlink()
    assert control.status()["names"]["default"]["state"] == "switching"
    assert f"default: the model of {made} is gone" in caplog.text


def test_a_killed_guard_makes_no_failure_of_a_clean_end(house: House) -> None:
    program = server_program(release(house.request(dataset=None))["release"])
    info, session = keeper().info(program), keeper()._session(program)
    assert info is not None
    (guard,) = (pid for pid in children_of(info.pid) if pid != session)
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: process_start(guard) is None)
    keeper().stop(program)
    after = keeper().info(program)
    assert after is not None and (after.state, after.exit_status) == ("STOPPED", 0)
    assert state.read(layout()).names["default"].wanted == "up"


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as stream:
        return [int(each) for each in stream.read().split()]
