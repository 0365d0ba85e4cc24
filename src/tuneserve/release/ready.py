"""Ready means: our own child lives, names the model, and answered one chat to the end."""

from __future__ import annotations

import http.client
import logging
import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneserve.errors import GateRefused, OutOfMemory, ServerError, TuneserveError
from tuneserve.progress import human_seconds
from tuneserve.release.answer_room import AnswerRoom
from tuneserve.release.heldout import Row
from tuneserve.release.supervisor import Keeper, server_program, tail
from tuneserve.release.unixhttp import RELEASE_HEADER, Answer, ask

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_SAY_EVERY_SECONDS = 10.0
_PROBE_SECONDS = 10.0
_LAST_LINES = 20
SHORT_CHAT = [{"role": "user", "content": "Reply with one word: hello"}]
# Lines of a dying server that mean something to the user, and what to do about each.
_CAUSES: tuple[tuple[str, type[TuneserveError], str], ...] = (
    (
        r"(?:KV cache is needed|stored in KV cache|estimated maximum model length)",
        OutOfMemory,
        "set serve.max_model_len to at most the length in that line, or free memory",
    ),
    (r"No module named '?vllm", ServerError, "install vLLM, or set engines.serve.python"),
    (
        r"(?:OutOfMemoryError|CUDA out of memory|Cannot allocate memory|less than desired)",
        OutOfMemory,
        "free memory on the device, serve a smaller model, or set serve.rollout: hold",
    ),
    (
        r"(?:are not supported for now|does not recognize this architecture)",
        ServerError,
        "this vLLM does not serve the model's architecture",
    ),
    (
        r"(?:Unknown quantization method|not supported for quantization|not divisible by)",
        ServerError,
        "this vLLM does not serve the export: choose another quantize method or group size",
    ),
)


@dataclass
class Child:
    """The server of a release, watched: `check` raises as soon as it is no longer the one we
    started."""

    keeper: Keeper
    release: str
    pid: int = 0

    def check(self) -> None:
        """Raise when the server died or was started again.

        Raises:
            ServerError: With the server's own last lines.
        """
        info = self.keeper.info(server_program(self.release))
        if info and info.state in ("STARTING", "RUNNING") and self.pid in (0, info.pid):
            self.pid = info.pid
            return
        raise death_error(self.release, self.keeper.places.server_log(self.release))


def death_error(release: str, log_file: Path) -> TuneserveError:
    """Why a server died, by its own last lines."""
    text = tail(log_file, 400)
    for pattern, kind, hint in _CAUSES:
        if match := re.search(rf"^.*{pattern}.*$", text, re.MULTILINE):
            line = match.group(0).strip()
            return kind(
                f"the server of {release} ended: {line}", hint=f"{hint}; its log: {log_file}"
            )
    lines = "\n    ".join(text.splitlines()[-_LAST_LINES:]) or "(it wrote nothing)"
    return ServerError(
        f"the server of {release} ended while starting; its last lines:\n    {lines}",
        hint=f"read {log_file}",
    )


def wait_until_up(child: Child, socket_path: Path, model: str, *, limit_seconds: float) -> float:
    """Wait until the server names the model; returns the seconds it took.

    Raises:
        ServerError: It died (at once, with its last lines), names another model, is not the one
            we started, or took longer than `limit_seconds`.
    """
    started = time.monotonic()
    said = started
    while True:
        child.check()
        answer = _try(socket_path, "GET", "/v1/models", None)
        if answer is not None and answer.status == 200:
            _check_names(answer, model)
            _check_ours(answer, child.release)
            return time.monotonic() - started
        waited = time.monotonic() - started
        if waited > limit_seconds:
            raise ServerError(
                f"the server of {child.release} is not ready after {human_seconds(waited)}",
                expected=f"ready within serve.ready_timeout_seconds ({limit_seconds:.0f})",
                hint=f"read {child.keeper.places.server_log(child.release)}, or raise the limit",
            )
        if time.monotonic() - said >= _SAY_EVERY_SECONDS:
            said = time.monotonic()
            last = saying(child.keeper.places.server_log(child.release))
            log.info("loading the model: %s%s", human_seconds(waited), f"; {last}" if last else "")
        time.sleep(_POLL_SECONDS)


def saying(log_file: Path) -> str:
    """What a server said last of how far it is: a line of its own logging, no longer than one.

    Its warnings are for those who run it by hand, and stay in its log.
    """
    # What is indented goes on with a message of several lines: a table or settings.
    found = re.findall(r"INFO [-\d]+ [:\d]+ \[[^]]*\] (\S.*)", tail(log_file, 200))
    return textwrap.shorten(found[-1], 110, placeholder=" ...") if found else ""


