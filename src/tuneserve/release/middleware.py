"""ASGI middleware inside the model server: which release answers, and how much it has to do.

Only the process that answers can know its release for sure, so the header is set here and not at
the gateway. Loaded by vLLM through ``--middleware``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tuneserve.release.unixhttp import LOAD_HEADER, RELEASE_HEADER

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any
]
RELEASE_VARIABLE = "TUNESERVE_RELEASE"


class ReleaseHeader:
    """Adds the release id to every answer and counts requests from their first byte to their
    last."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.running = 0
        self.total = 0
        self._release = (
            RELEASE_HEADER.lower().encode(),
            os.environ.get(RELEASE_VARIABLE, "unknown").encode(),
        )

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        health = scope["path"] == "/health"

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), self._release]
                if health:
                    load = f"{self.running},{self.total}".encode()
                    headers.append((LOAD_HEADER.lower().encode(), load))
                message["headers"] = headers
            await send(message)

        if health:  # our own checks are no load
            await self.app(scope, receive, send_marked)
            return
        self.running += 1
        self.total += 1
        try:
            await self.app(scope, receive, send_marked)
        finally:
            self.running -= 1
