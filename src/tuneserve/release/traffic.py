"""Requests per second by served name, from the tail of the gateway's access log."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path

_WINDOW_SECONDS = 60.0
_TAIL_BYTES = 2**20
_NAMED = re.compile(r"/([a-z0-9][a-z0-9-]{0,31})/v1(?:/|\?|$)")


def recent(path: Path, default: str, *, now: float | None = None) -> dict[str, float]:
    """Mean requests per second of each name over the last minute, or over as much of it as the
    last MiB of the log tells of.

    Args:
        path: Caddy's JSON access log. Older ones lie beside it, ``access-TIME.log``.
        default: The name that answers at /v1.
        now: Seconds since the epoch; None: the clock's.
    """
    now = time.time() if now is None else now
    try:
        with path.open("rb") as stream:
            begin = max(0, path.stat().st_size - _TAIL_BYTES)
            stream.seek(begin)
            lines = stream.read().splitlines()
    except OSError:
        return {}
    counts: Counter[str] = Counter()
    since = None
    for line in lines:
        try:
            entry = json.loads(line)
            uri, at = str(entry["request"]["uri"]), float(entry["ts"])
        except (ValueError, KeyError, TypeError):
            continue  # the first line may be cut
        since = at if since is None else since
        if now - at > _WINDOW_SECONDS:
            continue
        if uri.startswith("/v1"):
            counts[default] += 1
        elif match := _NAMED.match(uri):
            counts[match.group(1)] += 1
    covered = _WINDOW_SECONDS
    if since is not None and (begin or any(path.parent.glob(f"{path.stem}-*"))):
        covered = min(_WINDOW_SECONDS, max(1.0, now - since))  # what was before is not read
    return {name: round(count / covered, 2) for name, count in counts.items()}