def _check_names(answer: Answer, model: str) -> None:
    names = [entry.get("id") for entry in answer.json().get("data", [])]
    if model not in names:
        raise ServerError(
            f"the server serves {', '.join(map(str, names)) or 'nothing'}",
            expected=f"the model name {model!r}",
            hint="report it on the project's issue tracker on GitHub: the release command is wrong",
        )


def _check_ours(answer: Answer, release: str) -> None:
    found = answer.headers.get(RELEASE_HEADER.lower())
    if found != release:
        raise ServerError(
            f"the server on the candidate's socket says it is release {found}",
            expected=release,
            hint="`tuneserve down`, then try again",
        )


@dataclass(frozen=True)
class Sample:
    """One greedy answer: what ended it and what it says."""

    finish_reason: str
    text: str
    tokens: int
    seconds: float


def check_answers(
    child: Child,
    socket_path: Path,
    model: str,
    prompts: list[list[dict[str, Any]]],
    *,
    room: AnswerRoom,
    must_stop: bool,
    timeout_seconds: float = 180.0,
) -> Sample:
    """Ask for greedy answers until one ends by itself.

    Args:
        child: The server.
        socket_path: Its socket.
        model: Its served name.
        prompts: Chats to ask, in turn.
        room: Longest answer.
        must_stop: Whether an answer must end with `stop`; else it must only come.
        timeout_seconds: Longest wait for one answer.

    Raises:
        GateRefused: Every answer was cut; says which setting left it too little room, if one did.
        ServerError: The server refuses the chat, or generation hangs although /health is well.
    """
    sample: Sample | None = None
    for messages in prompts:
        sample = _one_answer(child, socket_path, model, messages, room.asked, timeout_seconds)
        if sample.finish_reason == "stop":
            return sample
    assert sample is not None, "there is at least one prompt"
    if must_stop:
        raise GateRefused(
            f"none of {len(prompts)} greedy answers ended by itself within {room.asked} tokens; "
            "the last one "
            f"ended with {sample.finish_reason}: {sample.text[:120]!r}",
            expected="finish_reason stop",
            hint=room.cut
            or "the model did not learn to end its turn: train longer, and check that end tokens "
            "are supervised in the validation report",
            details={"would_pass": [f"perhaps {room.setting}"]} if room.setting else {},
        )
    log.warning("no answer ended by itself within %d tokens", room.asked)
    return sample


def check_chat(child: Child, socket_path: Path, model: str, *, timeout_seconds: float) -> None:
    """Ask a server that was proven before for one short chat; /health says nothing of its engine.

    Raises:
        ServerError: It refuses the chat, or generation hangs although /health is well.
    """
    _one_answer(child, socket_path, model, SHORT_CHAT, 8, timeout_seconds)


def _one_answer(
    child: Child,
    socket_path: Path,
    model: str,
    messages: list[dict[str, Any]],
    max_tokens: int,
    timeout_seconds: float,
) -> Sample:
    started = time.monotonic()
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    try:
        answer = ask(
            socket_path, "POST", "/v1/chat/completions", body, timeout_seconds=timeout_seconds
        )
    except (OSError, http.client.HTTPException) as error:
        child.check()
        raise ServerError(
            f"the server answers /health, but a chat completion did not come ({error})",
            expected=f"an answer within {timeout_seconds:.0f} s",
            hint="generation is dead or the machine far too slow; see `tuneserve logs`",
        ) from error
    child.check()
    if answer.status != 200:
        raise ServerError(
            f"the server refuses a chat completion: HTTP {answer.status} {answer.text}",
            hint="see `tuneserve logs`",
        )
    data = answer.json()
    choice = data["choices"][0]
    return Sample(
        str(choice.get("finish_reason")),
        str(choice["message"].get("content") or ""),
        int((data.get("usage") or {}).get("completion_tokens") or 0),
        time.monotonic() - started,
    )


def prompts_of(rows: list[Row], most: int) -> list[list[dict[str, Any]]]:
    """Prompts from held-out chats: everything before the last answer, chats without tools first."""
    ordered = sorted(rows, key=lambda row: (row.tools is not None, len(row.ids)))
    chosen = [row.messages[:-1] for row in ordered if row.messages[-1]["role"] == "assistant"]
    return [messages for messages in chosen if messages][:most]


def _try(socket_path: Path, method: str, url: str, body: Any) -> Answer | None:
    try:
        return ask(socket_path, method, url, body, timeout_seconds=_PROBE_SECONDS)
    except (OSError, http.client.HTTPException):
        return None


def healthy(socket_path: Path, release: str, *, timeout_seconds: float = 3.0) -> Answer | None:
    """The /health answer of a release's server if it is well and ours; else None."""
    try:
        answer = ask(socket_path, "GET", "/health", timeout_seconds=timeout_seconds)
    except (OSError, http.client.HTTPException):
        return None
    ours = answer.headers.get(RELEASE_HEADER.lower()) == release
    return answer if answer.status == 200 and ours else None


Say = Callable[[str], None]
