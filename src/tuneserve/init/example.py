"""A file of conversations to begin with, where there are none yet."""

from __future__ import annotations

import json

EXAMPLE_NAME = "chats.jsonl"

_PAIRS = (
    ("How long is the warranty?", "Seven years for the controller, two for its sensors."),
    ("Can I return it?", "Yes, within 45 days, and we pay the postage."),
    ("What does a new sensor cost?", "24 dollars, batteries included."),
    ("The display stays dark.", "Hold the round button for 12 seconds; it starts again."),
)


def example_text() -> str:
    """JSON Lines in OpenAI's messages form: single questions, a system turn, several turns."""
    rows = [
        [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        for ask, answer in _PAIRS
    ]
    rows[1].insert(0, {"role": "system", "content": "You answer for a greenhouse shop."})
    rows[2] += rows[3]
    return "".join(json.dumps({"messages": row}) + "\n" for row in rows)
