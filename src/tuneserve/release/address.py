"""Where the gateway listens, with which certificate, and who else listens there."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tuneserve.errors import PortTaken, RunFileError

_PROBE_SECONDS = 2.0
_HTTP_PORT = 80


@dataclass(frozen=True)
class Listen:
    """Where the gateway listens, and how.

    Attributes:
        host: An address, or a host name of this machine.
        port: Its port.
        hold_seconds: How long a request is held while no server answers.
        needs_key: Whether requests must carry an API key.
        tls: Where the certificate for `host` comes from: ``public`` (an authority that everybody
            trusts, asked by Caddy), ``internal`` (Caddy's own), ``files``; empty: plain HTTP.
        certificate: PEM file of the certificate, for ``files``.
        key: PEM file of its private key, for ``files``.
        certificate_sha256: Of the certificate file, so that a renewed one is noticed.
    """

    host: str
    port: int
    hold_seconds: int = 300
    needs_key: bool = False
    tls: str = ""
    certificate: str = ""
    key: str = ""
    certificate_sha256: str = ""

    @property
    def base_url(self) -> str:
        """How clients on this machine reach it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"{'https' if self.tls else 'http'}://{_bracketed(host)}:{self.port}"

    @property
    def bind_host(self) -> str:
        """The address to bind; empty for all of them. A name with TLS is reached from anywhere."""
        by_name = self.tls and not _is_address(self.host) and not is_loopback(self.host)
        return "" if by_name else self.host

    @property
    def bind_address(self) -> str:
        """The same with the port, as Caddy takes it."""
        return f"{_bracketed(self.bind_host)}:{self.port}"

    @property
    def ports(self) -> tuple[int, ...]:
        """What is bound: a public authority asks at the port of plain HTTP, which leads to HTTPS
        otherwise."""
        also = self.tls == "public" and self.port != _HTTP_PORT
        return (self.port, _HTTP_PORT) if also else (self.port,)

    @property
    def described(self) -> str:
        """Address and certificate, for messages."""
        kind = {
            "public": " (a public authority's certificate)",
            "internal": " (a certificate of the gateway's own authority)",
            "files": f" (certificate {self.certificate}, key {self.key})",
        }.get(self.tls, "")
        return f"{'https' if self.tls else 'http'}://{_bracketed(self.host)}:{self.port}{kind}"

    def reached_like(self, other: Listen) -> bool:
        """Whether clients reach both in the same way; a renewed certificate is no difference."""
        mine, theirs = (
            (listen.host, listen.port, listen.tls, listen.certificate, listen.key)
            for listen in (self, other)
        )
        return mine == theirs

    def is_renewed(self) -> bool:
        """Whether the certificate file is no longer the one that the gateway read."""
        if self.tls != "files":
            return False
        with contextlib.suppress(OSError):
            return _digest(self.certificate) != self.certificate_sha256
        return True

    def as_files_are(self) -> Listen:
        """The same with the certificate file as it is now; it may have been renewed.

        Raises:
            RunFileError: The file is no longer one that clients would take.
        """
        if self.tls != "files":
            return self
        return _with_files(self, self.certificate, self.key)

    def to_json(self) -> dict[str, Any]:
        """As the state file keeps it."""
        return asdict(self)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_public_name(host: str) -> bool:
    """Whether a public authority could know `host`."""
    return not _is_address(host) and "." in host and not host.endswith((".local", ".internal"))


def listen_for(
    host: str,
    port: int,
    keys: Mapping[str, str],
    *,
    hold_seconds: int,
    tls: Literal["auto", "internal"] = "auto",
    certificate: str | None = None,
    key: str | None = None,
) -> Listen:
    """Decide how to listen.

    Args:
        host: An address or a host name of this machine.
        port: The port.
        keys: API keys by name.
        hold_seconds: How long a request is held while no server answers.
        tls: ``auto``: HTTPS when `host` is a public name; ``internal``: always.
        certificate: PEM file of a certificate for `host`; over `tls`.
        key: PEM file of its key.

    Raises:
        RunFileError: Others could reach the address and there is no key; the certificate does not
            fit.
    """
    if not is_loopback(host) and not keys:
        raise RunFileError(
            f"serve.host is {host}, which other machines can reach, and there is no API key",
            expected="a key for any address but loopback",
            hint="set serve.api_key_env to the name of an environment variable that holds a key, "
            "or serve.host to 127.0.0.1",
        )
    if certificate and key:
        return _with_files(Listen(host, port, hold_seconds, bool(keys)), certificate, key)
    if tls == "internal" and host in ("0.0.0.0", "::"):
        raise RunFileError(
            f"serve.tls is internal and serve.host {host}, which no certificate can name",
            expected="the name or address that clients will use",
            hint="set serve.host to it",
        )
    kind = "internal" if tls == "internal" else "public" if _is_public_name(host) else ""
    return Listen(host, port, hold_seconds, bool(keys), kind)


def _with_files(listen: Listen, certificate: str, key: str) -> Listen:
    check_certificate(listen.host, certificate, key)
    digest = _digest(certificate)
    return replace(listen, tls="files", certificate=certificate, key=key, certificate_sha256=digest)


def _digest(certificate: str) -> str:
    return hashlib.sha256(Path(certificate).read_bytes()).hexdigest()


def check_certificate(host: str, certificate: str, key: str) -> None:
    """Refuse a certificate that clients of `host` would refuse, by a handshake in memory.

    Who signed it is not looked at: that is for the clients to say.

    Raises:
        RunFileError: It cannot be read, does not fit its key, is not for `host`, or has expired.
    """
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_side.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        server_side.load_cert_chain(certificate, key, password=_no_password)
        client_side.load_verify_locations(certificate)
        _shake_hands(server_side, client_side, host)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "verify_message", "") or str(error)
        raise RunFileError(
            f"serve.tls_certificate {certificate} with {key}: {why}",
            expected=f"a certificate for {host} that has not expired, and its key without a "
            "password, both in PEM form",
            hint="mend the files, or set serve.tls: internal",
        ) from error


