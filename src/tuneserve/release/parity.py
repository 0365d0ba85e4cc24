"""Serve parity: the server turns a chat into the very token ids that were trained on."""

from __future__ import annotations

import http.client
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.errors import GateRefused, ServerError
from tuneserve.release.heldout import Row
from tuneserve.release.unixhttp import ask

log = logging.getLogger(__name__)

_TOKENIZE_SECONDS = 60.0


@dataclass
class Parity:
    """What was compared: whole rows, and rows of which only the prompt can be compared."""

    chats: int = 0
    whole: int = 0
    prompts_only: int = 0
    truncated: int = 0
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For reports."""
        return dict(vars(self))


class ParityRefused(GateRefused):
    """The server would not see what the model was trained on."""


def check_parity(socket_path: Path, model: str, rows: list[Row]) -> Parity:
    """Compare the ids of every chat.

    For each chat, what the server feeds the model (everything before the last answer, with the
    generation prompt) must equal the trained ids up to where the last answer's supervision
    begins. The whole chat must equal the whole row as well; it may be longer where the row was
    cut at the end. Rows whose history a template rewrites (one row per assistant turn) are
    rendered for generation, so only the prompt counts; a row without an earlier answer has no
    history to rewrite.

    Raises:
        ParityRefused: Ids differ; says in which chat and at which index.
        ServerError: The server cannot tokenize a chat.
    """
    found = Parity()
    for row in rows:
        found.chats += 1
        whole = tokenize(socket_path, model, row.messages, row.tools, generate=False)
        if whole == row.ids:
            found.whole += 1
        elif len(row.ids) < len(whole) and whole[: len(row.ids)] == row.ids:
            found.truncated += 1
            continue  # the last answer's own prompt may lie behind the cut
        if row.messages[-1]["role"] != "assistant":
            continue
        prompt = tokenize(socket_path, model, row.messages[:-1], row.tools, generate=True)
        _compare_prompt(row, prompt, whole, found)
    log.info(
        "parity: %d chats give exactly the trained ids (%d whole, %d by prompt, %d cut)",
        found.chats,
        found.whole,
        found.prompts_only,
        found.truncated,
    )
    return found


def _compare_prompt(row: Row, prompt: list[int], whole: list[int], found: Parity) -> None:
    same = _common_prefix(prompt, row.ids)
    if same < len(prompt):
        # The generation prompt may hold more than the turn's own header (an empty thinking block).
        if whole == row.ids and same >= row.answer_start:
            found.notes.append(f"{row.source}: the generation prompt adds {len(prompt) - same} ids")
            return
        raise ParityRefused(
            f"{row.source}: the server's prompt differs from the trained ids at index {same}: "
            f"{_window(prompt, same)} served, {_window(row.ids, same)} trained",
            expected="the trained ids exactly",
            hint="the chat template or tokenizer of the served model is not the one of the "
            "training",
            details={"source": row.source, "index": same},
        )
    if row.answer_start != len(prompt):
        raise ParityRefused(
            f"{row.source}: the server begins to write at index {len(prompt)}, and training "
            "supervised from "
            f"index {row.answer_start} on",
            expected="the same index",
            hint="the labels do not cover the answer exactly: run validate again",
            details={"source": row.source, "index": len(prompt)},
        )
    if whole == row.ids:
        return
    earlier = any(message["role"] == "assistant" for message in row.messages[:-1])
    if earlier and row.labels[: len(prompt)].count(-100) == len(prompt):
        found.prompts_only += 1  # one row per assistant turn: earlier turns are not supervised
        return
    at = _common_prefix(whole, row.ids)
    raise ParityRefused(
        f"{row.source}: the chat's ids differ from the trained ids at index {at}: "
        f"{_window(whole, at)} served, {_window(row.ids, at)} trained",
        expected="the trained ids exactly, stop token included",
        hint="the chat template or tokenizer of the served model is not the one of the training",
        details={"source": row.source, "index": at},
    )


def tokenize(
    socket_path: Path,
    model: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    generate: bool,
) -> list[int]:
    """Ids that the server makes of a chat.

    Raises:
        ServerError: It refuses or does not answer.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "add_generation_prompt": generate,
    }
    if tools:
        body["tools"] = tools
    try:
        answer = ask(socket_path, "POST", "/tokenize", body, timeout_seconds=_TOKENIZE_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(
            f"the server does not answer /tokenize ({error})", hint="see its log: `tuneserve logs`"
        ) from error
    if answer.status != 200:
        raise ServerError(
            f"the server refuses to tokenize a held-out chat: HTTP {answer.status} {answer.text}",
            hint="the served chat template does not take this chat",
        )
    return list(answer.json()["tokens"])


def _common_prefix(left: list[int], right: list[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _window(ids: list[int], index: int) -> str:
    shown = ids[max(0, index - 1) : index + 4]
    return f"...{shown}" if shown else "nothing"
