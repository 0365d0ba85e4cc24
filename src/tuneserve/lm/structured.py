"""Whether an answer is JSON or holds tool calls, and whether it parses. Pure text."""

from __future__ import annotations

import json

from tuneserve.lm.callforms import Tools, calls_in, form_of

# "json", or one of `callforms.FORMS`.
Kind = str


def recognize(text: str, tools: Tools | None = None) -> tuple[Kind, Tools | None] | None:
    """What kind of structure a reference answer has, and the tools it is to be held against.

    Calls that the chat's own tools do not take are held against none. None for prose.
    """
    for known in (tools, None) if tools else (None,):
        if form := form_of(text, known):
            return form, known
    return ("json", None) if _is_json(text) else None


def parses(text: str, kind: Kind, tools: Tools | None = None) -> bool:
    """Whether an answer has the structure it should have."""
    return _is_json(text) if kind == "json" else bool(calls_in(text, kind, tools))


def _is_json(text: str) -> bool:
    stripped = text.rpartition("</think>")[2].strip()
    if stripped[:1] not in ("{", "["):
        return False
    try:
        json.loads(stripped)
    except (ValueError, RecursionError):  # a loop of "[" is no JSON
        return False
    return True
