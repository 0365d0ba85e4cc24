"""Row formats: which one a row has, and how it becomes OpenAI messages.

OpenAI chat format: https://platform.openai.com/docs/api-reference/chat (messages, tools,
tool_calls). ShareGPT and Alpaca as LLaMA-Factory documents them (data/README.md there);
prompt/completion as TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tuneserve.data import toolcalls
from tuneserve.data.codes import RowError
from tuneserve.data.toolcalls import type_name

ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {**{role: role for role in ROLES}, "developer": "system", "function": "tool"}
_FROM_NAMES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
_TURN_KEYS = ("messages", "conversations", "conversation")
REFUSED = {
    "preference": "preference pairs (a chosen and a rejected answer to one prompt), which are for "
    "DPO and similar methods; supervised fine-tuning needs conversations with one answer",
    "class_label": "texts with class labels, which are for classifiers; a chat model learns from "
    "conversations whose answer says the class",
    "tokenized": "token ids instead of text; they cannot be checked against the chat template",
    "text": "plain text without roles; a chat model learns from conversations",
}


@dataclass(slots=True)
class Conversation:
    """A row as the server would be sent it.

    Attributes:
        messages: OpenAI messages; content is always a string, or None beside tool calls.
        tools: OpenAI tools, or None.
        trained: Per message, whether its tokens may be supervised (false: weight 0).
        has_tools: Whether tools are listed, called or answering.
        warnings: Codes of level warning.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    trained: list[bool] = field(default_factory=list)
    has_tools: bool = False
    warnings: list[str] = field(default_factory=list)


def detect(row: dict[str, Any]) -> str:
    """The format of a row: a key of `CONVERTERS` or of `REFUSED`; empty when it is not known.

    Files of several sources have the columns of all, null where a row has another source's: what
    a row holds goes before what it only names.
    """
    if None in row.values():
        found = _by_keys({key: value for key, value in row.items() if value is not None})
        if found:
            return found
    return _by_keys(row)


def _by_keys(row: dict[str, Any]) -> str:
    if "chosen" in row and "rejected" in row:
        return "preference"
    for key in _TURN_KEYS:
        turns = row.get(key)
        if isinstance(turns, list):
            first = [turn for turn in turns[:4] if isinstance(turn, dict)]
            keys = {key for turn in first for key, value in turn.items() if value is not None}
            return "sharegpt" if "from" in keys and "role" not in keys else "messages"
    if "instruction" in row and ("output" in row or "response" in row):
        return "alpaca"
    if "prompt" in row and "completion" in row:
        # KTO: one answer with a thumb up or down
        return "preference" if isinstance(row.get("label"), bool) else "prompt_completion"
    if "input_ids" in row:
        return "tokenized"
    if "label" in row and ("text" in row or "sentence" in row):
        return "class_label"
    return "text" if isinstance(row.get("text"), str) else ""


def convert(row: dict[str, Any], format: str) -> Conversation:
    """Turn a row of a known format into a conversation.

    Raises:
        RowError: The row does not have the format, or a field of it is wrong.
    """
    found = detect(row)
    if found == "preference":
        raise RowError(
            "preference_pair", f"the row holds {REFUSED['preference']}", path=("chosen",)
        )
    if found == "class_label":
        raise RowError("class_label", f"the row holds {REFUSED['class_label']}", path=("label",))
    if found != format and not _fits(row, format):
        what = f"has the keys {_short(sorted(row))}" if row else "has no keys"
        what = f"looks like {found}" if found else what
        raise RowError("unknown_format", f"the file is {format}, but this row {what}", path=())
    return CONVERTERS[format](row)


def _fits(row: dict[str, Any], format: str) -> bool:
    wanted: dict[str, list[tuple[str, ...]]] = {
        "messages": [_TURN_KEYS],
        "sharegpt": [_TURN_KEYS],
        "alpaca": [("instruction",), ("output", "response")],
        "prompt_completion": [("prompt",), ("completion",)],
    }
    return all(any(name in row for name in names) for names in wanted[format])


def _short(names: Iterable[str]) -> str:
    text = ", ".join(names) or "none"
    return text if len(text) < 80 else f"{text[:77]}..."


def turns_key(row: dict[str, Any]) -> str | None:
    """The key that holds the turns; one that is null only where no other does."""
    named = [key for key in _TURN_KEYS if key in row]
    return next((key for key in named if row[key] is not None), next(iter(named), None))


def _turns(row: dict[str, Any]) -> tuple[str, list[Any]]:
    key = turns_key(row)
    assert key is not None, "checked by _fits"
    turns = row[key]
    if not isinstance(turns, list):
        raise RowError("bad_type", f"{key} is {type_name(turns)}, not a list", path=(key,))
    return key, turns


def _from_messages(row: dict[str, Any]) -> Conversation:
    key, turns = _turns(row)
    return _finish(row, *_messages(turns, (key,)))


