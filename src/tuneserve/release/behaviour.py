"""How a candidate answers: does it end, does it loop, is it text, does it parse, what you expect.

Prompts are the trained ids themselves, so nothing but the model is asked. The judging is pure.
"""

from __future__ import annotations

import http.client
import re
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneserve.errors import ServerError
from tuneserve.lm.callforms import Tools
from tuneserve.lm.structured import Kind, parses
from tuneserve.progress import Progress
from tuneserve.release.answer_room import CUTS_ANSWERS, AnswerRoom
from tuneserve.release.decisions import Gate, rounded_down, rounded_up
from tuneserve.release.unixhttp import ask
from tuneserve.thresholds import CanarySection, GatesSection

_ANSWER_SECONDS = 300.0
_AT_ONCE = 4
# One token so often in a row, or a phrase so often until the end, and an answer counts as looping.
_SAME_TOKEN = 16
_PHRASE_TOKENS, _PHRASE_TIMES = 16, 6
# Share of characters that no text has: broken bytes, control characters, private codes.
_BROKEN_SHARE = 0.1


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        text: What it says.
        ended: Whether a stop token ended it, and not the limit.
        tokens: Its tokens, each as a text of its own.
        logprobs: Log-probability of each.
    """

    text: str
    ended: bool
    tokens: Sequence[str] = ()
    logprobs: Sequence[float] = ()

    @property
    def nats(self) -> float:
        """Mean nats per token, by the model that gave it; 0 for an empty answer."""
        known = [x for x in self.logprobs if x is not None]
        return -sum(known) / len(known) if known else 0.0


@dataclass(frozen=True)
class StructuredRow:
    """A held-out row whose answer is JSON or a tool call, and how the merged model did."""

    source: str
    row: int
    kind: Kind
    prompt: list[int]
    max_tokens: int
    merged: str
    merged_parses: bool
    tools: Tools | None = None


def loops(answer: Answer) -> bool:
    """Whether the answer repeats one token, or one phrase until its end."""
    tokens = list(answer.tokens)
    run = 1
    for before, token in zip(tokens, tokens[1:], strict=False):
        run = run + 1 if token == before else 1
        if run >= _SAME_TOKEN:
            return True
    if answer.ended:
        return False
    for period in range(2, _PHRASE_TOKENS + 1):
        end = tokens[-period * _PHRASE_TIMES :]
        if len(end) == period * _PHRASE_TIMES and all(
            token == end[at % period] for at, token in enumerate(end)
        ):
            return True
    return False


def gibberish(answer: Answer, max_nats: float) -> bool:
    """Whether there is no text, a broken one, or the model is unsure of every word it says."""
    if not answer.text.strip():
        return True
    text = answer.text if answer.ended else answer.text.rstrip("\ufffd")
    broken = sum(
        char == "\ufffd"
        or (unicodedata.category(char) in ("Cc", "Co", "Cn") and char not in "\n\r\t")
        for char in text
    )
    return broken > _BROKEN_SHARE * max(len(text), 1) or answer.nats > max_nats


def judge_answers(
    config: GatesSection, answers: Sequence[Answer], room: AnswerRoom | None = None
) -> list[Gate]:
    """The gates on free answers; none without answers.

    Args:
        config: Thresholds.
        answers: What was answered.
        room: What was asked for; says which setting left an answer too little.
    """
    if not answers:
        return []
    count = len(answers)
    ended = sum(answer.ended for answer in answers)
    looping = [answer for answer in answers if loops(answer)]
    broken = [answer for answer in answers if gibberish(answer, config.max_answer_nats)]
    last = next((a for a in answers if not a.ended), None)
    return [
        _share_gate(
            "answers end",
            ended / count >= config.min_ended,
            f"{ended} of {count} greedy answers end with a stop token"
            + (f"; one that does not: {_short(last)}" if last else "")
            + (f"; {room.cut}" if room and room.cut and last else ""),
            f"at least {config.min_ended:.0%}",
            f"gates.min_ended: {rounded_down(ended / count)}"
            + (f", or perhaps {room.setting}" if room and room.setting else ""),
        ),
        _share_gate(
            "no loops",
            len(looping) / count <= config.max_looping,
            f"{len(looping)} of {count} greedy answers repeat themselves to the end"
            + (f": {_short(looping[0])}" if looping else ""),
            f"at most {config.max_looping:.0%}",
            f"gates.max_looping: {rounded_up(len(looping) / count)}",
        ),
        _share_gate(
            "no gibberish",
            len(broken) / count <= config.max_gibberish,
            f"{len(broken)} of {count} greedy answers are no text, or guesses "
            f"(worst {max(answer.nats for answer in answers):.2f} nats a token)"
            + (f": {_short(broken[0])}" if broken else ""),
            f"at most {config.max_gibberish:.0%}, a guess is above {config.max_answer_nats:g} nats",
            f"gates.max_gibberish: {rounded_up(len(broken) / count)}",
        ),
    ]


def judge_structured(
    config: GatesSection, rows: Sequence[StructuredRow], answers: Sequence[Answer]
) -> Gate | None:
    """Whether JSON and tool calls parse as often as the merged model's; None without such rows."""
    if not rows:
        return None
    served = [parses(a.text, row.kind, row.tools) for row, a in zip(rows, answers, strict=True)]
    before, after = sum(row.merged_parses for row in rows), sum(served)
    broke = [
        (row, answer)
        for row, answer, good in zip(rows, answers, served, strict=True)
        if row.merged_parses and not good
    ]
    lost = (before - after) / len(rows)
    return _share_gate(
        "structured answers parse",
        lost <= config.max_parse_loss,
        f"{after} of {len(rows)} parse, {before} with the merged model"
        + (f"; {broke[0][0].source}: {_short(broke[0][1])}" if broke else ""),
        "at least as many as with the merged model"
        + (f", less {config.max_parse_loss:.0%}" if config.max_parse_loss else ""),
        f"gates.max_parse_loss: {rounded_up(lost)}",
    )


