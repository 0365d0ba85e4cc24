"""`tuneserve keep` with a real process keeper."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tuneserve.release.layout import layout
from tuneserve.release.supervisor import Keeper
from tuneserve.release.wrapper import process_start


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
