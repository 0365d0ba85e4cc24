"""Paired bootstrap over conversations: how sure a difference of two mean losses is.

Conversations are drawn with replacement, both models are averaged over the same draw, and the
quantiles of the differences bound it (Efron and Tibshirani, An Introduction to the Bootstrap,
1993, chapter 13).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_DRAWS = 2000
_SHARE = 0.95
FEWEST_CONVERSATIONS = 5  # fewer draw too few different samples for a bound to mean anything


@dataclass(frozen=True)
class Interval:
    """A mean difference in nats per token with its 95 % bounds."""

    mean: float
    low: float
    high: float
    conversations: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_interval(
    sources: Sequence[str],
    tokens: Sequence[int],
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    seed: int = 0,
) -> Interval | None:
    """The difference ours - theirs of mean nats per token, bounded over conversations.

    Args:
        sources: Conversation of each row; rows of one conversation are drawn together.
        tokens: Supervised tokens of each row.
        ours: Sum of nats of each row.
        theirs: The same of the other model.
        seed: Of the draws.

    Returns:
        The interval; None when there are fewer than `FEWEST_CONVERSATIONS` conversations.
    """
    grouped: dict[str, tuple[float, int]] = {}
    for source, count, a, b in zip(sources, tokens, ours, theirs, strict=True):
        difference, total = grouped.get(source, (0.0, 0))
        grouped[source] = (difference + a - b, total + count)
    groups = list(grouped.values())
    if len(groups) < FEWEST_CONVERSATIONS:
        return None
    draw = random.Random(seed)
    means = sorted(_mean(draw.choices(groups, k=len(groups))) for _ in range(_DRAWS))
    tail = round(_DRAWS * (1 - _SHARE) / 2)
    return Interval(_mean(groups), means[tail], means[-1 - tail], len(groups))


def _mean(groups: Sequence[tuple[float, int]]) -> float:
    return sum(difference for difference, _ in groups) / max(1, sum(n for _, n in groups))
