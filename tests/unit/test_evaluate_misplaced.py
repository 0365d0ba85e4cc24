"""Answers behind other conversations' questions: which, behind what, and where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from tuneserve.evaluate.misplaced import last_nats, misplaced
from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.lm.scores import TopScores


def rows_of(*rows: tuple[str, list[int], list[int]]) -> Rows:
    """Rows of (source, ids, positions that are supervised)."""
    ids = [np.array(i, np.int32) for _, i, _ in rows]
    labels = [np.full(len(i), IGNORED, np.int32) for _, i, _ in rows]
    for (_, own, marked), label in zip(rows, labels, strict=True):
        label[marked] = np.array(own, np.int32)[marked]
    starts = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    return Rows(np.concatenate(ids), np.concatenate(labels), starts, [s for s, _, _ in rows])


def listed(rows: Rows) -> list[tuple[str, list[int], list[int]]]:
    return [
        (rows.sources[at], *(part.tolist() for part in rows.row(at))) for at in range(len(rows))
    ]


def test_each_last_answer_stands_behind_another_question() -> None:
    rows = rows_of(
        ("a", [1, 2, 3, 50, 51, 9], [3, 4]),  # something after the end token is no answer
        ("b", [4, 5, 60, 61, 62], [2, 3, 4]),
    )
    _, home, moved = misplaced(rows, [0, 1])
    assert listed(home) == [
        ("a", [1, 2, 3, 50, 51], [IGNORED] * 3 + [50, 51]),
        ("b", [4, 5, 60, 61, 62], [IGNORED] * 2 + [60, 61, 62]),
    ]
    assert listed(moved) == [
        ("a", [4, 5, 50, 51], [IGNORED, IGNORED, 50, 51]),
        ("b", [1, 2, 3, 60, 61, 62], [IGNORED] * 3 + [60, 61, 62]),
    ]


def test_the_other_row_is_of_another_conversation_with_another_answer() -> None:
    same = [1, 50]
    rows = rows_of(
        ("a", same, [1]),
        ("a", [1, 50, 2, 51], [3]),  # of the same conversation
        ("b", [3, 50], [1]),  # the same answer
        ("c", [4, 52, 5, 53], [1, 3]),  # two answers
        ("d", [6, 54], [1]),
    )
    places, home, moved = misplaced(rows, range(5))
    assert places == [0, 1, 2, 3, 4]
    assert home.sources == moved.sources == ["a", "a", "b", "c", "d"]
    assert listed(moved)[0][1] == [6, 50]  # d: as many answers as it has
    # c's last answer of two, where it belongs and half way round, for none has two
    assert listed(home)[3] == ("c", [4, 52, 5, 53], [IGNORED] * 3 + [53])
    assert listed(moved)[3] == ("c", [1, 53], [IGNORED, 53])


@pytest.mark.parametrize("chosen", [[], [0], [0, 1]])
def test_where_all_answers_are_alike_none_is_moved(chosen: list[int]) -> None:
    rows = rows_of(("a", [1, 50], [1]), ("b", [2, 50], [1]), ("c", [3, 51], [1]))
    places, home, moved = misplaced(rows, chosen)  # c's would do, but is not chosen
    assert (places, len(home), len(moved)) == ([], 0, 0)


def test_no_row_becomes_longer_than_the_longest() -> None:
    rows = rows_of(("a", [1, *range(50, 57)], list(range(1, 8))), ("b", [1, 2, 3, 4, 60], [4]))
    _, _, moved = misplaced(rows, [0, 1])
    assert moved.lengths.tolist() == [8, 2]  # 4 + 7 would be 11
    assert moved.row(0)[0].tolist() == [4, *range(50, 57)]  # what is next to the answer stays


def test_the_last_answer_is_the_end_of_what_was_scored() -> None:
    actual = np.array([-1, -2, -3, -4, -5, -6], np.float32)
    nothing = np.zeros((6, 1))
    starts = np.array([0, 2, 3, 6], np.int64)
    scores = TopScores(starts, np.zeros(6, np.int32), actual, nothing, nothing)  # type: ignore[arg-type]
    assert last_nats(scores, [2, 0], [2, 2]).tolist() == [11, 3]
    assert last_nats(scores, [1], [1]).tolist() == [3]
