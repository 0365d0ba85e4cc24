"""Paired bootstrap over conversations: how sure a number is that held-out rows gave.

Conversations are drawn with replacement, every model is summed over the same draw, and quantiles
of what is computed from the sums bound it (Efron and Tibshirani, An Introduction to the Bootstrap,
1993, chapter 13). All numbers of a report come from the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_DRAWS = 2000
_DRAWS_AT_ONCE = 200

Sums = Mapping[str, Any]
"""Sums by column: floats, or one value a draw."""


@dataclass(frozen=True)
class Interval:
    """A number with the bounds of its bootstrap."""

    mean: float
    low: float
    high: float
    conversations: int

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    def percent(self) -> str:
        """The same as percentages."""
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}]"


class Resampled:
    """Columns of per-row sums, drawn by conversation.

    Args:
        sources: Conversation of each row; rows of one conversation are drawn together.
        columns: A value a row under each name.
        seed: Of the draws.
        confidence: Share of the draws that an interval spans.
    """

    def __init__(
        self,
        sources: Sequence[str],
        columns: Mapping[str, Sequence[float] | npt.NDArray[Any]],
        *,
        seed: int = 0,
        confidence: float = 0.95,
    ) -> None:
        names, of_row = np.unique(
            np.asarray(sources, dtype=object).astype(str), return_inverse=True
        )
        self.conversations = len(names)
        self._confidence = confidence
        table = np.zeros((self.conversations, len(columns)))
        for at, values in enumerate(columns.values()):
            np.add.at(table[:, at], of_row, np.asarray(values, np.float64))
        self.sums: Sums = dict(zip(columns, table.sum(0), strict=True))
        drawn = np.concatenate(list(_drawn(table, seed))) if self.conversations else table
        self._drawn: Sums = dict(zip(columns, drawn.T, strict=True))

    def interval(self, statistic: Callable[[Sums], Any]) -> Interval:
        """Bounds of a statistic of the sums, such as ``lambda s: s["ours"] / s["tokens"]``."""
        tail = (1 - self._confidence) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.asarray(statistic(self._drawn), np.float64)
            low, high = np.quantile(values, (tail, 1 - tail))
            mean = float(statistic(self.sums))
        return Interval(mean, float(low), float(high), self.conversations)


def _drawn(table: npt.NDArray[np.float64], seed: int) -> Any:
    rng, count = np.random.default_rng(seed), len(table)
    for _ in range(0, _DRAWS, _DRAWS_AT_ONCE):
        yield rng.multinomial(count, [1 / count] * count, size=_DRAWS_AT_ONCE) @ table