def _messages(
    turns: list[Any], path: tuple[str | int, ...]
) -> tuple[list[dict[str, Any]], list[bool]]:
    messages, trained = [], []
    for number, turn in enumerate(turns):
        here = (*path, number)
        if not isinstance(turn, dict):
            raise RowError("bad_type", f"turn {number + 1} is {type_name(turn)}", path=here)
        role = _role(turn, "role", _ROLE_NAMES, number, here)
        message: dict[str, Any] = {"role": role}
        if len(turn) == 2 and isinstance(turn.get("content"), str):  # nearly all
            message["content"] = turn["content"]
            messages.append(message)
            trained.append(True)
            continue
        content = _content(turn.get("content"), number, (*here, "content"))
        calls = turn.get("tool_calls")
        if not calls and turn.get("function_call") is not None:
            calls = [{"type": "function", "function": turn["function_call"]}]
        if role == "assistant" and calls:
            message["content"] = content or None
            message["tool_calls"] = toolcalls.read_calls(calls, (*here, "tool_calls"))
        else:
            message["content"] = content
        for name in ("name", "tool_call_id"):
            if isinstance(turn.get(name), str) and (text := turn[name].strip()):
                message[name] = text
        reasoning = turn.get("reasoning") or turn.get("reasoning_content")
        if role == "assistant" and isinstance(reasoning, str) and reasoning:
            message["reasoning"] = reasoning
        messages.append(message)
        trained.append(_weight(turn, here))
    return messages, trained


def _role(
    turn: dict[str, Any],
    key: str,
    names: dict[str, str],
    number: int,
    path: tuple[str | int, ...],
) -> str:
    value = turn.get(key)
    if not isinstance(value, str):
        problem = f"{key} is {type_name(value)}" if key in turn else f"has no {key}"
        raise RowError("bad_type", f"turn {number + 1}: {problem}", path=(*path, key))
    if value not in names:
        allowed = ", ".join(names)
        message = f"turn {number + 1}: the role {value!r} is not one of {allowed}"
        raise RowError("unknown_role", message, path=(*path, key))
    return names[value]


def _content(value: Any, number: int, path: tuple[str | int, ...]) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        message = f"turn {number + 1}: content is {type_name(value)}, not a string"
        raise RowError("bad_type", message, path=path)
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = type_name(part)
        text = None
        if isinstance(part, dict):
            kind = part.get("type") or "text"
            text = part.get("value") if part.get("text") is None else part["text"]
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            message = f"turn {number + 1}: content part {index + 1} is {kind!r}, not text"
            raise RowError("not_text_part", message, path=(*path, index))
        texts.append(text)
    return "\n".join(texts)  # vLLM joins text parts so


def _weight(turn: dict[str, Any], path: tuple[str | int, ...]) -> bool:
    for key in ("weight", "loss_weight"):
        value = turn.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise RowError("bad_type", f"{key} is {value!r}, not 0 or 1", path=(*path, key))
        return bool(value)
    return True


def _from_sharegpt(row: dict[str, Any]) -> Conversation:
    key, turns = _turns(row)
    messages, trained = [], []
    for number, turn in enumerate(turns):
        here = (key, number)
        if not isinstance(turn, dict):
            raise RowError("bad_type", f"turn {number + 1} is {type_name(turn)}", path=here)
        role = _role(turn, "from", _FROM_NAMES, number, here)
        value = _content(turn.get("value"), number, (*here, "value"))
        if role == "function_call":
            calls = toolcalls.read_call_text(value, (*here, "value"))
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages.append({"role": role, "content": value})
        trained.append(_weight(turn, here))
    _add_system(row, messages, trained)
    return _finish(row, messages, trained)


def _text(row: dict[str, Any], *keys: str, optional: bool = False) -> str:
    """The text of the first of the keys that holds one."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str):
            return value
        if value is not None:
            raise RowError("bad_type", f"{key} is {type_name(value)}, not a string", path=(key,))
    named = next((key for key in keys if key in row), None)
    if named is not None and not optional:
        raise RowError("empty_content", f"{named} is null", path=(named,))
    return ""


def _from_alpaca(row: dict[str, Any]) -> Conversation:
    question = _text(row, "instruction")
    given = _text(row, "input", optional=True)
    if given.strip():
        question = f"{question}\n{given}"
    messages: list[dict[str, Any]] = []
    for pair in row.get("history") or []:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(t, str) for t in pair)
        ):
            raise RowError(
                "bad_type", "history is not a list of pairs of strings", path=("history",)
            )
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(row, "output", "response")})
    trained = [True] * len(messages)
    _add_system(row, messages, trained)
    return _finish(row, messages, trained)


def _from_prompt_completion(row: dict[str, Any]) -> Conversation:
    messages: list[dict[str, Any]] = []
    trained: list[bool] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(row[key], list):  # TRL's conversational variant
            more, weights = _messages(row[key], (key,))
            if key == "prompt":
                weights = [False] * len(more)
            messages += more
            trained += weights
        else:
            messages.append({"role": role, "content": _text(row, key)})
            trained.append(True)
    _add_system(row, messages, trained)
    return _finish(row, messages, trained)


def _add_system(row: dict[str, Any], messages: list[dict[str, Any]], trained: list[bool]) -> None:
    text = _text(row, "system", "system_prompt", optional=True)
    if text.strip() and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": text})
        trained.insert(0, True)


def _finish(
    row: dict[str, Any], messages: list[dict[str, Any]], trained: list[bool]
) -> Conversation:
    tools = toolcalls.read_tools(row.get("tools"))
    has_tools = bool(tools) or any(message["role"] == "tool" for message in messages)
    conversation = Conversation(messages, tools, trained, has_tools)
    if any("tool_calls" in message for message in messages):
        conversation.has_tools = True
        toolcalls.connect(messages)
        if tools is not None:
            known = {tool["function"]["name"] for tool in tools}
            for call in (call for m in messages for call in m.get("tool_calls", [])):
                if call["function"]["name"] not in known:
                    conversation.warnings.append("unknown_tool")
    return conversation


CONVERTERS: dict[str, Callable[[dict[str, Any]], Conversation]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt_completion,
}
