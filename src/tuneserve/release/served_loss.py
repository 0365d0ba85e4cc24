"""What a served model says about held-out rows, measured through its own HTTP API.

``/v1/completions`` takes a row's ids as the prompt; ``prompt_logprobs: 20`` returns, for every
position, the log-probabilities of the likeliest tokens and of the one that stands there. The mean
over supervised tokens is the same number that evaluation wrote for base, adapter and merged model.
"""

from __future__ import annotations

import http.client
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tuneserve.errors import ServerError
from tuneserve.lm.scores import TOP, TopScores, join_rows
from tuneserve.progress import Progress
from tuneserve.release.heldout import Row
from tuneserve.release.unixhttp import ask

_ROW_SECONDS = 300.0
_AT_ONCE = 4  # the server batches them


def served_scores(
    socket_path: Path,
    model: str,
    rows: Sequence[Row],
    *,
    alive: Callable[[], None] = lambda: None,
    what: str = "loss of the served model",
    at_once: int = _AT_ONCE,
) -> TopScores:
    """Score the supervised positions of `rows`.

    Args:
        socket_path: The server's socket.
        model: Its served name.
        rows: Held-out rows, each shorter than the server's longest prompt.
        alive: Called before each row; raises when the server has died.
        what: What progress lines call it.
        at_once: Requests under way at the same time.

    Raises:
        ServerError: The server refuses a row or gives a log-probability that is not finite.
    """
    nats, tokens, found = 0.0, 0, []
    with (
        Progress(what, total=len(rows), unit="row") as progress,
        ThreadPoolExecutor(at_once) as pool,
    ):
        for scores in pool.map(lambda row: _score(socket_path, model, row, alive), rows):
            found.append(scores)
            nats -= float(scores.actual.sum(dtype=np.float64))
            tokens += len(scores.tokens)
            progress.advance(1, f"{nats / max(tokens, 1):.3f} nats a token")
    if not tokens:
        raise ServerError("the held-out rows have no supervised token", hint="run validate again")
    return join_rows(found)


def _score(socket_path: Path, model: str, row: Row, alive: Callable[[], None]) -> TopScores:
    alive()
    body = {
        "model": model,
        "prompt": row.ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP,
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
    return row_scores(answer.json()["choices"][0]["prompt_logprobs"], row)


def row_scores(prompt_logprobs: list[dict[str, Any] | None], row: Row) -> TopScores:
    """The scores at a row's supervised positions, from a server's answer.

    Raises:
        ServerError: A position is missing or not finite.
    """
    positions = row.supervised
    tokens = np.array([row.labels[position] for position in positions], np.int32)
    actual = np.zeros(len(positions), np.float32)
    ids = np.full((len(positions), TOP), -1, np.int32)
    logprobs = np.full((len(positions), TOP), -np.inf, np.float32)
    for at, position in enumerate(positions):
        entry = (prompt_logprobs[position] or {}) if position < len(prompt_logprobs) else {}
        found = entry.get(str(row.labels[position]))
        if found is None or not math.isfinite(found["logprob"]):
            raise ServerError(
                f"{row.source}: the served model gives {found} for token {row.labels[position]} "
                f"at {position}",
                expected="a finite log-probability",
                hint="the export overflows: try another quantize method",
            )
        actual[at] = found["logprob"]
        # The token that stands there comes as well when it is not among the likeliest.
        ranked = sorted(entry.items(), key=lambda pair: pair[1].get("rank") or TOP + 1)
        for place, (token, score) in enumerate(ranked[:TOP]):
            if (score.get("rank") or 1) <= TOP:
                ids[at, place], logprobs[at, place] = int(token), score["logprob"]
    return TopScores(np.array([0, len(positions)], np.int64), tokens, actual, ids, logprobs)
