"""What commands see of processes and files that are not as this version would have them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tuneserve.config import GatesSection, ServeSection
from tuneserve.errors import InputError
from tuneserve.release import address, entrance, keys, request, sessions, state
from tuneserve.release.address import Listen
from tuneserve.release.layout import layout
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.supervisor import Keeper, ProcessInfo
from tuneserve.release.work import Work

_DUMPABLE, _KEEP_CAPABILITIES = 4, 8  # prctl(2)
_NOBODY = 65534


def _in_child(action: Callable[[], int]) -> int:
    """Start a process of ours that ends with what `action` gives."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        status = action()
    finally:
        os._exit(status)


def test_what_cannot_be_looked_into_is_not_taken_for_what_listens_nowhere() -> None:
    prctl = ctypes.CDLL(None).prctl
    root = os.geteuid() == 0
    told, tell = os.pipe()
    ends, end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in (address.ports_of([os.getpid(), 2**22 - 1]) or ())

        def privileged() -> int:
            """As the gateway is by a service manager's AmbientCapabilities."""
            if root:
                prctl(_KEEP_CAPABILITIES, 1)
                os.setuid(_NOBODY)
            prctl(_DUMPABLE, 1 if root else 0)
            os.write(tell, b"1")
            os.close(end)
            return len(os.read(ends, 1))

        def plain() -> int:
            if root:
                os.setuid(_NOBODY)
            return 42 if address.ports_of([listener]) is None else 1

        listener = _in_child(privileged)
        os.read(told, 1)
        looker = _in_child(plain)
        assert os.waitstatus_to_exitcode(os.waitpid(looker, 0)[1]) == 42
        os.close(end)
        os.waitpid(listener, 0)
    for descriptor in (told, tell, ends):
        os.close(descriptor)


def test_fields_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    places = layout(tmp_path)
    with state.change(places) as changed:
        made = changed.add("moss", "abcdef0123456789", "/m", "merged-1")
        changed.names["moss"] = state.Name(active=made.id)
        changed.gateway = Listen("127.0.0.1", 8080).to_json()
    before = state.read(places)
    data = json.loads(places.state_file.read_text())
    for part in (data["gateway"], data["names"]["moss"], data["releases"][made.id]):
        part["of_next_year"] = 1
    places.state_file.write_text(json.dumps(data))
    assert state.read(places) == before
    assert Listen(**state.read(places).gateway).port == 8080


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("# alice\nBearer {}\nBearer {}\n", 3, "a key without a name above"),
        ("# alice\nBearer {}\n# bob\n", 3, "a name without a key below"),
        ("# made by hand\n# alice\nBearer {}\n", 1, "a name without a key below"),
        ("# alice\nBearer {}\n# bj\u00f6rn\nBearer {}\n", 3, "characters beyond ASCII"),
    ],
)
def test_a_slip_in_the_key_file_is_told_with_its_line(
    tmp_path: Path, text: str, line: int, found: str
) -> None:
    path, key = tmp_path / "keys", "tsk-very-secret-value"
    path.write_text(text.format(key, key), "utf-8")
    path.chmod(0o600)
    for action in (lambda: keys.read_keys(path), lambda: keys.add_key(path, "carol")):
        with pytest.raises(InputError, match=rf"keys:{line}: {found}") as caught:
            action()
        assert key not in str(caught.value)
    assert path.read_text("utf-8") == text.format(key, key)
    # Servers still start, and still without the key.
    given = {"PATH": "/bin", "ALICE": key, "alice": "x"}
    assert keys.without_keys(path, given) == {"PATH": "/bin"}


def test_settings_that_came_later_change_no_key_while_they_are_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "_vllm_version", lambda: "vllm 0.32")
    serve = {
        "name": "default", "max_model_len": None, "tensor_parallel": 1, "max_concurrent_chats": 8,
        "temperature": None, "top_p": None, "tool_parser": None,
    }  # fmt: skip
    parts: dict[str, Any] = {
        "model": "merged-1", "serve": serve, "gates": GatesSection().model_dump(mode="json"),
        "inputs": {}, "trust_remote_code": False, "python": "/p", "vllm": "vllm 0.32",
    }  # fmt: skip

    def wanted() -> str:
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def found(**fields: Any) -> str:
        section = ServeSection.model_validate(fields)
        return ReleaseRequest(tmp_path, "merged-1", section, python="/p").key

    assert found() == found(hold_seconds=5) == wanted()
    serve["top_k"] = 0
    assert found(top_k=0) == wanted()


def test_a_record_of_the_first_version_is_a_number_alone(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(sleep, start_new_session=True, cwd=tmp_path)
    other = subprocess.Popen(sleep, start_new_session=True, cwd="/")
    record = tmp_path / "server.group"
    try:
        for process, wanted in ((ours, ours.pid), (other, None)):
            record.write_text(f"{process.pid}\n")
            assert sessions.recorded_session(record, tmp_path) == wanted
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
    assert sessions.recorded_session(record, tmp_path) is None


def test_a_system_that_does_not_tell_its_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "server.group"
    sessions.record_session(record, os.getpid())  # with its boot
    monkeypatch.setattr(sessions, "_BOOT_ID", tmp_path / "nothing")
    assert sessions.recorded_session(record, tmp_path) is None
    sessions.record_session(record, os.getpid())
    assert record.read_text().endswith(" -\n")
    assert sessions.recorded_session(record, tmp_path) == os.getpid()


def test_a_program_that_somebody_starts_while_it_is_stopped_is_stopped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = ["STOPPING", "STARTING", "STOPPING", "STOPPED"]
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        Keeper, "info", lambda self, name: ProcessInfo(name, states.pop(0), 0, 0, 0)
    )
    monkeypatch.setattr(Keeper, "_call", lambda self, *arguments: asked.append(arguments))
    Keeper(layout(tmp_path)).stop("gateway")
    assert asked == [("stopProcess", "gateway", False)] * 2 and not states


def test_requests_are_held_as_long_as_before_unless_the_run_file_says_less(tmp_path: Path) -> None:
    """A gateway that is restarted cuts answers that take longer than its grace."""
    places = layout(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        former = Listen("127.0.0.1", probe.getsockname()[1], hold_seconds=1020)
    shorter = Listen("127.0.0.1", former.port, hold_seconds=300)
    with state.change(places) as changed:
        changed.gateway = former.to_json()
        changed.names["default"] = state.Name(active="r1")
    keeper = Keeper(places)
    assert entrance.check(places, keeper, shorter, "default") == former
    assert entrance.check(places, keeper, shorter, "default", may_hold_less=True) == shorter
    assert entrance.check(places, keeper, shorter, "new", may_hold_less=True) == former
    longer = Listen(**{**asdict(former), "hold_seconds": 2000})
    assert entrance.check(places, keeper, longer, "default") == longer


def test_work_is_tokens_and_only_without_them_requests_that_ended() -> None:
    """Clients that give up end their requests on a server that hangs, too."""
    assert Work(100.0, 5).goes_on_in(Work(101.0, 5))
    assert not Work(100.0, 5).goes_on_in(Work(100.0, 9))
    assert Work(None, 5).goes_on_in(Work(None, 6))
    assert not Work(None, 5).goes_on_in(Work(None, 5))
    assert not Work(None, None).goes_on_in(Work(None, 6))
