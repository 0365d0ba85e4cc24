"""What dies, is taken or is full while models are served; every process is real."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

import release_stub as stub
from release_house import House, keeper, processes_of, wait_for
from tuneserve.errors import (
    PortTaken,
)
from tuneserve.release import control, state
from tuneserve.release.capacity import device_memory_bytes
from tuneserve.release.layout import layout
from tuneserve.release.sessions import session_members
from tuneserve.release.stage import release
from tuneserve.release.supervisor import GATEWAY, server_program


def test_a_taken_port_is_found_before_anything_is_started(house: House) -> None:
    """E04."""
    code = f"import socket,time; s=socket.create_server(('127.0.0.1',{house.port})); time.sleep(60)"
    stranger = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: _listens(house.port))
        with pytest.raises(PortTaken, match=f"process {stranger.pid}"):
            release(house.request())
    finally:
        stranger.kill()
        stranger.wait()
    assert not keeper().running()
    assert state.read(layout()).releases == {}


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def test_a_killed_api_process_ends_its_group_and_comes_back(house: House) -> None:
    """E03."""
    made = release(house.request(behaviour={"engine": True, "token_seconds": 0.2}))["release"]
    program = server_program(made)
    session = keeper()._session(program)
    assert session is not None and len(session_members(session)) == 2
    results: list[tuple[int, float]] = []

    def ask() -> None:
        results.append((house.chat(100).status_code, time.monotonic()))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: control.status()["names"]["default"]["requests_running"] == 1)
    os.kill(session, signal.SIGKILL)
    killed = time.monotonic()
    held = house.chat(1)  # sent while nobody listens: held, then answered by the restarted server
    asking.join()
    assert results[0][0] == 502 and results[0][1] - killed < 2
    assert held.status_code == 200
    assert not session_members(session)


def test_a_dead_engine_is_noticed_and_restarted(house: House) -> None:
    made = release(house.request(behaviour={"engine": True}))["release"]
    program = server_program(made)
    session = keeper()._session(program)
    assert session is not None
    engine = next(pid for pid in session_members(session) if pid != session)
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: keeper()._session(program) != session and house.chat(1).is_success, 40)
    assert not session_members(session)


def test_killed_gateway_comes_back(house: House) -> None:
    release(house.request())
    session = keeper()._session(GATEWAY)
    assert session is not None
    os.kill(session, signal.SIGKILL)

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return house.chat().is_success
        return False

    wait_for(answers)


def test_a_killed_supervisord_leaves_nobody_and_up_restores(house: House) -> None:
    made = release(house.request(behaviour={"engine": True}))["release"]
    pid = int((layout().root / "supervisord.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes_of(house.folder))
    assert control.status()["endpoint"] is None
    restored = control.up()
    assert restored["names"]["default"]["state"] == "serving"
    assert house.chat().headers["x-tuneserve-release"] == made


RELEASE = [
    sys.executable,
    "-c",
    "import pickle, sys; from tuneserve.release.stage import release; "
    "release(pickle.loads(bytes.fromhex(sys.argv[1])))",
]


def test_daemons_hold_no_descriptor_of_the_command(house: House) -> None:
    # ends only when every holder of the pipes has closed them
    command = [*RELEASE, pickle.dumps(house.request()).hex()]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert house.chat().is_success


def test_a_candidate_ends_when_its_prover_is_killed(house: House) -> None:
    champion = release(house.request("a"))["release"]
    request = house.request("b", behaviour={"start_seconds": 60})
    prover = subprocess.Popen([*RELEASE, pickle.dumps(request).hex()])
    other = wait_for(
        lambda: [n for n in keeper().all() if n not in (GATEWAY, server_program(champion))]
    )[0]
    wait_for(lambda: keeper().members(other))
    prover.kill()
    prover.wait()
    log = layout().server_log(other.removeprefix("server-"))
    wait_for(lambda: log.read_text().count("is gone") >= 2)  # also when the keeper tries again
    assert not keeper().members(other)
    assert house.chat().headers["x-tuneserve-release"] == champion


def test_rollback_from_a_champion_that_dies_again_and_again(house: House) -> None:
    good = release(house.request("a"))["release"]
    bad = release(house.request("b"))["release"]
    stub.make_model(house.folder / "b", die="RuntimeError: broken")
    session = keeper()._session(server_program(bad))
    assert session is not None
    os.kill(session, signal.SIGKILL)
    wait_for(lambda: control.status()["names"]["default"]["state"] != "serving")
    control.rollback()
    assert house.chat().headers["x-tuneserve-release"] == good
    assert set(keeper().all()) >= {GATEWAY, server_program(good)}
    assert not keeper().members(server_program(bad))


def test_server_logs_are_rotated(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve.release.supervisor.LOG_ROTATE_BYTES", 100_000)
    made = release(house.request(behaviour={"chatter_bytes": 350_000}))["release"]
    log = layout().server_log(made)
    assert control.log_files() == [log]
    assert log.stat().st_size <= 100_000 < 2 * log.with_suffix(".log.1").stat().st_size


def test_memory_of_a_process_that_is_ending_is_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E07: the driver's tool is a script here; the process that holds the memory is a real one."""
    caplog.set_level("INFO")
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    tool = house.folder / "tools" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        f"state=$(sed 's/.*) //' /proc/{holder.pid}/stat 2>/dev/null | cut -c1)\n"
        'case "$state" in [RSD]) held=1;; esac\n'
        'case "$1" in\n'
        '*memory.free*) if [ "$held" ]; then free=100; else free=79000; fi\n'
        '  echo "0, GPU-1, Some card, 80000, $free";;\n'
        f'*process_name*) [ "$held" ] && echo "GPU-1, {holder.pid}, /usr/bin/old-server, 78000";;\n'
        # Some drivers hide other users' processes.
        f'*) echo "[N/A], [N/A]"; [ "$held" ] && echo "{holder.pid}, 78000";;\n'
        "esac\nexit 0\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert device_memory_bytes([holder.pid]) == 78000 * 2**20
    said = f"held by process {holder.pid} (old-server): 78000 MiB"

    def end_when_it_was_named() -> None:
        wait_for(lambda: said in caplog.text)
        holder.kill()
        holder.wait()

    ending = threading.Thread(target=end_when_it_was_named)
    ending.start()
    made = release(house.request())["release"]
    ending.join()
    assert said in caplog.text and "waiting for memory" in caplog.text
    assert house.chat().headers["x-tuneserve-release"] == made
    assert device_memory_bytes([holder.pid]) == 0
