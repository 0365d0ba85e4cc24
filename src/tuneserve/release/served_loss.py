"""Held-out loss of a served model, measured through its own HTTP API.

``/v1/completions`` takes the row's ids as the prompt; ``prompt_logprobs: 1`` returns, for every
position, the log-probability of the token that stands there (and of the likeliest one). The mean
over supervised tokens is the same number that evaluation wrote for base, adapter and merged model.
"""

from __future__ import annotations

import http.client
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneserve.errors import ServerError
from tuneserve.progress import Progress
from tuneserve.release.heldout import Row
from tuneserve.release.unixhttp import ask

_ROW_SECONDS = 300.0
_AT_ONCE = 4  # the server batches them


@dataclass(frozen=True)
class ServedLoss:
    """The loss of the rows measured.

    Attributes:
        mean: Nats per supervised token.
        tokens: Supervised tokens.
        agreement: Share of supervised tokens that were the served model's first choice.
        per_row: ``(source, sum of nats, supervised tokens)`` in the rows' order.
    """

    mean: float
    tokens: int
    agreement: float
    per_row: list[tuple[str, float, int]]


def served_loss(
    socket_path: Path,
    model: str,
    rows: list[Row],
    *,
    alive: Callable[[], None] = lambda: None,
    what: str = "loss of the served model",
) -> ServedLoss:
    """Measure the loss of `rows`.

    Args:
        socket_path: The server's socket.
        model: Its served name.
        rows: Held-out rows, each shorter than the server's longest prompt.
        alive: Called before each row; raises when the server has died.
        what: What progress lines call it.

    Raises:
        ServerError: The server refuses a row or gives a log-probability that is not finite.
    """
    nats, tokens, first = 0.0, 0, 0
    per_row = []
    with (
        Progress(what, total=len(rows), unit="row") as progress,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        for row, (total, count, top) in zip(
            rows, pool.map(lambda row: _row_loss(socket_path, model, row, alive), rows), strict=True
        ):
            nats, tokens, first = nats + total, tokens + count, first + top
            per_row.append((row.source, total, count))
            progress.advance(1, f"{nats / max(tokens, 1):.3f} nats a token")
    if not tokens:
        raise ServerError("the held-out rows have no supervised token", hint="run validate again")
    return ServedLoss(nats / tokens, tokens, first / tokens, per_row)


def _row_loss(
    socket_path: Path, model: str, row: Row, alive: Callable[[], None]
) -> tuple[float, int, int]:
    alive()
    body = {
        "model": model,
        "prompt": row.ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 1,
    }
    try:
        answer = ask(socket_path, "POST", "/v1/completions", body, timeout_seconds=_ROW_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        alive()
        raise ServerError(
            f"the server does not answer for {row.source} ({error})", hint="see `tuneserve logs`"
        ) from error
    if answer.status != 200:
        raise ServerError(
            f"the server refuses {row.source} ({len(row.ids)} tokens): HTTP {answer.status} "
            f"{answer.text}",
            hint="raise serve.max_model_len above data.max_length",
        )
    return row_nats(answer.json()["choices"][0]["prompt_logprobs"], row)


def row_nats(prompt_logprobs: list[dict[str, Any] | None], row: Row) -> tuple[float, int, int]:
    """Sum of nats, number, and number of first choices over a row's supervised tokens.

    Raises:
        ServerError: A position is missing or not finite.
    """
    total, first = 0.0, 0
    for position in row.supervised:
        entry = (prompt_logprobs[position] or {}) if position < len(prompt_logprobs) else {}
        found = entry.get(str(row.labels[position]))
        if found is None or not math.isfinite(found["logprob"]):
            raise ServerError(
                f"{row.source}: the served model gives {found} for token {row.labels[position]} "
                f"at {position}",
                expected="a finite log-probability",
                hint="the export overflows: try another quantize method",
            )
        total -= found["logprob"]
        first += found.get("rank") == 1
    return total, len(row.supervised), first
