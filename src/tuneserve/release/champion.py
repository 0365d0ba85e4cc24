"""The loss of what serves now on the held-out conversations, whatever its tokenizer.

Measured before the candidate boots, through the champion's own API, and kept on disk. Tokens of two
models cannot be compared, bytes of the answers can: every conversation counts with the nats of its
last answer, end token included.
"""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import ModelError, ServerError
from tuneserve.release.heldout import IGNORED, Row
from tuneserve.release.model_files import read_model
from tuneserve.release.parity import tokenize
from tuneserve.release.served_loss import served_scores
from tuneserve.release.unixhttp import ask

log = logging.getLogger(__name__)

# It serves requests meanwhile.
_AT_ONCE = 1
_MODELS_SECONDS = 30.0


@dataclass(frozen=True)
class ChampionScores:
    """Nats of each row's last answer; None where the champion could not be asked."""

    release: str
    nats: list[float | None]

    def save(self, path: Path) -> None:
        """Write as JSON."""
        write_json_atomic(path, {"release": self.release, "nats": self.nats})


def last_answer(row: Row) -> Row:
    """The row with only its last answer supervised."""
    start = row.answer_start
    return replace(row, labels=[IGNORED] * start + row.labels[start:])


def answer_bytes(row: Row) -> int:
    """UTF-8 bytes of the last answer: its text, and its tool calls as JSON."""
    message = row.messages[-1]
    text = str(message.get("content") or "")
    calls = message.get("tool_calls")
    return len((text + (json.dumps(calls, ensure_ascii=False) if calls else "")).encode())


def measure_champion(
    socket_path: Path, model: str, release: str, rows: Sequence[Row], stop_ids: Sequence[int]
) -> ChampionScores:
    """Score the champion on the last answers of `rows`; what it cannot take is left out.

    Args:
        socket_path: The champion's socket.
        model: Its served name.
        release: Its release id.
        rows: Held-out rows.
        stop_ids: Ids that end its answers.
    """
    longest = _longest(socket_path, model)
    asked: list[Row] = []
    places: list[int] = []
    for at, row in enumerate(rows):
        if row.messages[-1]["role"] != "assistant" or not row.supervised:
            continue
        try:
            own = _in_its_words(socket_path, model, row, stop_ids)
        except ServerError as error:
            log.info("the champion cannot render %s: %s", row.source, error.message)
            continue
        if own.supervised and len(own.ids) < longest:
            asked.append(own)
            places.append(at)
    nats: list[float | None] = [None] * len(rows)
    if asked:
        scores = served_scores(
            socket_path, model, asked, what="loss of the champion", at_once=_AT_ONCE
        )
        for at, value in zip(places, scores.nats(), strict=True):
            nats[at] = float(value)
    return ChampionScores(release, nats)


def safely_measure(
    socket_path: Path, model: str, release: str, rows: Sequence[Row], folder: Path
) -> tuple[ChampionScores | None, str]:
    """As `measure_champion`; why it could not be measured is for a gate to say.

    Args:
        folder: The champion's model, which says what ends its answers.
        socket_path, model, release, rows: See `measure_champion`.

    Returns:
        The scores, or None and why not.
    """
    try:
        stops = read_model(folder, trust_remote_code=True).stop_ids
        found = measure_champion(socket_path, model, release, rows, stops)
    except (ModelError, ServerError, OSError, ValueError, http.client.HTTPException) as error:
        return None, f"{release} could not be measured ({error})"
    if not any(value is not None for value in found.nats):
        return None, f"{release} could not take a single held-out conversation"
    return found, ""


def _longest(socket_path: Path, model: str) -> int:
    """Tokens that the champion takes; a large number when it does not say."""
    answer = ask(socket_path, "GET", "/v1/models", timeout_seconds=_MODELS_SECONDS)
    known = {entry["id"]: entry for entry in answer.json().get("data", [])}
    return int(known.get(model, {}).get("max_model_len") or 1 << 30)


def _in_its_words(socket_path: Path, model: str, row: Row, stop_ids: Sequence[int]) -> Row:
    """The conversation as the champion's template and tokenizer have it, last answer supervised."""
    prompt = tokenize(socket_path, model, row.messages[:-1], row.tools, generate=True)
    ours = last_answer(row)
    if prompt == row.ids[: row.answer_start]:
        return ours
    whole = tokenize(socket_path, model, row.messages, row.tools, generate=False)
    if whole[: len(prompt)] != prompt:
        raise ServerError(f"its prompt for {row.source} is no beginning of the whole chat")
    end = len(whole)
    while end > len(prompt) and whole[end - 1] not in stop_ids:
        end -= 1
    end = end if end > len(prompt) else len(whole)
    labels = [IGNORED] * len(prompt) + whole[len(prompt) : end] + [IGNORED] * (len(whole) - end)
    return replace(row, ids=whole, labels=labels)


def paired(
    rows: Sequence[Row], served: np.ndarray[Any, Any], champion: ChampionScores
) -> tuple[list[str], np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Sources, answer bytes and nats of both, of the rows that both could be asked.

    Args:
        rows: Held-out rows.
        served: The candidate's nats of each row's last answer.
        champion: The champion's, of the same rows.
    """
    kept = [
        at
        for at, value in enumerate(champion.nats[: len(rows)])
        if value is not None and answer_bytes(rows[at])
    ]
    theirs = np.array([champion.nats[at] for at in kept], np.float64)
    sizes = np.array([answer_bytes(rows[at]) for at in kept], np.float64)
    return [rows[at].source for at in kept], sizes, {"served": served[kept], "champion": theirs}
