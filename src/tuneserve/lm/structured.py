"""Whether an answer is JSON or holds tool calls, and whether it parses. Pure text."""

from __future__ import annotations

import json
import re

from tuneserve.lm.callforms import Tools, calls_in, form_of

# "json", "fenced_json", or one of `callforms.FORMS`.
Kind = str

# A block of Markdown, and nothing around it: what is in it is what an application reads.
_FENCE = re.compile(r"(`{3,})(?:json)?[ \t]*\n(?P<inside>.*)\n[ \t]*\1", re.DOTALL | re.IGNORECASE)


def recognize(text: str, tools: Tools | None = None) -> tuple[Kind, Tools | None] | None:
    """What kind of structure a reference answer has, and the tools it is to be held against.

    Calls that the chat's own tools do not take are held against none. None for prose.
    """
    for known in (tools, None) if tools else (None,):
        if form := form_of(text, known):
            return form, known
    return next(((kind, None) for kind in ("json", "fenced_json") if parses(text, kind)), None)


def parses(text: str, kind: Kind, tools: Tools | None = None) -> bool:
    """Whether an answer has the structure it should have."""
    if kind not in ("json", "fenced_json"):
        return bool(calls_in(text, kind, tools))
    said = text.rpartition("</think>")[2].strip()
    if kind == "json":
        return _is_json(said)
    block = _FENCE.fullmatch(said)
    return block is not None and _is_json(block["inside"])


def _is_json(text: str) -> bool:
    stripped = text.strip()
    if stripped[:1] not in ("{", "["):
        return False
    try:
        json.loads(stripped)
    except (ValueError, RecursionError):  # a loop of "[" is no JSON
        return False
    return True
