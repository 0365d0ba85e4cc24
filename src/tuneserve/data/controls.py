"""How many control tokens the template itself writes for a conversation, whatever its texts are.

A row that has more of them holds one that its texts formed together with the template.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tuneserve.data.engine import Engine
from tuneserve.data.pieces import Piece
from tuneserve.data.template import ChatTemplate

_MOST_SHAPES = 4096


class ControlCounts:
    """Renders each sequence of roles once, with a letter for every text, and counts."""

    def __init__(self, engine: Engine, template: ChatTemplate) -> None:
        self._engine, self._template = engine, template
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, piece: Piece) -> int | None:
        """The number for a piece; None where tools or calls decide, whose every text was searched.

        Some templates write control tokens around each field of a tool or of a call: only their
        own content says how many.
        """
        messages = piece.messages[: piece.count]
        if piece.tools or any("tool_calls" in message for message in messages):
            return None
        key = tuple([m["role"] if len(m) == 2 else (m["role"], "reasoning" in m) for m in messages])
        wanted = self._known.get(key)
        if wanted is None:
            bare = [{k: v if k == "role" else "x" for k, v in m.items()} for m in messages]
            ids = self._engine.encode(self._template.render(bare, None, prompt=False)).ids
            wanted = int(np.count_nonzero(self._engine.is_control[np.array(ids, dtype=np.int32)]))
            if len(self._known) < _MOST_SHAPES:
                self._known[key] = wanted
        return wanted