def _no_password() -> str:
    raise ValueError("the key is protected by a password")


def _shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext, host: str) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    left = [client, server]
    while left:
        for side in list(left):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                left.remove(side)


def check_port(listen: Listen, *, but: Collection[int] = ()) -> None:
    """Bind the address once, before anything expensive is done.

    Args:
        listen: What is to be bound.
        but: Ports that our own gateway has bound already.

    Raises:
        PortTaken: Somebody listens there; says who, where that can be seen.
        RunFileError: The address is not one of this machine.
    """
    for port in listen.ports:
        if port not in but:
            _bind_once(listen, port)


def _bind_once(listen: Listen, port: int) -> None:
    host = listen.bind_host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (98, 13):  # EADDRINUSE, EACCES
                who = f" by {holder}" if (holder := port_holder(port)) else ""
                taken = error.errno == 98
                what = f"is taken{who}" if taken else "needs more rights than ours"
                serves = port == listen.port
                other = "end that process, or set serve.port to another port"
                raise PortTaken(
                    f"{listen.host}:{port} {what}",
                    expected="a free port for the gateway"
                    if serves
                    else f"port {port} for the gateway too: a public authority asks there",
                    hint=(other if taken else "set serve.port to 1024 or more")
                    if serves
                    else f"free port {port}, or use serve.tls: internal or certificate files",
                ) from error
            raise RunFileError(
                f"serve.host {listen.host}: {error.strerror}",
                expected="an address of this machine",
                hint="use 127.0.0.1, or 0.0.0.0 with a key",
            ) from error


def port_holder(port: int) -> str:
    """Who listens on a TCP port, as ``process 12 (python)``; empty when that cannot be seen
    (proc(5))."""
    if port not in (listening := _listening()).values():
        return ""
    for entry in Path("/proc").iterdir():
        if not re.fullmatch(r"\d+", entry.name):
            continue
        try:
            if any(listening.get(os.readlink(link)) == port for link in (entry / "fd").iterdir()):
                name = (entry / "comm").read_text("utf-8", "replace").strip()
                return f"process {entry.name} ({name})"
        except OSError:
            continue
    return ""


def ports_of(pids: Iterable[int]) -> frozenset[int] | None:
    """The TCP ports that these processes listen on (proc(5)).

    None: what one of them has open cannot be seen from here, as that of a process with capabilities
    which we have not (ptrace(2)), such as a service manager gives for ports below 1024.
    """
    listening, found = _listening(), set()
    for pid in pids:
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was just closed
                    found.add(listening.get(os.readlink(link), 0))
        except PermissionError:
            return None
        except OSError:  # it has just ended
            continue
    return frozenset(found - {0})


def _listening() -> dict[str, int]:
    """Ports of all listening TCP sockets, by what a descriptor of one is a link to."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A":
                found[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    return found


def answers(listen: Listen) -> bool:
    """Whether a gateway answers: a path that it knows nothing of must give its own 404.

    The gateway of another run root answers alike: `ports_of` says whose it is.
    """
    here = listen.base_url.partition("://")[2].rpartition(":")[0].strip("[]")
    if listen.bind_host == "":  # its name may lead elsewhere from here
        here = "127.0.0.1"
    try:
        with socket.create_connection((here, listen.port), timeout=_PROBE_SECONDS) as connection:
            if listen.tls == "public":  # the certificate may take a while
                return True
            if not listen.tls:
                return _is_ours(connection, listen.host)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(connection, server_hostname=listen.host) as inside:
                return _is_ours(inside, listen.host)
    except OSError:
        return False


def _is_ours(connection: socket.socket, host: str) -> bool:
    connection.sendall(f"GET / HTTP/1.0\r\nHost: {host or 'localhost'}\r\n\r\n".encode())
    with connection.makefile("rb") as stream:
        return b"gateway_error" in stream.read()
