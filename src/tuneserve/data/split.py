"""Which rows are kept, and on which side: from digests alone, whatever is beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

# What more than so many others begin with, or than one in so many of all, is a greeting, and no
# reason to keep them together.
_GREETING, _GREETING_SHARE = 64, 4


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
    have the same prompt begin with the same ones, so groups only grow. Where the answers to one
    prompt are the beginning of too many, it would draw all of these to one side: it groups nothing,
    and its answers are trained on.

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
    order = np.argsort(wholes, kind="stable")
    roots = groups[order[np.searchsorted(wholes, beginnings, sorter=order)]]
    greetings = _greetings(roots, wholes[owners], len(np.unique(wholes)))
    useful = ~np.isin(roots, greetings)
    owners, shortest = np.unique(owners[useful], return_index=True)
    made = groups.copy()
    made[owners] = roots[useful][shortest]
    return made, np.isin(made, greetings)


def _greetings(roots: Words, followers: Words, conversations: int) -> Words:
    """The roots that more of so many different conversations begin with than says anything.

    Args:
        roots: What stands at the beginning, once for each follower.
        followers: The first word of the digest of the conversation that begins so.
        conversations: How many different ones there are.
    """
    limit = max(1, min(_GREETING, conversations // _GREETING_SHARE))
    order = np.lexsort((followers, roots))
    roots, followers = roots[order], followers[order]
    new = np.ones(len(roots), dtype=bool)
    new[1:] = (roots[1:] != roots[:-1]) | (followers[1:] != followers[:-1])
    found, count = np.unique(roots[new], return_counts=True)
    return found[count > limit]


def begun_by_trained(
    wholes: Words, beginnings: Words, counts: npt.NDArray[np.integer[Any]], from_eval: Bools
) -> tuple[dict[int, int], list[int]]:
    """Held-out conversations that are the beginning of a trained one.

    The arguments are those of `families`, and which conversations are held out.

    Returns:
        Each with the first trained one that begins so; and those that so many begin with that they
        are a greeting, by the rule of `families`.
    """
    owners = np.repeat(np.arange(len(wholes)), counts)
    found = ~from_eval[owners] & np.isin(beginnings, wholes[from_eval])
    owners, beginnings = owners[found], beginnings[found]
    trained = len(np.unique(wholes[~from_eval]))
    greetings = _greetings(beginnings, wholes[owners], trained)
    words, firsts = np.unique(beginnings, return_index=True)
    held = np.flatnonzero(from_eval & np.isin(wholes, words))
    longer = owners[firsts[np.searchsorted(words, wholes[held])]]
    common = np.isin(wholes[held], greetings)
    pairs = zip(held[~common].tolist(), longer[~common].tolist(), strict=True)
    return dict(pairs), held[common].tolist()


def held_out(groups: Words, seed: int, fraction: float) -> Bools:
    """Which conversations are held out.

    A group's side depends on its digest and the seed alone, so it stays when data is added. Lengths
    fall on both sides alike because digests know nothing of them. When no group of a small data set
    falls below the fraction, the one nearest to it is taken.

    Raises:
        ValueError: There are fewer than two groups, so that one side would be empty.
    """
    if len(np.unique(groups)) < 2:
        few = {0: "there is none", 1: "there is only one"}
        raise ValueError(few.get(len(groups), f"all {len(groups)} have one prompt"))
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
