"""How many control tokens the template itself writes for a conversation, whatever its texts are.

A row that has more of them holds one that came from a text: from a turn, or from a field that
nobody looks at, such as the id of a tool call.
"""

from __future__ import annotations

from typing import Any

import jinja2
import numpy as np

from tuneserve.data.engine import Engine
from tuneserve.data.pieces import Piece
from tuneserve.data.template import ChatTemplate, Message

_MOST_SHAPES = 4096
_CALL_ID = "call00000"  # nine letters and digits, which is what Mistral's templates insist on
_ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "x",
        "description": "x",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ControlCounts:
    """Renders each shape of conversation once with a letter for every text, and counts.

    Args:
        engine: The tokenizer.
        template: Renders conversations without tools.
        tool_template: Renders those with tools; often the same.
    """

    def __init__(self, engine: Engine, template: ChatTemplate, tool_template: ChatTemplate) -> None:
        self._engine, self._template, self._tool_template = engine, template, tool_template
        self._known: dict[tuple[Any, ...], int | None] = {}

    def of(self, piece: Piece) -> int | None:
        """The number for a piece; None where the template refuses turns without their texts."""
        messages = piece.messages[: piece.count]
        key: tuple[Any, ...] = tuple([m["role"] if len(m) == 2 else "?" for m in messages])
        if piece.tools or "?" in key or "tool" in key:
            key = (len(piece.tools or ()), *map(_shape, messages))
        if key not in self._known:
            count = self._count(messages, piece.tools)
            if len(self._known) >= _MOST_SHAPES:
                return count
            self._known[key] = count
        return self._known[key]

    def _count(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> int | None:
        has_tools = bool(tools) or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        template = self._tool_template if has_tools else self._template
        bare = [_without_text(message) for message in messages]
        try:
            text = template.render(bare, [_ANY_TOOL] * len(tools) if tools else None, prompt=False)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError):
            return None
        ids = np.array(self._engine.encode(text).ids, dtype=np.int32)
        return int(np.count_nonzero(self._engine.is_control[ids]))


def _shape(message: Message) -> tuple[Any, ...]:
    """What a template may branch on: all but the texts."""
    return (
        message["role"],
        bool(message["content"]),
        "reasoning" in message,
        "name" in message,
        *(tuple(call["function"]["arguments"]) for call in message.get("tool_calls", ())),
    )


def _without_text(message: Message) -> Message:
    bare: Message = {}
    for key, value in message.items():
        if key == "tool_calls":
            bare[key] = [_bare_call(call["function"]["arguments"]) for call in value]
        elif key == "tool_call_id":
            bare[key] = _CALL_ID
        else:
            bare[key] = "x" if value and key != "role" else value
    return bare


def _bare_call(arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "x", "arguments": dict.fromkeys(arguments, "x")}
    return {"id": _CALL_ID, "type": "function", "function": function}
