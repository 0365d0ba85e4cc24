"""A server that has much to do is not one that hangs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import release_stub as stub
from release_house import House, keeper, wait_for
from tuneserve.errors import DeviceBusy, InputError
from tuneserve.release import control, keep, promote, stage, state
from tuneserve.release.layout import layout
from tuneserve.release.stage import release
from tuneserve.release.supervisor import server_program
from tuneserve.release.work import Work


def slow_server(house: House, monkeypatch: pytest.MonkeyPatch) -> str:
    """One whose short chat, 8 tokens, takes longer than a short chat may."""
    monkeypatch.setattr(promote, "_FIRST_CHAT_SECONDS", 1.0)
    monkeypatch.setattr(promote, "_NEXT_CHAT_SECONDS", 1.0)
    made: str = release(house.request(dataset=None))["release"]
    stub.make_model(house.folder / "a", token_seconds=0.3)
    was = session_of(made)
    assert was is not None
    os.kill(was, signal.SIGKILL)
    wait_for(lambda: session_of(made) not in (None, was) and house.chat(1).is_success)
    return made


def session_of(made: str) -> int | None:
    return keeper()._session(server_program(made))


@contextmanager
def load(house: House) -> Iterator[list[int]]:
    stop, statuses = threading.Event(), []

    def client() -> None:
        while not stop.is_set():
            statuses.append(house.chat(1).status_code)

    clients = [threading.Thread(target=client) for _ in range(2)]
    for each in clients:
        each.start()
    try:
        yield statuses
    finally:
        stop.set()
        for each in clients:
            each.join()


def test_a_busy_server_is_left_alone_by_all_commands(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = slow_server(house, monkeypatch)
    was = session_of(made)
    with load(house) as statuses:
        assert release(house.request(dataset=None))["reused"]
        assert control.promote_release(made)["release"] == made
        assert control.up()["names"]["default"]["state"] == "serving"
    assert caplog.text.count(f"{made} is busy") == 3
    assert session_of(made) == was
    assert set(statuses) == {200}


def test_what_hangs_may_finish_what_it_still_answers(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = slow_server(house, monkeypatch)
    was = session_of(made)
    monkeypatch.setattr(promote, "work_of", lambda socket_path: Work(None, None))
    monkeypatch.setattr(promote, "_FIRST_CHAT_SECONDS", 30.0)
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(house.chat(15).status_code))
    asking.start()
    wait_for(lambda: control.status()["names"]["default"]["requests_running"] == 1)
    assert release(house.request(dataset=None))["reused"]
    asking.join()
    assert answers == [200]
    assert session_of(made) not in (None, was)
    assert house.chat(1).headers["x-tuneserve-release"] == made


def test_nothing_is_stopped_for_a_model_that_is_gone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = slow_server(house, monkeypatch)
    was = session_of(made)
    monkeypatch.setattr(promote, "work_of", lambda socket_path: Work(None, None))
    request = house.request(dataset=None)
    elsewhere = Path(shutil.move(house.folder / "a", house.folder / "moved"))
    moved = type(request)(**{**vars(request), "model": elsewhere})
    with pytest.raises(InputError, match=f"the model of {made} is gone"):
        release(moved)
    assert session_of(made) == was
    assert house.chat(1).headers["x-tuneserve-release"] == made


def test_a_release_that_was_cleaned_up_is_proven_anew(house: House) -> None:
    made = release(house.request(dataset=None))["release"]
    control.down()
    keeper().ensure_running()
    keeper().remove(server_program(made))
    again = release(house.request(dataset=None))
    assert (again["release"], again["reused"]) == (made, False)
    assert house.chat().headers["x-tuneserve-release"] == made


def test_keep_asks_its_chat_while_others_may_change_the_name(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = release(house.request(dataset=None))["release"]
    asked: list[str] = []
    check_serves = promote.check_serves

    def check(servers: promote.Servers, record: state.Release, *, chat_seconds: float) -> None:
        with state.lock_name(servers.places, record.name, "releasing meanwhile"):
            asked.append(record.id)
        check_serves(servers, record, chat_seconds=chat_seconds)

    monkeypatch.setattr(promote, "check_serves", check)
    servers = promote.Servers(layout(), keeper())
    assert keep._look(servers, every=True) == [] and asked == [made]

    def fail(servers: promote.Servers, record: state.Release, *, chat_seconds: float) -> None:
        with state.change(servers.places) as changed:
            changed.names["default"].promoting = "r9"
        raise stage.InputError("its server was just replaced")

    monkeypatch.setattr(promote, "check_serves", fail)
    assert keep._look(servers, every=True) == []
    with state.change(layout()) as changed:
        changed.names["default"].promoting = None
    with state.lock_name(layout(), "default", "releasing"):
        (error,) = keep._look(servers, every=True)
    assert isinstance(error, DeviceBusy)
