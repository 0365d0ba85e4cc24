"""What dies while a real vLLM serves or loads: its engine and workers go with it."""

from __future__ import annotations

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

import httpx
import pytest

from release_house import processes_of, wait_for
from release_stub import free_port
from tuneserve.config import ServeSection
from tuneserve.release import control
from tuneserve.release.layout import layout
from tuneserve.release.ready import healthy
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.sessions import process_start, session_members
from tuneserve.release.stage import release
from tuneserve.release.supervisor import Keeper, server_program
from tuneserve.release.unixhttp import load_of

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    monkeypatch.setenv("TUNESERVE_HOME", str(folder / "home"))
    try:
        yield folder
    finally:
        control.down()
        shutil.rmtree(folder, ignore_errors=True)


def engines(session: int) -> list[int]:
    """Processes of a server that are not its API process."""
    return [pid for pid in session_members(session) if pid != session]


def gone(pids: list[int]) -> bool:
    return all(process_start(pid) is None for pid in pids)


def test_a_killed_api_process_and_a_keeper_that_is_ended_while_vllm_loads(
    home: Path, pico_model: Path
) -> None:
    port = free_port()
    serve = ServeSection(port=port, max_model_len=1024)
    made = release(ReleaseRequest(pico_model, "merged-0", serve))["release"]
    keeper, program = Keeper(layout()), server_program(made)
    session = keeper._session(program)
    assert session is not None and len(engines(session)) >= 2  # EngineCore and a worker
    ended: list[tuple[int, float]] = []

    def ask(tokens: int) -> httpx.Response:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        body |= {"max_tokens": tokens, "n": 8, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=290)
        ended.append((answer.status_code, time.monotonic()))
        return answer

    under_way = threading.Thread(target=ask, args=(1000,))
    under_way.start()

    def running() -> bool:
        answer = healthy(layout().socket(made), made)
        load = load_of(answer) if answer else None
        return load is not None and load[0] == 1

    wait_for(running)
    os.kill(session, signal.SIGKILL)
    killed = time.monotonic()
    under_way.join()
    assert ended[0][0] == 502 and ended[0][1] - killed < 2
    wait_for(lambda: not session_members(session), 5)
    held = ask(4)  # nobody listens: held until the server is back
    assert held.status_code == 200 and held.headers["x-tuneserve-release"] == made
    assert time.monotonic() - killed > 5

    # The engine's and the workers' command lines say nothing of the run root: they are asked for
    # one by one.
    session = keeper._session(program)
    assert session is not None and len(before := session_members(session)) >= 3
    os.kill(int((layout().root / "supervisord.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: gone(before) and not processes_of(home))
    keep = subprocess.Popen([sys.executable, "-m", "tuneserve", "keep"], stderr=subprocess.PIPE)
    wait_for(lambda: (loading := keeper._session(program)) and engines(loading), 120)
    assert keep.poll() is None
    session = keeper._session(program)
    assert session is not None and len(loading := session_members(session)) >= 2
    keep.send_signal(signal.SIGTERM)
    _, said = keep.communicate(timeout=60)
    assert keep.returncode == 0, said.decode()
    assert gone(loading) and not processes_of(home)
