"""The gateway as seen by somebody who means no good, and where keys are not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from release_house import House, wait_for
from tuneserve.errors import InputError, RunFileError
from tuneserve.release import address, control, gateway, promote
from tuneserve.release.gateway import MAX_BODY_BYTES
from tuneserve.release.layout import layout
from tuneserve.release.stage import release
from tuneserve.release.supervisor import Keeper

KEY = "tsk-0123456789-never-to-be-seen"
BODY = {"model": "default", "messages": [{"role": "user", "content": "my private words"}]}


@pytest.fixture
def guarded(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setenv("DOOR_API_KEY", KEY)
    release(house.request(host="0.0.0.0", api_key_env="DOOR_API_KEY"))
    yield house


def post(house: House, key: str | None = KEY, path: str = "/v1") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.post(f"{house.url}{path}/chat/completions", json=BODY, headers=headers)


def raw(house: House, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", house.port), timeout=20) as connection:
        connection.sendall(request)
        return connection.makefile("rb").readline()


def test_keys_paths_and_sizes(guarded: House) -> None:
    house = guarded
    assert post(house).status_code == 200
    for wrong in (None, "x" * 31, KEY[:-1], KEY + "x", KEY.upper(), f"# {KEY}"):
        answer = post(house, wrong)
        assert answer.status_code == 401, wrong
        assert answer.json()["error"]["message"].startswith("a valid API key")
        assert answer.headers["x-tuneserve-release"].startswith("r0001")
    in_url = httpx.post(f"{house.url}/v1/chat/completions?api_key={KEY}", json=BODY)
    assert in_url.status_code == 401
    assert httpx.get(f"{house.url}/health").status_code == 200

    second = control.add_key("alice")
    assert post(house, second).status_code == 200
    control.revoke_key("alice")
    assert post(house, second).status_code == 401
    assert post(house).status_code == 200

    door = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n".encode()
    for path in (
        "/metrics",
        "/tokenize",
        "/v1/../metrics",
        "/v1/..%2fmetrics",
        "/v1%2f..%2fmetrics",
        "/v1/%2e%2e/metrics",
        "//v1/models",
        "/v1//models",
        "/v1/models/../../metrics",
        "/default/v1/../../metrics",
        "/../v1/models",
        "/v1\\..\\metrics",
        "/hold/v1/models",
        "/r0001/v1/models",
        "/v1/models%00",
        "/version",
        "/docs",
        "/openapi.json",
        "/load",
    ):
        line = raw(house, f"GET {path} HTTP/1.1\r\n".encode() + door)
        assert line.split()[1] in (b"404", b"400"), (path, line)

    big = b"x" * (MAX_BODY_BYTES + 1)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(
        f"{house.url}/v1/chat/completions", content=big, headers=headers, timeout=60
    )
    assert answer.status_code == 413
    huge = b"GET /v1/models HTTP/1.1\r\nX-Long: " + b"a" * 200_000 + b"\r\n" + door
    assert raw(house, huge).split()[1] == b"431"


def test_health_needs_no_key_and_takes_nothing_in(guarded: House) -> None:
    url = f"{guarded.url}/health"
    assert httpx.get(url).status_code == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert httpx.request(method, url).status_code == 404, method
    before = control.status()["names"]["default"]["requests_total"]
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 3000\r\n\r\n"
    assert raw(guarded, head + b"x" * 3000).split()[1] == b"413"
    assert control.status()["names"]["default"]["requests_total"] == before
    # While requests are held, it says so instead of being held.
    promote.Servers(layout(), Keeper(layout())).hold("default")
    started = time.monotonic()
    answer = httpx.get(url, timeout=30)
    assert time.monotonic() - started < 5
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("no model server answers; send")
    assert "`tuneserve status`" in answer.json()["error"]["message"]


def test_the_gateways_own_answers_name_the_release_that_the_path_leads_to(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOOR_API_KEY", KEY)
    first = release(house.request("a", api_key_env="DOOR_API_KEY"))["release"]
    other = release(house.request("b", name="other", api_key_env="DOOR_API_KEY"))["release"]

    def refused(path: str, status: int) -> str | None:
        answer = httpx.post(f"{house.url}{path}/chat/completions", json=BODY)
        assert answer.status_code == status and answer.json()["error"]["code"] == status
        return answer.headers.get("x-tuneserve-release")

    assert refused("/v1", 401) == first
    assert refused("/other/v1", 401) == other
    assert refused("/nobody/v1", 401) is None
    assert refused("/metrics", 404) == first
    assert post(house, path="/nobody/v1").status_code == 404
    promote.Servers(layout(), Keeper(layout())).hold("other")
    answer = httpx.get(f"{house.url}/other/health", timeout=30)
    assert (answer.status_code, answer.headers["x-tuneserve-release"]) == (503, "none")


def test_a_client_that_sends_slowly_is_given_up(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "_CLIENT_HEAD_SECONDS", 1)
    monkeypatch.setattr(gateway, "_CLIENT_SEND_SECONDS", 2)
    release(house.request())
    before = control.status()["names"]["default"]["requests_total"]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n"
    assert raw(house, head) == b""  # a half header: closed without a word
    with socket.create_connection(("127.0.0.1", house.port), timeout=20) as connection:
        connection.sendall(head + b"\r\n{")  # a body that does not come

        def given_up() -> list[float]:
            lines = map(json.loads, (layout().logs / "access.log").read_text().splitlines())
            return [float(line["duration"]) for line in lines if line["status"] == 499]

        (seconds,) = wait_for(given_up)
    assert 1.5 < seconds < 4
    assert control.status()["names"]["default"]["requests_total"] == before  # no server saw it


@pytest.mark.parametrize("variable", ["DOOR_API_KEY", "LLM_KEY"])
def test_keys_are_nowhere_but_in_their_file(
    house: House, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, KEY)
    release(house.request(host="0.0.0.0", api_key_env=variable))
    assert post(house).status_code == 200
    httpx.post(f"{house.url}/v1/chat/completions?api_key={KEY}", json=BODY)
    places = layout()
    assert places.keys.stat().st_mode & 0o777 == 0o600
    found = [
        path
        for path in house.folder.rglob("*")
        if path.is_file() and path != places.keys and KEY.encode() in path.read_bytes()
    ]
    assert not found
    log = (places.logs / "access.log").read_text()
    assert '"status":200' in log and "my private words" not in log and "api_key" not in log
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in (os.getpid(), os.getppid()):
            for name in ("cmdline", "environ"):
                try:
                    text = Path(f"/proc/{entry}/{name}").read_bytes()
                except OSError:
                    continue
                if str(house.folder).encode() in text:
                    assert KEY.encode() not in text, (entry, name)


def test_sockets_and_admin_are_closed_to_others(guarded: House) -> None:
    places = layout()
    assert places.sockets.stat().st_mode & 0o777 == 0o700
    assert places.root.stat().st_mode & 0o777 == 0o700
    assert places.keeper_socket.stat().st_mode & 0o077 == 0
    gateway = Keeper(places).members("gateway")
    table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    assert f":{2019:04X} " not in table  # Caddy's default admin port
    sockets = {os.readlink(link) for pid in gateway for link in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in table.splitlines() if "0A" in line.split()[3:4]]
    ours = [line[1] for line in lines if f"socket:[{line[9]}]" in sockets]
    assert [int(address.rpartition(":")[2], 16) for address in ours] == [guarded.port]


def test_an_open_address_without_a_key_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunFileError, match="other machines can reach"):
        release(house.request(host="0.0.0.0"))
    monkeypatch.delenv("DOOR_API_KEY", raising=False)
    with pytest.raises(RunFileError, match="DOOR_API_KEY, which is not set"):
        release(house.request(api_key_env="DOOR_API_KEY"))
    monkeypatch.setenv("DOOR_API_KEY", "short")
    with pytest.raises(InputError, match="16 to 256"):
        release(house.request(api_key_env="DOOR_API_KEY"))
    assert not Keeper(layout()).running()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "llm.example.org"])
def test_caddy_accepts_the_configuration(tmp_path: Path, host: str) -> None:
    places = layout(tmp_path / "run")
    listen = address.listen_for(host, 8443, {"alice": "x"}, hold_seconds=10)
    config = places.conf / "gateway.json"
    config.write_text(json.dumps(gateway.caddy_config(places, listen)))
    command = [gateway.caddy_binary(), "validate", "--config", str(config)]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(config.read_text())["apps"]["http"]["servers"]["gateway"]
    assert ("automatic_https" not in made) == bool(listen.tls) == (host == "llm.example.org")
