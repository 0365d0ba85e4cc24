"""Whether an answer is JSON or holds tool calls, and whether it parses. Pure text."""

from __future__ import annotations

import json
from typing import Any, Literal

Kind = Literal["json", "tool_call"]


def kind_of(text: str) -> Kind | None:
    """What kind of structure a reference answer has; None for prose.

    Tool calls are JSON objects with a name and arguments, whatever tags a model family puts around
    them; formats that are no JSON are not recognized.
    """
    if tool_calls(text):
        return "tool_call"
    return "json" if _is_json(text) else None


def parses(text: str, kind: Kind) -> bool:
    """Whether an answer has the structure it should have."""
    return bool(tool_calls(text)) if kind == "tool_call" else _is_json(text)


def tool_calls(text: str) -> list[dict[str, Any]]:
    """The tool calls in an answer: objects with a name and arguments."""
    decoder, found, at = json.JSONDecoder(), [], text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            at = text.find("{", at + 1)
            continue
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            arguments = value.get("arguments", value.get("parameters"))
            if isinstance(arguments, dict | str):
                found.append(value)
        at = text.find("{", end)
    return found


def _is_json(text: str) -> bool:
    stripped = text.strip()
    if stripped[:1] not in ("{", "["):
        return False
    try:
        json.loads(stripped)
    except ValueError:
        return False
    return True
