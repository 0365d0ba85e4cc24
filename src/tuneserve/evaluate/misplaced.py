"""Held-out answers behind other conversations' questions: does the model heed what it is asked?

Every loss agrees with a file in which answers stand at the wrong questions, and a model that was
trained on one is better than its base at the manner of the answers. What gives it away is that an
answer is then as likely behind any question as behind its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tuneserve.evaluate.answers import answers_in
from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.lm.scores import TopScores


def misplaced(rows: Rows, chosen: Sequence[int]) -> tuple[list[int], Rows, Rows]:
    """The last answer of each chosen row, where it belongs and behind what comes before another's.

    The other is of another conversation, has another last answer, and as many answers before it
    where there is such a row: earlier answers show the manner, whatever was asked. No row becomes
    longer than the longest chosen one; what is too long loses its beginning.

    Returns:
        Places in `chosen` for which there is another, their rows with only that answer supervised,
        and the same answers behind other beginnings.
    """
    spans = [answers_in(rows.row(at)[1]) for at in chosen]
    said = [rows.row(at)[0][slice(*span[-1])] for at, span in zip(chosen, spans, strict=True)]
    begun = [rows.row(at)[0][: span[-1][0]] for at, span in zip(chosen, spans, strict=True)]
    sources, counts = [rows.sources[at] for at in chosen], [len(span) for span in spans]
    longest = max((int(rows.lengths[at]) for at in chosen), default=0)
    pairs = [(place, _other(place, sources, said, counts)) for place in range(len(chosen))]
    kept = [(place, other) for place, other in pairs if other is not None]
    names = [sources[place] for place, _ in kept]
    home = [(begun[place], said[place]) for place, _ in kept]
    moved = []
    for place, other in kept:
        room = longest - len(said[place])
        moved.append((begun[other][max(0, len(begun[other]) - room) :], said[place]))
    return [place for place, _ in kept], _rows(home, names), _rows(moved, names)


def last_nats(
    scores: TopScores, places: Sequence[int], tokens: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Summed nats of the last so many supervised `tokens` of rows, by their `places` in scores."""
    ends = scores.starts[1:][list(places)]
    found = [
        -scores.actual[end - count : end].astype(np.float64).sum()
        for end, count in zip(ends, tokens, strict=True)
    ]
    return np.array(found, np.float64)


def _rows(
    pairs: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]], sources: list[str]
) -> Rows:
    """Rows of what is given and what is supervised after it."""
    nothing = np.zeros(0, np.int32)
    unmarked = [np.full(len(before), IGNORED, np.int32) for before, _ in pairs]
    labels = [
        part for mark, (_, said) in zip(unmarked, pairs, strict=True) for part in (mark, said)
    ]
    ids = [part for pair in pairs for part in pair]
    ends = np.cumsum([0, *(len(before) + len(said) for before, said in pairs)])
    return Rows(
        np.concatenate([nothing, *ids]),
        np.concatenate([nothing, *labels]),
        ends.astype(np.int64),
        sources,
    )


def _other(
    place: int, sources: Sequence[str], said: Sequence[npt.NDArray[np.int32]], counts: Sequence[int]
) -> int | None:
    """Half way round from `place`, the first row that will do."""
    size = len(said)
    turned = [(place + size // 2 + step) % size for step in range(size)]

    def first(alike: bool) -> int | None:
        return next(
            (
                at
                for at in turned
                if sources[at] != sources[place]
                and (not alike or counts[at] == counts[place])
                and not np.array_equal(said[at], said[place])
            ),
            None,
        )

    found = first(alike=True)
    return first(alike=False) if found is None else found
