"""The gateway through changed settings, renewed certificates and taken ports; all processes are
real."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import release_stub as stub
from release_house import House, keeper, processes_of, wait_for
from tuneserve import doctor
from tuneserve.ask import ask_endpoint
from tuneserve.errors import GateRefused, PortTaken, RunFileError, ServerError
from tuneserve.release import control, keep, promote, stage, state, supervisor
from tuneserve.release.address import Listen, check_port
from tuneserve.release.layout import layout
from tuneserve.release.stage import release
from tuneserve.release.supervisor import GATEWAY, server_program

# `tuneserve keep` with a shorter time between its looks.
KEEP = """
from tuneserve.release import keep
keep._LOOK_SECONDS, keep._LONGEST_PAUSE_SECONDS = 0.2, 0.4
keep.keep()
"""


def write_certificate(folder: Path, *, days: int) -> dict[str, str]:
    """A certificate for localhost that ends in so many days, and its key, over the last ones."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    (folder / "tls.crt").write_bytes(made.public_bytes(pem))
    (folder / "tls.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    return {"tls_certificate": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}


def served_certificate(house: House) -> bytes | None:
    """What a client gets in its handshake, as PEM; None when nobody answers."""
    with contextlib.suppress(OSError):
        return ssl.get_server_certificate(("localhost", house.port), timeout=5).encode()
    return None


def get_models(house: House, scheme: str = "https") -> httpx.Response:
    return httpx.get(f"{scheme}://localhost:{house.port}/v1/models", verify=False, timeout=10)


@contextlib.contextmanager
def stranger(port: int) -> Iterator[None]:
    """Somebody who takes a port as soon as it is free, and answers like another run's gateway."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404, "gateway_error")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    found: list[http.server.HTTPServer] = []

    def bound() -> bool:
        with contextlib.suppress(OSError):
            found.append(http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler))
        return bool(found)

    deadline = time.monotonic() + 20
    while not bound():
        assert time.monotonic() < deadline
    (server,) = found
    threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def kill_gateway() -> None:
    session = keeper()._session(GATEWAY)
    assert session is not None
    os.kill(session, signal.SIGKILL)


@contextlib.contextmanager
def kept() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", KEEP], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def crash_everything(house: House) -> None:
    """As when the machine goes: everything at once, files stay behind."""
    os.kill(int((layout().root / "supervisord.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: not processes_of(house.folder))


def test_another_name_cannot_take_away_the_certificate(house: House, tmp_path: Path) -> None:
    files = write_certificate(tmp_path, days=30)
    release(house.request(host="localhost", **files))
    before, gateway = keeper()._session("gateway"), state.read(layout()).gateway
    for changes in ({}, {"tls": "internal"}, {**files, "tls_key": str(tmp_path / "other.key")}):
        (tmp_path / "other.key").write_bytes((tmp_path / "tls.key").read_bytes())
        with pytest.raises(RunFileError, match="the gateway serves default at https://localhost"):
            release(house.request("b", name="other", host="localhost", **changes))
    assert keeper()._session("gateway") == before
    assert state.read(layout()).gateway == gateway
    assert list(state.read(layout()).names) == ["default"]
    assert get_models(house).status_code == 200
    with pytest.raises(httpx.HTTPError):
        get_models(house, "http").raise_for_status()
    # Also while the gateway is away: the next one must not be another one.
    keeper().stop("gateway")
    with pytest.raises(RunFileError, match="the gateway serves default at https://localhost"):
        release(house.request("b", name="other", host="localhost"))
    write_certificate(tmp_path, days=60)  # a renewed one is no other one
    other = release(house.request("b", name="other", host="localhost", **files))
    assert other["endpoint"] == f"https://localhost:{house.port}/other/v1"
    assert served_certificate(house) == (tmp_path / "tls.crt").read_bytes()


def test_a_stranger_on_the_port_is_noticed_though_the_gateway_is_being_restarted(
    house: House,
) -> None:
    """E04: supervisord starts ours again and again, which is up to it as well."""
    champion = release(house.request("a"))["release"]
    before = state.read(layout())
    kill_gateway()
    with stranger(house.port):
        wait_for(lambda: keeper().all()[GATEWAY].state == "BACKOFF")
        with pytest.raises(PortTaken, match=f"process {os.getpid()} "):
            release(house.request("b"))
        with pytest.raises(PortTaken):
            promote.Servers(layout(), keeper()).ensure_gateway(Listen(**before.gateway))
        shown = control.status()
        assert shown["endpoint"] is None and shown["names"]["default"]["endpoint"] is None
        with pytest.raises(ServerError, match="the gateway does not answer"):
            ask_endpoint("hi")
        assert state.read(layout()) == before
        assert set(keeper().all()) == {GATEWAY, server_program(champion)}
    made = release(house.request("b"))
    assert made["endpoint"] == f"{house.url}/v1"
    assert house.chat().headers["x-tuneserve-release"] == made["release"]


def test_a_stranger_that_comes_while_a_model_loads_is_no_endpoint(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E04."""
    release(house.request("a"))
    coming = contextlib.ExitStack()
    make_current = promote.make_current

    def make_current_while_it_comes(*arguments: Any, **options: Any) -> None:
        make_current(*arguments, **options)
        kill_gateway()
        coming.enter_context(stranger(house.port))

    monkeypatch.setattr(stage.promote, "make_current", make_current_while_it_comes)
    with coming, pytest.raises(PortTaken):
        release(house.request("b"))


def test_a_change_of_the_gateway_that_was_not_written_down_is_undone(house: House) -> None:
    """As when the command was killed in between."""
    release(house.request("a"))
    servers = promote.Servers(layout(), keeper())
    known = Listen(**state.read(layout()).gateway)
    assert doctor._port(house.port).found == f"our own gateway listens on {house.port}"

    def change_and_die(**changes: Any) -> None:
        servers.ensure_gateway(replace(known, **changes))
        with state.change(layout()) as changed:
            changed.gateway = known.to_json()

    other = stub.free_port()
    change_and_die(port=other)
    assert control.status()["endpoint"] == f"{house.url}/v1"
    assert house.chat().is_success
    check_port(replace(known, port=other))  # nobody is left there
    change_and_die(port=other)
    assert release(house.request("a", port=other))["endpoint"] == f"http://127.0.0.1:{other}/v1"
    change_and_die()
    assert control.status()["endpoint"] == f"{house.url}/v1"
    control.add_key("alice")
    change_and_die(needs_key=True)
    assert house.chat().status_code == 401
    control.revoke_key("alice")
    release(house.request("a"))
    assert house.chat().is_success
    session = keeper()._session(GATEWAY)
    release(house.request("a"))
    assert keeper()._session(GATEWAY) == session  # what is as it should be is left alone


def test_a_gateway_that_cannot_start_anew_goes_on_as_before(house: House, tmp_path: Path) -> None:
    made = release(house.request())["release"]
    places = layout()
    servers = promote.Servers(places, keeper())
    before = state.read(places).gateway, (places.conf / "gateway.json").read_bytes()
    (tmp_path / "broken").write_text("nothing\n")
    broken = {"certificate": str(tmp_path / "broken"), "key": str(tmp_path / "broken")}
    with pytest.raises(ServerError, match="gateway does not start: .*(?i:pem|certificate|broken)"):
        servers.ensure_gateway(Listen("127.0.0.1", house.port, tls="files", **broken))
    assert house.chat().headers["x-tuneserve-release"] == made
    assert (state.read(places).gateway, (places.conf / "gateway.json").read_bytes()) == before


def test_keep_starts_servers_without_a_gateway_and_tries_it_again(
    house: House, tmp_path: Path
) -> None:
    files = write_certificate(tmp_path, days=30)
    made = release(house.request(host="localhost", **files))["release"]
    release(house.request("b", name="other", host="localhost", **files))
    control.down("other")
    crash_everything(house)
    write_certificate(tmp_path, days=-1)  # it expired while the machine was off

    def healthy() -> bool:
        return bool(control.status()["names"]["default"]["health"] == "healthy")

    with kept():
        wait_for(healthy)
        assert control.status()["gateway"] == "stopped"
        with socket.create_server(("127.0.0.1", house.port)):  # and somebody has the port
            write_certificate(tmp_path, days=60)
            time.sleep(1)  # a few trials
            assert control.status()["gateway"] == "stopped"
        wait_for(lambda: served_certificate(house) == (tmp_path / "tls.crt").read_bytes())
        assert get_models(house).headers["x-tuneserve-release"] == made
        assert control.status()["names"]["other"]["state"] == "down"  # as its owner left it

        # A renewal while it serves is taken; half of one is not.
        good = (tmp_path / "tls.crt").read_bytes()
        write_certificate(tmp_path, days=90)
        renewed = (tmp_path / "tls.crt").read_bytes()
        assert renewed != good
        wait_for(lambda: served_certificate(house) == renewed)
        (tmp_path / "tls.crt").write_bytes(good)
        time.sleep(1)
        assert served_certificate(house) == renewed

        # What a killed run left at rest comes back without any command.
        with state.lock_name(layout(), "default", "training"):
            layout().name_link("default").unlink()
            keeper().stop(server_program(made))
        (tmp_path / "tls.crt").write_bytes(renewed)
        wait_for(lambda: keeper().members(server_program(made)))
        wait_for(lambda: layout().name_link("default").is_symlink())
        assert get_models(house).headers["x-tuneserve-release"] == made


@pytest.mark.full
def test_up_starts_servers_without_a_gateway_and_says_so(house: House, tmp_path: Path) -> None:
    files = write_certificate(tmp_path, days=30)
    made = release(house.request(host="localhost", **files))["release"]
    crash_everything(house)
    write_certificate(tmp_path, days=-1)
    with pytest.raises(RunFileError, match="certificate has expired"):
        control.up()
    assert keeper().members(server_program(made))
    write_certificate(tmp_path, days=30)
    assert control.up()["names"]["default"]["state"] == "serving"


@pytest.mark.parametrize("kind", [ServerError, pytest.param(OSError, marks=pytest.mark.full)])
def test_the_champion_comes_back_when_a_refused_candidate_cannot_be_ended(
    house: House, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str], Exception]
) -> None:
    made = release(house.request("a"))["release"]

    def fail(self: promote.Servers, release: str) -> None:
        raise kind("it hangs in the kernel")

    monkeypatch.setattr(promote.Servers, "discard", fail)
    with pytest.raises((GateRefused, OSError)) as caught:
        release(house.request("c", rollout="hold", behaviour={"never_stop": True}))
    assert isinstance(caught.value, GateRefused) == (kind is ServerError)
    assert house.chat().headers["x-tuneserve-release"] == made


def test_keep_ends_everything_though_supervisord_does_not_say_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))
    ended = []

    def asked(servers: promote.Servers) -> None:
        raise keep._Asked

    class Ending:
        supervisor: Ending

        def getAllProcessInfo(self) -> None:  # noqa: N802 - supervisor's name
            import xmlrpc.client

            raise xmlrpc.client.Fault(6, "SHUTDOWN_STATE")

    Ending.supervisor = Ending()
    layout().keeper_socket.touch()
    monkeypatch.setattr(supervisor.Keeper, "_rpc", lambda self: Ending())
    monkeypatch.setattr(keep, "_look_after", asked)
    monkeypatch.setattr(promote, "end_all", ended.append)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        keep.keep()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(ended) == 1
    with pytest.raises(ServerError, match="SHUTDOWN_STATE"):
        keeper().all()
