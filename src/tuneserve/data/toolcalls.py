"""Tools, their calls and the results of these: one form for all row formats, ids that agree."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tuneserve.data.codes import RowError
from tuneserve.data.strictjson import parse_text

Path = tuple[str | int, ...]
# json.dumps with an option makes an encoder at every call. NaN is no JSON, whatever file it is in.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def type_name(value: Any) -> str:
    """What JSON calls the type of a value, for messages."""
    names: dict[type, str] = {
        bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list",
        dict: "an object", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


def read_calls(calls: Any, path: Path) -> list[dict[str, Any]]:
    """The `tool_calls` of a turn, arguments as text.

    Raises:
        RowError: One of them is not a function call with an object of arguments.
    """
    if not isinstance(calls, list):
        raise RowError("bad_tool_call", f"tool_calls is {type_name(calls)}", path=path)
    return [_call(call, (*path, i)) for i, call in enumerate(calls)]


def read_call_text(value: str | None, path: Path) -> list[dict[str, Any]]:
    """The same from ShareGPT's text of one call or of a list of them.

    Raises:
        RowError: It is not JSON, or not such calls.
    """
    try:
        parsed = parse_text(value or "")
    except RowError as error:
        message = f"the function call is not JSON: {error.message}"
        raise RowError("bad_tool_call", message, path=path) from error
    return [_call(call, path) for call in (parsed if isinstance(parsed, list) else [parsed])]


def _function(item: Any) -> Any:
    """What a call or a tool says of its function: under `function`, or flat."""
    if not isinstance(item, dict):
        return None
    return item if item.get("function") is None else item["function"]


def _call(call: Any, path: Path) -> dict[str, Any]:
    function = _function(call)
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
        message = f"the arguments of {name} are {type_name(arguments)}, not an object"
        raise RowError("bad_tool_call", message, path=path)
    id = call["id"].strip() if isinstance(call.get("id"), str) else ""
    made: dict[str, Any] = {"id": id} if id else {}
    try:
        text = _encode(arguments)
    except ValueError as error:
        message = f"the arguments of {name} hold NaN or Infinity"
        raise RowError("not_finite", message, path=path) from error
    except TypeError as error:
        message = f"the arguments of {name} hold what JSON has no type for: {error}"
        raise RowError("bad_type", message, path=path) from error
    return {**made, "type": "function", "function": {"name": name, "arguments": text}}


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """The `tools` of a row, a list or the text of one; None without any.

    Raises:
        RowError: It is neither, or a tool has no name.
    """
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
        message = f"tools is {type_name(value)}, not a list"
        raise RowError("bad_tool_call", message, path=("tools",))
    tools = []
    for index, tool in enumerate(value):
        function = _function(tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"tool {index + 1} has no function name"
            raise RowError("bad_tool_call", message, path=("tools", index))
        # The three fields and their order that vLLM's request model has, so that the rendering
        # agrees.
        known = {key: function.get(key) for key in ("name", "description", "parameters")}
        tools.append({"type": "function", "function": known})
    return tools


def connect(messages: list[dict[str, Any]]) -> None:
    """Give each call an id, and each result that of the call that it answers.

    A result without an id answers the first call that no later result names. Where no call has an
    id of its own, as in ShareGPT, results are taken in order whatever their ids, and one may answer
    several calls; where only some have, a result's unknown id is that of one that has none.

    Raises:
        RowError: A result's id is not that of a call before it, or a call has no result.
    """
    count = 0
    for turn, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        nameless = []
        for index, call in enumerate(calls):
            own = call.pop("id", None)
            # Nine letters and digits, which is what Mistral's templates insist on.
            calls[index] = made = {"id": own or f"call{count:05d}", **call}
            count += 1
            if not own:
                nameless.append(made)
        if not calls:
            continue
        behind = itertools.islice(messages, turn + 1, None)
        results = list(itertools.takewhile(lambda other: other["role"] == "tool", behind))
        waiting = _answer(turn, calls, nameless, results)
        if results and waiting and len(nameless) < len(calls):
            text = f"the call {waiting[0]['id']!r} of turn {turn + 1} has no result"
            raise RowError("unanswered_call", text, path=("messages", turn, "tool_calls"))


def _answer(
    turn: int,
    calls: list[dict[str, Any]],
    nameless: list[dict[str, Any]],
    results: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Connect the results that follow one turn; the calls that are left are returned."""
    waiting, ids = list(calls), [call["id"] for call in calls]
    for at, result in enumerate(results):
        given = result.get("tool_call_id")
        if given is None:
            later = {other.get("tool_call_id") for other in results[at + 1 :]}
            fitting = [call for call in waiting if call["id"] not in later] or waiting
        elif len(nameless) == len(calls):
            fitting = waiting
        elif given in ids:  # perhaps answered already: a result may be told in two parts
            fitting = [call for call in waiting if call["id"] == given]
        else:
            fitting = [call for call in waiting if call in nameless]
            if not fitting:
                number = turn + at + 1
                text = (
                    f"turn {number + 1} is the result of a call {given!r}, but the ids of turn "
                    f"{turn + 1} are {', '.join(ids)}"
                )
                path = ("messages", number, "tool_call_id")
                raise RowError("unanswered_call", text, path=path)
        if fitting:
            call = fitting[0]
            waiting.remove(call)
            if given is None:
                result["tool_call_id"] = call["id"]
            else:
                call["id"] = given
    return waiting
