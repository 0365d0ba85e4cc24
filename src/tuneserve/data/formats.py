"""Row formats: which one a row has, and how it becomes OpenAI messages.

OpenAI chat format: https://platform.openai.com/docs/api-reference/chat (messages, tools,
tool_calls). ShareGPT and Alpaca as LLaMA-Factory documents them (data/README.md there);
prompt/completion as TRL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tuneserve.data.codes import RowError
from tuneserve.data.strictjson import parse_text

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
    """The format of a row: a key of `CONVERTERS` or of `REFUSED`; empty when it is not known."""
    if "chosen" in row and "rejected" in row:
        return "preference"
    for key in _TURN_KEYS:
        turns = row.get(key)
        if isinstance(turns, list):
            keys = {k for turn in turns[:4] if isinstance(turn, dict) for k in turn}
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
        what = f"looks like {found}" if found else f"has the keys {_short(sorted(row))}"
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


def _turns(row: dict[str, Any]) -> tuple[str, list[Any]]:
    for key in _TURN_KEYS:
        if key in row:
            turns = row[key]
            if not isinstance(turns, list):
                raise RowError("bad_type", f"{key} is {_type(turns)}, not a list", path=(key,))
            return key, turns
    raise AssertionError("checked by _fits")


def _type(value: Any) -> str:
    names: dict[type, str] = {
        bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list",
        dict: "an object", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


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
            raise RowError("bad_type", f"turn {number + 1} is {_type(turn)}", path=here)
        role = _role(turn, "role", _ROLE_NAMES, number, here)
        message: dict[str, Any] = {"role": role}
        if len(turn) == 2 and isinstance(turn.get("content"), str):  # nearly all
            message["content"] = turn["content"]
            messages.append(message)
            trained.append(True)
            continue
        content = _content(turn.get("content"), number, (*here, "content"))
        calls = turn.get("tool_calls")
        if calls is None and turn.get("function_call") is not None:
            calls = [{"type": "function", "function": turn["function_call"]}]
        if role == "assistant" and calls:
            message["content"] = content or None
            message["tool_calls"] = _tool_calls(calls, (*here, "tool_calls"))
        else:
            message["content"] = content
        for name in ("name", "tool_call_id"):
            if isinstance(turn.get(name), str):
                message[name] = turn[name]
        reasoning = turn.get("reasoning", turn.get("reasoning_content"))
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
        problem = f"{key} is {_type(value)}" if key in turn else f"has no {key}"
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
        message = f"turn {number + 1}: content is {_type(value)}, not a string"
        raise RowError("bad_type", message, path=path)
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else _type(part)
        text = part.get("text", part.get("value")) if isinstance(part, dict) else None
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


def _tool_calls(calls: Any, path: tuple[str | int, ...]) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError("bad_tool_call", f"tool_calls is {_type(calls)}", path=path)
    return [_tool_call(call, (*path, i)) for i, call in enumerate(calls)]


def _tool_call(call: Any, path: tuple[str | int, ...]) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") not in ("function", None):
        raise RowError("bad_tool_call", "a tool call is not a function call", path=path)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise RowError("bad_tool_call", "a tool call has no function name", path=path)
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = parse_text(arguments)
        except RowError as error:
            message = f"the arguments of {name} are not JSON: {error.message}"
            raise RowError("bad_tool_call", message, path=path) from error
    if not isinstance(arguments, dict):
        message = f"the arguments of {name} are {_type(arguments)}, not an object"
        raise RowError("bad_tool_call", message, path=path)
    made: dict[str, Any] = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    text = json.dumps(arguments, ensure_ascii=False)
    return {**made, "type": "function", "function": {"name": name, "arguments": text}}


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    value = row.get("tools")
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = parse_text(value)
        except RowError as error:
            message = f"tools is a string that is not JSON: {error.message}"
            raise RowError("bad_tool_call", message, path=("tools",)) from error
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowError("bad_tool_call", f"tools is {_type(value)}, not a list", path=("tools",))
    tools = []
    for index, tool in enumerate(value):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"tool {index + 1} has no function name"
            raise RowError("bad_tool_call", message, path=("tools", index))
        # The three fields and their order that vLLM's request model has, so that the rendering
        # agrees.
        known = {key: function.get(key) for key in ("name", "description", "parameters")}
        tools.append({"type": "function", "function": known})
    return tools


def _from_sharegpt(row: dict[str, Any]) -> Conversation:
    key, turns = _turns(row)
    messages, trained = [], []
    for number, turn in enumerate(turns):
        here = (key, number)
        if not isinstance(turn, dict):
            raise RowError("bad_type", f"turn {number + 1} is {_type(turn)}", path=here)
        role = _role(turn, "from", _FROM_NAMES, number, here)
        value = _content(turn.get("value"), number, (*here, "value"))
        if role == "function_call":
            calls = _sharegpt_calls(value, (*here, "value"))
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages.append({"role": role, "content": value})
        trained.append(_weight(turn, here))
    _add_system(row, messages, trained)
    return _finish(row, messages, trained)


def _sharegpt_calls(value: str | None, path: tuple[str | int, ...]) -> list[dict[str, Any]]:
    try:
        parsed = parse_text(value or "")
    except RowError as error:
        message = f"the function call is not JSON: {error.message}"
        raise RowError("bad_tool_call", message, path=path) from error
    return [_tool_call(call, path) for call in (parsed if isinstance(parsed, list) else [parsed])]


def _text(row: dict[str, Any], *keys: str, optional: bool = False) -> str:
    for key in keys:
        if key in row:
            value = row[key]
            if value is None:
                if optional:
                    return ""
                raise RowError("empty_content", f"{key} is null", path=(key,))
            if not isinstance(value, str):
                raise RowError("bad_type", f"{key} is {_type(value)}, not a string", path=(key,))
            return value
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
    tools = _tools(row)
    has_tools = bool(tools) or any(message["role"] == "tool" for message in messages)
    conversation = Conversation(messages, tools, trained, has_tools)
    if any("tool_calls" in message for message in messages):
        conversation.has_tools = True
        _number_calls(conversation)
    return conversation


def _number_calls(conversation: Conversation) -> None:
    """Give calls without an id one, and results the id of the call that they answer, in order."""
    open_ids: list[str] = []
    count = 0
    known = {tool["function"]["name"] for tool in conversation.tools or []}
    for message in conversation.messages:
        for index, call in enumerate(message.get("tool_calls", [])):
            # Nine letters and digits, which is what Mistral's templates insist on.
            id = call.pop("id", None) or f"call{count:05d}"
            message["tool_calls"][index] = {"id": id, **call}
            open_ids.append(id)
            count += 1
            if conversation.tools is not None and call["function"]["name"] not in known:
                conversation.warnings.append("unknown_tool")
        if message["role"] == "tool" and "tool_call_id" not in message and open_ids:
            message["tool_call_id"] = open_ids.pop(0)


CONVERTERS: dict[str, Callable[[dict[str, Any]], Conversation]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt_completion,
}
