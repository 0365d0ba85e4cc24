"""Answers behind other conversations' questions: which, behind what, and where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from tuneserve.evaluate.misplaced import answer_nats, misplaced
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


def test_each_answer_stands_behind_another_question() -> None:
    rows = rows_of(
        ("a", [1, 2, 3, 50, 51, 9], [3, 4]),  # something after the end token is no answer
        ("b", [4, 5, 60, 61, 62], [2, 3, 4]),
    )
    tried = misplaced(rows, [0, 1])
    assert listed(tried.home) == [
        ("a", [1, 2, 3, 50, 51], [IGNORED] * 3 + [50, 51]),
        ("b", [4, 5, 60, 61, 62], [IGNORED] * 2 + [60, 61, 62]),
    ]
    assert listed(tried.moved) == [
        ("a", [4, 5, 50, 51], [IGNORED, IGNORED, 50, 51]),
        ("b", [1, 2, 3, 60, 61, 62], [IGNORED] * 3 + [60, 61, 62]),
    ]


def test_the_longest_answer_is_tried() -> None:
    """Thanks, and the answer to them, end many a conversation."""
    rows = rows_of(
        ("a", [1, 50, 2, 51, 52, 53, 3, 54], [1, 3, 4, 5, 7]),
        ("b", [4, 60, 61, 5, 54], [1, 2, 4]),
    )
    tried = misplaced(rows, [0, 1])
    assert listed(tried.home)[0][1:] == ([1, 50, 2, 51, 52, 53], [IGNORED] * 3 + [51, 52, 53])
    assert listed(tried.moved)[0][1:] == ([4, 51, 52, 53], [IGNORED] + [51, 52, 53])
    assert tried.begins == [1, 0]


def test_the_other_row_is_of_another_conversation_with_another_answer_and_question() -> None:
    rows = rows_of(
        ("a", [1, 50], [1]),
        ("a", [2, 51], [1]),  # of the same conversation
        ("b", [3, 50], [1]),  # the same answer
        ("c", [1, 52], [1]),  # the same question
        ("d", [6, 54], [1]),
    )
    tried = misplaced(rows, range(5))
    assert tried.places == [0, 1, 2, 3, 4]
    assert [ids for _, ids, _ in listed(tried.moved)] == [
        [6, 50],  # d's: neither b's nor c's would do
        [1, 51],  # c's, which is the first half way round
        [2, 50],  # a's second: d's is lent, and a's first has the same answer
        [3, 52],  # b's: a's first has the same question
        [1, 54],  # what is left
    ]


def test_as_many_answers_come_before_where_there_is_such_a_row() -> None:
    rows = rows_of(
        ("a", [1, 50, 51], [1, 2]),
        ("b", [2, 52, 3, 53, 54], [1, 3, 4]),
        ("c", [4, 55, 56], [1, 2]),
        ("d", [5, 57, 6, 58, 59], [1, 3, 4]),
    )
    tried = misplaced(rows, range(4))
    assert [ids for _, ids, _ in listed(tried.moved)] == [
        [4, 50, 51], [5, 57, 6, 53, 54], [1, 55, 56], [2, 52, 3, 58, 59],
    ]  # fmt: skip


def test_a_question_is_lent_once() -> None:
    """One row of a rare label would otherwise stand behind all others, and decide alone."""
    rows = rows_of(*((name, [at, 50], [1]) for at, name in enumerate("abcde")), ("f", [9, 51], [1]))
    tried = misplaced(rows, range(6))
    assert tried.places == [0, 5] and tried.moved.sources == ["a", "f"]
    assert [ids for _, ids, _ in listed(tried.moved)] == [[9, 50], [2, 51]]


@pytest.mark.parametrize("chosen", [[], [0], [0, 1]])
def test_where_all_answers_are_alike_none_is_moved(chosen: list[int]) -> None:
    rows = rows_of(("a", [1, 50], [1]), ("b", [2, 50], [1]), ("c", [3, 51], [1]))
    tried = misplaced(rows, chosen)  # c's would do, but is not chosen
    assert (tried.places, len(tried.home), len(tried.moved)) == ([], 0, 0)


def test_no_row_becomes_longer_than_the_longest() -> None:
    rows = rows_of(("a", [1, *range(50, 57)], list(range(1, 8))), ("b", [1, 2, 3, 4, 60], [4]))
    moved = misplaced(rows, [0, 1]).moved
    assert moved.lengths.tolist() == [8, 2]  # 4 + 7 would be 11
    assert moved.row(0)[0].tolist() == [4, *range(50, 57)]  # what is next to the answer stays


def test_an_answer_is_a_part_of_what_was_scored() -> None:
    rows = rows_of(
        ("a", [1, 50, 51], [1, 2]), ("b", [2, 50, 3, 52, 53, 4, 54], [1, 3, 4, 6]),
    )  # fmt: skip
    tried = misplaced(rows, [1, 0])
    assert (tried.places, tried.begins) == ([0, 1], [1, 0])
    actual = np.array([-1, -2, -3, -4, -5, -6], np.float32)
    nothing = np.zeros((6, 1))
    starts = np.array([0, 4, 6], np.int64)
    scores = TopScores(starts, np.zeros(6, np.int32), actual, nothing, nothing)  # type: ignore[arg-type]
    assert answer_nats(scores, tried).tolist() == [2 + 3, 5 + 6]
