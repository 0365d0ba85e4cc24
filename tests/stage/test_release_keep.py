"""`tuneserve keep` with a real process keeper."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import release_stub as stub
from release_house import House, processes_of, wait_for
from tuneserve.errors import DeviceBusy
from tuneserve.release import control, state
from tuneserve.release.layout import layout
from tuneserve.release.sessions import process_start
from tuneserve.release.stage import release
from tuneserve.release.supervisor import Keeper, server_program


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    monkeypatch.setenv("TUNESERVE_HOME", str(folder / "home"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_the_keeper_is_there_until_sigterm_and_comes_back_when_killed(home: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "tuneserve", "keep"], env=os.environ)
    keeper = Keeper(layout())
    end = time.monotonic() + 60

    def until_running() -> int:
        while not keeper.running():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        return int(keeper._rpc().supervisor.getPID())

    first = until_running()
    os.kill(first, signal.SIGKILL)
    while keeper.running():
        time.sleep(0.01)
    second = until_running()
    assert second != first
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not keeper.running() and process_start(second) is None


def test_a_machine_that_restarts_serves_again_and_ends_cleanly_while_servers_load(
    house: House,
) -> None:
    made = release(house.request("a"))["release"]
    # The machine goes: everything at once, sockets and process files stay behind.
    pid = int((layout().root / "supervisord.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes_of(house.folder))
    stub.make_model(house.folder / "a", start_seconds=60)
    program = server_program(made)
    command = [sys.executable, "-m", "tuneserve", "keep"]

    loading = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: Keeper(layout()).members(program))
    asked = time.monotonic()
    loading.send_signal(signal.SIGTERM)
    loading.send_signal(signal.SIGTERM)  # an impatient hand
    _, said = loading.communicate(timeout=30)
    assert loading.returncode == 0, said
    assert time.monotonic() - asked < 15
    assert "SIGTERM: ending the servers" in said and program in said.splitlines()[-1]
    assert not processes_of(house.folder)
    assert state.read(layout()).names["default"].wanted == "up"

    stub.make_model(house.folder / "a", start_seconds=0, token_seconds=0.1)
    serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: control.status()["names"]["default"]["state"] == "serving")
    wait_for(lambda: load_of_default() == (0, 1))  # it has asked a chat itself
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(house.chat(15).status_code))
    asking.start()
    wait_for(lambda: control.status()["names"]["default"]["requests_running"] == 1)
    serving.send_signal(signal.SIGTERM)
    asking.join()
    _, said = serving.communicate(timeout=30)
    assert (serving.returncode, answers) == (0, [200]), said
    assert not processes_of(house.folder)


def load_of_default() -> tuple[int, int]:
    shown = control.status()["names"]["default"]
    return shown["requests_running"], shown["requests_total"]


def test_a_server_that_the_process_keeper_gave_up_is_revived(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve.release.supervisor.START_TRIES", 0)
    made = release(house.request())["release"]
    program = server_program(made)
    keeping = subprocess.Popen([sys.executable, "-m", "tuneserve", "keep"])

    def has_looked() -> bool:
        with contextlib.suppress(DeviceBusy), state.lock_name(layout(), "default", "asking"):
            return True
        return False

    try:
        for _ in range(2):  # the first time may be while it looks after everything at its start
            session = Keeper(layout())._session(program)
            assert session is not None
            os.kill(session, signal.SIGKILL)
            wait_for(lambda: not Keeper(layout()).members(program))
            wait_for(lambda: house.chat(1).is_success, 60)
            wait_for(has_looked)
    finally:
        keeping.send_signal(signal.SIGTERM)
        keeping.wait(60)
