"""Whose process is whose: after kill -9 of everything that looked after it, and weeks later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from release_house import House, keeper, processes_of, wait_for
from tuneserve.release import control
from tuneserve.release.layout import layout
from tuneserve.release.sessions import process_start, session_members
from tuneserve.release.stage import release
from tuneserve.release.supervisor import RUN_VARIABLE, server_program


def test_an_engine_that_outlived_every_keeper_is_found_and_ended(house: House) -> None:
    made = release(house.request(behaviour={"engine": True}))["release"]
    session = keeper()._session(server_program(made))
    assert session is not None
    engine = next(pid for pid in session_members(session) if pid != session)
    command, environment = Path(f"/proc/{engine}/cmdline"), Path(f"/proc/{engine}/environ")
    wait_for(lambda: command.read_bytes().startswith(b"VLLM::EngineCore"))
    assert RUN_VARIABLE.encode() not in environment.read_bytes()
    # As `pkill -9 -f tuneserve` does it: keepers, wrappers and guards at once, the API with them.
    pids = [int(line.split()[0]) for line in processes_of(house.folder)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    wait_for(lambda: session_members(session) == [engine])
    control.up()
    assert process_start(engine) is None
    assert house.chat().headers["x-tuneserve-release"] == made


def test_a_stranger_that_got_the_number_of_a_former_server_is_left_alone(house: House) -> None:
    program = server_program(release(house.request())["release"])
    session = keeper()._session(program)
    record = layout().conf / "programs" / f"{program}.group"
    text = record.read_text()
    keeper().stop(program)
    assert not record.exists()
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    sleep = "import time; time.sleep(600)"
    stranger = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    daemon = subprocess.Popen([sys.executable, "-c", code, sleep], start_new_session=True)
    daemon.wait()
    members = [*session_members(stranger.pid), *session_members(daemon.pid)]
    try:
        assert len(members) == 2
        for pid in (stranger.pid, daemon.pid):
            record.write_text(text.replace(str(session), str(pid), 1))
            assert keeper().members(program) == []
            keeper().stop(program)
        keeper().remove(program)
        for pid in (stranger.pid, daemon.pid):
            record.write_text(text.replace(str(session), str(pid), 1))
            control.down()
        assert not record.exists()
        assert all(process_start(pid) is not None for pid in members)
    finally:
        for pid in members:
            if process_start(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        stranger.wait()


def test_a_child_in_a_session_of_its_own_ends_with_its_server(house: House) -> None:
    made = release(house.request(behaviour={"apart": True}))["release"]
    program, record = server_program(made), layout().socket(made).with_name("apart.pid")
    session, apart = keeper()._session(program), int(record.read_text())
    assert session is not None and apart not in session_members(session)
    os.kill(session, signal.SIGKILL)
    wait_for(lambda: process_start(apart) is None)
    assert house.chat().headers["x-tuneserve-release"] == made  # it came back
    another = int(record.read_text())
    assert process_start(another) is not None
    keeper().stop(program)
    assert process_start(another) is None