def judge_canary(canary: CanarySection, answer: Answer, asked: int | None = None) -> Gate:
    """Whether the answer to a known prompt is what was expected.

    Args:
        canary: What is expected.
        answer: What was said.
        asked: Longest answer that the server gave room for, where that is less than the canary's.
    """
    text = answer.text
    wrong = [f"lacks {part!r}" for part in canary.contains if part not in text]
    wrong += [f"does not match {p!r}" for p in canary.matches if not re.search(p, text)]
    wrong += [f"holds {part!r}" for part in canary.lacks if part in text]
    wanted = [f"contains {part!r}" for part in canary.contains]
    wanted += [f"matches {p!r}" for p in canary.matches]
    wanted += [f"lacks {part!r}" for part in canary.lacks]
    said = f"{text[:120]!r}" + (f": {', '.join(wrong)}" if wrong else "")
    if wrong and not answer.ended:
        said += f"; it was cut after {asked or canary.max_tokens} tokens"
        said += f", by {CUTS_ANSWERS} or the served length" if asked else " (its max_tokens)"
    return _share_gate(f"canary {canary.label!r}", not wrong, said, ", ".join(wanted), "")


def ask_ids(
    socket_path: Path,
    model: str,
    prompts: Sequence[tuple[list[int], int]],
    *,
    alive: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Greedy answers to prompts of ids, each with its longest answer in tokens.

    Raises:
        ServerError: The server does not answer or refuses.
    """

    def one(prompt: tuple[list[int], int]) -> Answer:
        alive()
        body = {
            "model": model,
            "prompt": prompt[0],
            "max_tokens": prompt[1],
            "temperature": 0,
            "logprobs": 0,
            "skip_special_tokens": False,
            # Several tokens that are each a part of a character are alike as text.
            "return_tokens_as_token_ids": True,
        }
        choice = _post(socket_path, "/v1/completions", body, alive)["choices"][0]
        found = choice.get("logprobs") or {}
        return Answer(
            str(choice.get("text") or ""),
            choice.get("finish_reason") == "stop",
            found.get("tokens") or (),
            found.get("token_logprobs") or (),
        )

    answers = []
    with (
        Progress("greedy answers", total=len(prompts), unit="answer") as progress,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        for answer in pool.map(one, prompts):
            answers.append(answer)
            progress.advance(1)
    return answers


def ask_canaries(
    socket_path: Path,
    model: str,
    canaries: Sequence[CanarySection],
    *,
    alive: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """The greedy answers to the run file's canary prompts, as a chat client gets them.

    Raises:
        ServerError: The server does not answer or refuses.
    """
    answers = []
    for canary in canaries:
        alive()
        messages = [{"role": "user", "content": canary.prompt}]
        if canary.system is not None:
            messages.insert(0, {"role": "system", "content": canary.system})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": canary.max_tokens,
            "temperature": 0,
        }
        choice = _post(socket_path, "/v1/chat/completions", body, alive)["choices"][0]
        text = str(choice["message"].get("content") or "")
        answers.append(Answer(text, choice.get("finish_reason") != "length"))
    return answers


def _post(socket_path: Path, url: str, body: Any, alive: Callable[[], None]) -> Any:
    try:
        answer = ask(socket_path, "POST", url, body, timeout_seconds=_ANSWER_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        alive()
        raise ServerError(
            f"the server does not answer a held-out prompt ({error})", hint="see `tuneserve logs`"
        ) from error
    if answer.status != 200:
        raise ServerError(
            f"the server refuses a held-out prompt: HTTP {answer.status} {answer.text}",
            hint="see `tuneserve logs`",
        )
    return answer.json()


def _share_gate(name: str, passed: bool, found: str, wanted: str, setting: str) -> Gate:
    if passed:
        return Gate(name, True, found, wanted)
    return Gate(name, False, found, wanted, "refused", setting)


def _short(answer: Answer) -> str:
    return repr(answer.text[:80])
