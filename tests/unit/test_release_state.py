"""The state file, locks and API keys."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tuneserve.errors import DeviceBusy, InputError, PortTaken, RunFileError
from tuneserve.release import address, gateway, keys, state
from tuneserve.release.layout import layout


def test_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    places = layout(tmp_path)
    with state.change(places) as changed:
        release = changed.add("moss", "abcdef0123456789", "/m", "merged-1")
        changed.names["moss"] = state.Name(active=release.id, history=[{"release": "r0"}])
    found = state.read(places)
    assert release.id == "r0001-abcdef01"
    assert found.releases == {release.id: release}
    assert found.find("moss", "abcdef0123456789") == release
    assert found.release("r0001") == release
    with pytest.raises(InputError, match="there is none"):
        found.release("r9")
    with pytest.raises(InputError, match="under the name 'x'"):
        found.name("x")


def test_a_failed_change_changes_nothing(tmp_path: Path) -> None:
    places = layout(tmp_path)
    with pytest.raises(ZeroDivisionError), state.change(places) as changed:
        changed.default = "x"
        raise ZeroDivisionError
    assert state.read(places) == state.State()


def test_a_damaged_state_file_is_an_error_and_stays(tmp_path: Path) -> None:
    places = layout(tmp_path)
    places.state_file.write_text('{"format": 99}')
    with pytest.raises(InputError, match="format 99"):
        state.read(places)
    assert places.state_file.read_text() == '{"format": 99}'


def test_a_name_is_held_by_one_process_and_freed_by_its_death(tmp_path: Path) -> None:
    code = (
        "import sys,time; from pathlib import Path; from tuneserve.release import state\n"
        "from tuneserve.release.layout import layout\n"
        "with state.lock_name(layout(Path(sys.argv[1])), 'moss', 'testing'):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    places = layout(tmp_path)
    with pytest.raises(DeviceBusy, match=rf"process {holder.pid} \(testing, since"):
        with state.lock_name(places, "moss", "x"):
            pass
    with state.lock_name(places, "other", "x"):
        pass
    holder.kill()
    holder.wait()
    with state.lock_name(places, "moss", "x"):
        pass
    with pytest.raises(InputError), state.lock_name(places, "../evil", "x"):
        pass


def test_keys_are_random_named_and_revocable(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first, second = keys.add_key(path, "alice"), keys.add_key(path, "bob")
    assert first != second and len(first) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="`tuneserve keys revoke alice` first"):
        keys.add_key(path, "alice")
    assert keys.read_keys(path) == {"alice": first, "bob": second}
    keys.add_key(path, "bob", second)  # as `serve.api_key_env` does at every release
    assert keys.read_keys(path) == {"alice": first, "bob": second}
    keys.revoke_key(path, "alice")
    assert keys.read_keys(path) == {"bob": second}
    with pytest.raises(InputError, match="one of: bob|no key named"):
        keys.revoke_key(path, "alice")
    path.chmod(0o644)
    with pytest.raises(InputError, match="mode 644"):
        keys.read_keys(path)


_ADD_MANY = """
import sys
from pathlib import Path
from tuneserve.release import keys
path, name = Path(sys.argv[1]), sys.argv[2]
keys.add_key(path, f"{name}-gone")
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    keys.add_key(path, f"{name}{number}")
keys.revoke_key(path, f"{name}-gone")
"""


def test_keys_added_and_revoked_by_two_processes_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    both = []
    for name in "ab":
        command = [sys.executable, "-c", _ADD_MANY, str(path), name]
        both.append(subprocess.Popen(command, text=True, **pipe))
        assert both[-1].stdout is not None and both[-1].stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert set(keys.read_keys(path)) == {f"{name}{n}" for name in "ab" for n in range(50)}


@pytest.mark.parametrize(
    "bad", ["short", "with space in it ok", "x" * 300, "line\nbreak-abcdefghij"]
)
def test_keys_that_a_header_cannot_carry_are_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(InputError):
        keys.add_key(tmp_path / "keys", "a", bad)
    assert not (tmp_path / "keys").exists()


def test_an_open_address_needs_a_key() -> None:
    with pytest.raises(RunFileError, match="0.0.0.0, which other machines can reach"):
        address.listen_for("0.0.0.0", 80, {}, hold_seconds=1)
    assert address.listen_for("0.0.0.0", 80, {"a": "k"}, hold_seconds=1).needs_key
    assert not address.listen_for("127.0.0.1", 80, {}, hold_seconds=1).needs_key
    assert address.listen_for("::1", 80, {}, hold_seconds=1).base_url == "http://[::1]:80"
    named = address.listen_for("llm.example.org", 443, {"a": "k"}, hold_seconds=1)
    assert named.tls == "public" and named.base_url == "https://llm.example.org:443"


def test_gateway_configuration_keeps_its_promises(tmp_path: Path) -> None:
    places = layout(tmp_path)
    keys.add_key(places.keys, "alice", "tsk-very-secret-value")
    listen = address.listen_for("127.0.0.1", 8080, {"alice": "x"}, hold_seconds=300)
    config = gateway.caddy_config(places, listen)
    assert config["admin"] == {"disabled": True, "config": {"persist": False}}
    assert "tsk-very-secret-value" not in str(config)
    text = str(config)
    assert "'flush_interval': -1" in text and "'keep_alive': {'enabled': False}" in text
    assert "'try_duration': '300s'" in text


def test_the_ports_of_a_process_are_those_it_listens_on() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.create_connection(four.getsockname()[:2]),
    ):
        wanted = {four.getsockname()[1], six.getsockname()[1]}
        assert wanted <= address.ports_of([os.getpid()])
        assert not wanted & address.ports_of([os.getppid(), 2**22 - 1])
        assert address.port_holder(four.getsockname()[1]).startswith(f"process {os.getpid()} (")
    assert not wanted & address.ports_of([os.getpid()])


def test_a_public_name_needs_the_port_of_plain_http_too(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_there = {"alice": "x"}
    with socket.create_server(("", 0)) as taken, socket.create_server(("", 0)) as other:
        monkeypatch.setattr(address, "_HTTP_PORT", taken.getsockname()[1])
        free = other.getsockname()[1]
        other.close()
        public = address.listen_for("llm.example.org", free, keys_there, hold_seconds=1)
        with pytest.raises(PortTaken, match=f"llm.example.org:{taken.getsockname()[1]} is taken"):
            address.check_port(public)
        address.check_port(public, but=public.ports)  # our own gateway has them
        address.check_port(address.listen_for("127.0.0.1", free, {}, hold_seconds=1))
