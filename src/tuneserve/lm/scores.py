"""What two models say about the same tokens, and how far apart they are. Pure numpy.

Of each position a model's likeliest tokens are kept, and the token that really stands there. That
is what an OpenAI-compatible server gives for a prompt, and what evaluation writes for the merged
model, so that both can be compared without a vocabulary of numbers a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

TOP = 20
"""Tokens kept a position: vLLM's default limit of `prompt_logprobs`."""

_NOBODY = -1
_LEAST = 1e-7  # float32 log-probabilities of 21 tokens add up to 1 within this
_PIECE = 4096  # positions compared at a time: 20 x 20 bytes each


@dataclass(frozen=True)
class TopScores:
    """Log-probabilities at the supervised positions of some rows, one row after the other.

    Attributes:
        starts: Where each row begins, and the end: one longer than there are rows.
        tokens: The token that stands at each position.
        actual: Its log-probability.
        ids: Positions x TOP likeliest tokens, the first choice first; -1 where there are fewer.
        logprobs: Their log-probabilities.
    """

    starts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    actual: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def nats(self) -> npt.NDArray[np.float64]:
        """Summed loss of each row."""
        return row_sums(-self.actual.astype(np.float64), self.starts)

    def first_choice(self) -> npt.NDArray[np.bool_]:
        """Whether each token was the model's first choice."""
        return self.ids[:, 0] == self.tokens

    def first(self, count: int) -> TopScores:
        """The same without all but the first rows."""
        end = int(self.starts[count])
        arrays = (self.tokens, self.actual, self.ids, self.logprobs)
        return TopScores(self.starts[: count + 1], *(array[:end] for array in arrays))  # type: ignore[arg-type]

    def save(self, path: Path, **more: npt.NDArray[np.generic]) -> None:
        """Write as one .npz, `more` beside it; equal values give equal bytes."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        np.savez(path, **own, **more)  # type: ignore[arg-type]

    @staticmethod
    def load(path: Path) -> tuple[TopScores, dict[str, npt.NDArray[np.generic]]]:
        """What `save` wrote: the scores, and what was beside them."""
        with np.load(path, allow_pickle=False) as data:
            found = dict(data)
        own = {field.name: found.pop(field.name) for field in fields(TopScores)}
        return TopScores(**own), found


def join_rows(rows: Iterable[TopScores]) -> TopScores:
    """Scores of several rows as one."""
    parts = list(rows)
    sizes = [int(part.starts[-1]) for part in parts]
    return TopScores(
        np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.actual for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
    )


def row_sums(
    values: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """The sum of `values` over each row."""
    totals = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    return np.asarray(totals[starts[1:]] - totals[starts[:-1]], np.float64)


def divergence(reference: TopScores, other: TopScores) -> npt.NDArray[np.float64]:
    """A lower bound of KL(reference || other) in nats at each position.

    Only tokens that both kept, and the one that stands there, have two known probabilities; all
    others are lumped into one. Merging outcomes never raises a divergence (the log sum inequality:
    Cover and Thomas, Elements of Information Theory, theorem 2.7.1), so this never overstates it.

    Raises:
        ValueError: The two are not about the same tokens.
    """
    if not np.array_equal(reference.tokens, other.tokens):
        raise ValueError("scores of different tokens")
    parts = [
        _divergence(reference, other, slice(at, at + _PIECE))
        for at in range(0, len(reference.tokens), _PIECE)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def flips(reference: TopScores, other: TopScores) -> npt.NDArray[np.bool_]:
    """Where the other model's first choice is not the reference's."""
    return np.asarray(reference.ids[:, 0] != other.ids[:, 0])


def _divergence(p: TopScores, q: TopScores, at: slice) -> npt.NDArray[np.float64]:
    token = p.tokens[at, None]
    # [positions, of p, of q]; the token that stands there is counted by itself
    same = (p.ids[at, :, None] == q.ids[at, None, :]) & (p.ids[at, :, None] != _NOBODY)
    same &= (p.ids[at] != token)[:, :, None]
    both = same.any(2)
    log_p = p.logprobs[at].astype(np.float64)
    log_q = np.take_along_axis(q.logprobs[at].astype(np.float64), same.argmax(2), axis=1)
    ours, theirs = np.exp(p.actual[at].astype(np.float64)), np.exp(q.actual[at].astype(np.float64))
    known_p = np.where(both, np.exp(log_p), 0.0)
    known_q = np.where(both, np.exp(log_q), 0.0)
    gap = np.where(both, log_p - np.where(both, log_q, 0.0), 0.0)
    tail_p = np.maximum(1.0 - known_p.sum(1) - ours, _LEAST)
    tail_q = np.maximum(1.0 - known_q.sum(1) - theirs, _LEAST)
    total = np.where(known_p > 0, known_p * np.where(known_p > 0, gap, 0.0), 0.0).sum(1)
    total += ours * (p.actual[at].astype(np.float64) - q.actual[at].astype(np.float64))
    total += tail_p * np.log(tail_p / tail_q)
    return np.maximum(total, 0.0)
