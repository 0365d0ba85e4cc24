"""Commands that look, from where they see less than the gateway's own; all processes are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable

import pytest

import release_stub as stub
from release_house import House, keeper, wait_for
from tuneserve.errors import ServerError
from tuneserve.release import control, entrance, promote, state
from tuneserve.release.layout import layout
from tuneserve.release.ready import healthy
from tuneserve.release.sessions import process_start
from tuneserve.release.stage import release
from tuneserve.release.supervisor import GATEWAY, server_program
from tuneserve.release.unixhttp import ask, load_of


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


_APART = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc"]


@pytest.mark.skipif(
    subprocess.run([*_APART, "true"], capture_output=True).returncode != 0,
    reason="makes namespaces",
)
def test_a_look_from_another_container_touches_nothing(house: House) -> None:
    """The volume is shared, and so are the sockets in it; processes and ports are not."""
    made = release(house.request("a", dataset=None))["release"]
    session = keeper()._session(GATEWAY)
    layout().name_link("default").unlink()  # as a killed switch leaves it
    before = layout().state_file.read_bytes()

    def look(*command: str) -> tuple[str, str]:
        argv = [*_APART, sys.executable, "-m", "tuneserve", *command]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.stdout, done.stderr

    said, warned = look("status")
    unseen = "the gateway's state cannot be seen from here"
    assert f"endpoint: ({unseen}" in said and "is down" not in said
    assert warned.count("other PID or network namespaces") == 1
    found = json.loads(look("status", "--json")[0])
    assert (found["endpoint"], found["gateway"]) == (None, "unseen")
    assert found["names"]["default"]["health"] == "healthy", "by its socket"
    assert not layout().name_link("default").is_symlink()
    assert layout().state_file.read_bytes() == before and keeper()._session(GATEWAY) == session
    layout().name_link("default").symlink_to(layout().socket(made).parent)
    assert unseen in look("ask", "hi")[1]
    layout().name_link("default").unlink()
    assert control.status()["endpoint"] == f"{house.url}/v1"  # from here it is put in order
    assert house.chat().headers["x-tuneserve-release"] == made


def test_a_look_leaves_a_stray_to_the_requests_it_answers(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    stray = release(house.request("a", dataset=None))["release"]
    made = release(house.request("b", dataset=None, keep_warm=True))["release"]
    stub.make_model(house.folder / "a", token_seconds=0.5)
    was = keeper()._session(server_program(stray))
    assert was is not None
    os.kill(was, signal.SIGKILL)
    with state.change(layout()) as changed:
        changed.names["default"].warm = None  # as a killed switch leaves it
    wait_for(lambda: healthy(layout().socket(stray), stray))
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    statuses: list[int] = []

    def chat() -> None:
        answer = ask(
            layout().socket(stray), "POST", "/v1/chat/completions", body, timeout_seconds=60
        )
        statuses.append(answer.status)

    def running() -> int:
        answer = healthy(layout().socket(stray), stray)
        return (load_of(answer) or (0, 0))[0] if answer else 0

    asking = threading.Thread(target=chat)
    asking.start()
    wait_for(lambda: running() == 1)
    assert control.status()["names"]["default"]["release"] == made
    assert asking.is_alive(), "ten seconds of answer were waited for"
    assert f"{stray}, which nothing refers to, still answers: left until it has" in caplog.text
    assert keeper().members(server_program(stray))
    asking.join()
    assert statuses == [200]
    control.status()
    assert not keeper().members(server_program(stray))
    assert house.chat().headers["x-tuneserve-release"] == made


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
