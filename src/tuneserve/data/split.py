"""Which rows are kept, and on which side: from digests alone, whatever is beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

# A conversation that so many others begin with is a greeting, and no reason to keep them together.
_GREETING = 64


def first_occurrences(digests: Words) -> tuple[Bools, npt.NDArray[np.int64]]:
    """Which 16-byte digests occur for the first time, and where the first one of each is.

    Args:
        digests: Shape (n, 2).

    Returns:
        A mask of n, and n indices: the row that each one equals first.
    """
    if not len(digests):
        return np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64)
    # lexsort is stable, so of equal digests the earliest row comes first.
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return first == np.arange(len(order)), first


def families(
    groups: Words, wholes: Words, beginnings: Words, counts: npt.NDArray[np.integer[Any]]
) -> tuple[Words, Bools]:
    """Groups that also keep a conversation beside those that begin with it.

    A conversation takes the group of the shortest one that it begins with. Whatever two of them
    have the same prompt begin with the same ones, so groups only grow. One that more than 64 others
    begin with would draw all of these to one side: it groups nothing, and is trained on.

    Args:
        groups: Per conversation, the digest of its prompt.
        wholes: Per conversation, the first word of its digest.
        beginnings: The same word of each of their beginnings, in order and the shortest first.
        counts: Per conversation, how many of these it has.

    Returns:
        The groups, and which conversations must not be held out.
    """
    owners = np.repeat(np.arange(len(groups)), counts)
    known = np.isin(beginnings, wholes)
    owners, beginnings = owners[known], beginnings[known]
    found, followers = np.unique(beginnings, return_counts=True)
    greetings = found[followers > _GREETING]
    useful = ~np.isin(beginnings, greetings)
    owners, shortest = np.unique(owners[useful], return_index=True)
    order = np.argsort(wholes, kind="stable")
    at = order[np.searchsorted(wholes, beginnings[useful][shortest], sorter=order)]
    made = groups.copy()
    made[owners] = groups[at]
    return made, np.isin(made, made[np.isin(wholes, greetings)])


def begun_by_trained(
    wholes: Words, beginnings: Words, counts: npt.NDArray[np.integer[Any]], from_eval: Bools
) -> dict[int, int]:
    """Held-out conversations that are the beginning of a trained one, with the first such one.

    The arguments are those of `families`, and which conversations are held out.
    """
    owners = np.repeat(np.arange(len(wholes)), counts)
    trained = ~from_eval[owners]
    words, firsts = np.unique(beginnings[trained], return_index=True)
    held = np.flatnonzero(from_eval & np.isin(wholes, words))
    longer = owners[trained][firsts[np.searchsorted(words, wholes[held])]]
    return dict(zip(held.tolist(), longer.tolist(), strict=True))


def held_out(groups: Words, seed: int, fraction: float) -> Bools:
    """Which conversations are held out.

    A group's side depends on its digest and the seed alone, so it stays when data is added. Lengths
    fall on both sides alike because digests know nothing of them. When no group of a small data set
    falls below the fraction, the one nearest to it is taken.

    Raises:
        ValueError: There are fewer than two groups, so that one side would be empty.
    """
    if len(np.unique(groups)) < 2:
        raise ValueError(f"{len(groups)} conversations of one beginning")
    drawn = _mix(groups ^ _mix(np.full(1, seed, dtype=np.uint64)))
    place = drawn.astype(np.float64) / 2.0**64
    out: Bools = place < fraction
    if not out.any():
        out = drawn == drawn.min()
    if out.all():
        out = drawn != drawn.max()
    return out


def _mix(words: Words) -> Words:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): each input bit moves half the output's."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


def length_strata(lengths: npt.NDArray[np.int64], out: Bools) -> list[dict[str, Any]]:
    """Per quartile of length, how many rows there are and how many of them are held out."""
    if not len(lengths):
        return []
    edges = np.unique(np.quantile(lengths, [0, 0.25, 0.5, 0.75, 1]).astype(np.int64))
    which = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, max(len(edges) - 2, 0))
    return [
        {
            "tokens": [int(edges[i]), int(edges[min(i + 1, len(edges) - 1)])],
            "rows": int((which == i).sum()),
            "held_out": int((out & (which == i)).sum()),
        }
        for i in range(max(len(edges) - 1, 1))
    ]


def outliers(lengths: npt.NDArray[np.int64]) -> Bools:
    """Rows far longer than most: three interquartile ranges of log length above the middle."""
    if len(lengths) < 20:
        return np.zeros(len(lengths), dtype=bool)
    logs = np.log(np.maximum(lengths, 1))
    low, high = np.quantile(logs, [0.25, 0.75])
    return logs > high + 3 * max(high - low, 0.1)
