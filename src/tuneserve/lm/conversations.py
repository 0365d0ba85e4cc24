"""Which held-out rows are measured, where not all of them can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def round_robin(sources: Sequence[str], most: int) -> list[int]:
    """Places of at most `most` rows, in order: each conversation's first, then each one's second...

    Gates decide by conversations, so many of them are wanted; one may be many rows, which stand
    together.

    Args:
        sources: Conversation of each row.
        most: Rows wanted.
    """
    seen: Counter[str] = Counter()
    turns = []
    for at, source in enumerate(sources):
        turns.append((seen[source], at))
        seen[source] += 1
    return sorted(at for _, at in sorted(turns)[:most])
