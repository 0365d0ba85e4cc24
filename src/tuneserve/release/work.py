"""What a server has done so far: one that owes us an answer is busy with others, or hangs."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass
from pathlib import Path

from tuneserve.release.unixhttp import Answer, ask, load_of

_TIMEOUT_SECONDS = 10.0
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Work:
    """Counted since the server's start; None: it does not say.

    Attributes:
        tokens: Read and written, by vLLM's /metrics. They stand still when the engine hangs.
        ended: Requests that ended, by the middleware. Clients that give up count as well, so this
            decides only where there are no tokens.
    """

    tokens: float | None
    ended: int | None

    def goes_on_in(self, later: Work) -> bool:
        """Whether something was done between this and a later look."""
        if self.tokens is not None and later.tokens is not None:
            return later.tokens > self.tokens
        return self.ended is not None and later.ended is not None and later.ended > self.ended


def work_of(socket_path: Path) -> Work:
    """What a server has done so far, as far as it answers."""
    metrics, health = _get(socket_path, "/metrics"), _get(socket_path, "/health")
    counters = _TOKENS.findall(metrics.body.decode("utf-8", "replace")) if metrics else []
    load = load_of(health) if health else None
    return Work(
        sum(map(float, counters)) if counters else None, load[1] - load[0] if load else None
    )


def _get(socket_path: Path, url: str) -> Answer | None:
    try:
        return ask(socket_path, "GET", url, timeout_seconds=_TIMEOUT_SECONDS)
    except (OSError, http.client.HTTPException):
        return None
