"""HTTP to a server on a unix socket, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RELEASE_HEADER = "X-Tuneserve-Release"
LOAD_HEADER = "X-Tuneserve-Load"  # "requests running now,requests since the start", on /health only


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read whole; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    def json(self) -> Any:
        """The body as JSON; raises ValueError when it is none."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:500].decode("utf-8", "replace").strip()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, url: str, body: Any = None, *, timeout_seconds: float) -> Answer:
    """One request on a new connection.

    Raises:
        OSError: Nobody listens, or no byte came within `timeout_seconds`.
        http.client.HTTPException: The server broke the connection or does not speak HTTP.
    """
    connection = _UnixConnection(path, timeout_seconds)
    try:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Connection": "close"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, url, body=data, headers=headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()


def listens(path: Path) -> bool:
    """Whether a server takes connections there. One that loads, or has died, does not; one that is
    too busy to answer does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (BlockingIOError, TimeoutError):  # those before us fill its queue
            return True
        except OSError:
            return False
    return True


def load_of(answer: Answer) -> tuple[int, int] | None:
    """Requests running and requests since the start, as the release's middleware tells on
    /health."""
    running, _, total = answer.headers.get(LOAD_HEADER.lower(), "").partition(",")
    return (int(running), int(total)) if running.isdigit() and total.isdigit() else None
