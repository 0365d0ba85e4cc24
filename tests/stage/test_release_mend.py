"""What is accepted as serving, and what a switch does with a champion that is down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

import release_stub as stub
from release_house import House, keeper, wait_for
from tuneserve.errors import ServerError
from tuneserve.release import control, promote, state
from tuneserve.release.layout import layout
from tuneserve.release.stage import release
from tuneserve.release.supervisor import server_program
from tuneserve.release.unixhttp import ask

NO_CHAT = "answers /health, but a chat completion did not come"


def session_of(release_id: str) -> int:
    session = keeper()._session(server_program(release_id))
    assert session is not None
    return session


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(promote, "_FIRST_CHAT_SECONDS", 1.0)
    monkeypatch.setattr(promote, "_NEXT_CHAT_SECONDS", 1.0)
    yield


def test_a_rollback_does_not_wait_for_the_champion_it_replaces(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "READY_SECONDS", 30.0)
    good = release(house.request("a"))["release"]
    bad = release(house.request("b", keep_warm=True))["release"]
    stub.make_model(house.folder / "b", start_seconds=3600)
    was = session_of(bad)
    os.kill(was, signal.SIGKILL)
    wait_for(lambda: keeper()._session(server_program(bad)) not in (None, was))  # it loads
    started = time.monotonic()
    control.rollback()
    assert time.monotonic() - started < 15  # neither for its start nor for its answers: 30 and 120
    assert "does not serve" not in caplog.text
    assert house.chat().headers["x-tuneserve-release"] == good
    assert not keeper().members(server_program(bad))


def test_what_starts_again_must_answer_a_chat(house: House, short_waits: None) -> None:
    release(house.request())
    control.down()
    with pytest.raises(ServerError, match=NO_CHAT):
        release(house.request(behaviour={"hang": True}))
    assert not keeper().running()
    assert state.read(layout()).names["default"].wanted == "down"
    with pytest.raises(ServerError, match=NO_CHAT):
        control.up()


def test_a_server_that_stopped_answering_does_not_pass_as_serving(
    house: House, short_waits: None
) -> None:
    made = release(house.request())["release"]
    was = session_of(made)
    os.kill(was, signal.SIGUSR1)

    def hangs() -> bool:
        body = {"model": "default", "messages": [], "max_tokens": 1}
        try:
            ask(layout().socket(made), "POST", "/v1/chat/completions", body, timeout_seconds=0.5)
        except OSError:
            return True
        return False

    wait_for(hangs)
    for command in (control.up, lambda: control.promote_release(made)):
        with pytest.raises(ServerError, match=NO_CHAT) as caught:
            command()
        assert "`tuneserve down --name default`" in caught.value.hint
    assert session_of(made) == was  # a command that only looks ends nobody
    again = release(house.request())
    assert again["reused"] and again["release"] == made
    assert session_of(made) != was
    assert house.chat().headers["x-tuneserve-release"] == made


def test_promoting_what_is_current_brings_it_up(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve.release.supervisor.START_TRIES", 0)
    made = release(house.request("a"))["release"]
    release(house.request("b", name="other"))
    control.down("default")
    control.promote_release(made)
    assert house.chat(path="/default/v1").headers["x-tuneserve-release"] == made
    os.kill(session_of(made), signal.SIGKILL)
    wait_for(lambda: keeper().all()[server_program(made)].state == "FATAL")
    control.promote_release(made)
    assert house.chat(path="/default/v1").headers["x-tuneserve-release"] == made
