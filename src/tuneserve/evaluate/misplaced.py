"""Held-out answers behind other conversations' questions: does the model heed what it is asked?

Every loss agrees with a file in which answers stand at the wrong questions, and a model that was
trained on one is better than its base at the manner of the answers. What gives it away is that an
answer is then as likely behind any question as behind its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuneserve.evaluate.answers import answers_in
from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.lm.scores import TopScores


@dataclass(frozen=True)
class Misplaced:
    """Answers that are tried behind another question, one a row.

    Attributes:
        places: Places in what was chosen for which there is another.
        begins: How many supervised tokens of the row lie before the answer.
        home: The row up to the answer, with it alone supervised.
        moved: The same answer behind another beginning.
    """

    places: list[int]
    begins: list[int]
    home: Rows
    moved: Rows


def misplaced(rows: Rows, chosen: Sequence[int]) -> Misplaced:
    """The longest answer of each chosen row, where it belongs and behind what comes before
    another's.

    The longest, for a greeting or a farewell suits any conversation. The other is of another
    conversation, with another answer and another beginning, and has as many answers before it where
    there is such a row: earlier answers show the manner, whatever was asked. A beginning is lent
    once, so that one odd question does not decide alone. No row becomes longer than the longest
    chosen one; what is too long loses its beginning.
    """
    spans = [answers_in(rows.row(at)[1]) for at in chosen]
    turns = [max(range(len(span)), key=lambda n: span[n][1] - span[n][0]) for span in spans]
    tried = [span[n] for span, n in zip(spans, turns, strict=True)]
    said = [rows.row(at)[0][slice(*span)] for at, span in zip(chosen, tried, strict=True)]
    begun = [rows.row(at)[0][: span[0]] for at, span in zip(chosen, tried, strict=True)]
    longest = max((int(rows.lengths[at]) for at in chosen), default=0)
    kept = _others(
        [(rows.sources[at], begun[n].tobytes(), said[n].tobytes(), turns[n])
         for n, at in enumerate(chosen)]
    )  # fmt: skip
    names = [rows.sources[chosen[place]] for place, _ in kept]
    home = [(begun[place], said[place]) for place, _ in kept]
    moved = []
    for place, other in kept:
        room = longest - len(said[place])
        moved.append((begun[other][max(0, len(begun[other]) - room) :], said[place]))
    places = [place for place, _ in kept]
    begins = [sum(end - begin for begin, end in spans[at][: turns[at]]) for at in places]
    return Misplaced(places, begins, _rows(home, names), _rows(moved, names))


def answer_nats(scores: TopScores, tried: Misplaced) -> npt.NDArray[np.float64]:
    """Summed nats of the answers where they belong, out of the scores of the chosen rows."""
    firsts = scores.starts[tried.places] + tried.begins
    found = [
        -scores.actual[first : first + count].astype(np.float64).sum()
        for first, count in zip(firsts, tried.home.supervised(), strict=True)
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


def _others(rows: Sequence[tuple[str, bytes, bytes, int]]) -> list[tuple[int, int]]:
    """Places, each with the first half way round from it that will do and was not lent yet.

    Args:
        rows: Of each its source, beginning, answer, and how many answers come before that.
    """
    size = len(rows)
    free = set(range(size))
    found = []
    for place, (source, begun, said, before) in enumerate(rows):
        turned = ((place + size // 2 + step) % size for step in range(size))
        suited = [
            at
            for at in turned
            if at in free and rows[at][0] != source and rows[at][1] != begun and rows[at][2] != said
        ]
        if suited:
            other = next((at for at in suited if rows[at][3] == before), suited[0])
            free.remove(other)
            found.append((place, other))
    return found
