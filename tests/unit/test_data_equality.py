"""What makes two conversations the same, which keep together, and what a split must not leak."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import data_bases as bases
from tuneserve.data.conversation import BEGINNING_BYTES, digests
from tuneserve.data.formats import convert, detect
from tuneserve.data.split import begun_by_trained, families, held_out

INDENTED = ("if a:\n    b()\nc()", "if a:\n    b()\n    c()")


def whole(row: dict[str, Any]) -> bytes:
    """A row's sixteen bytes."""
    return digests(convert(row, detect(row)))[0]


def ask(answer: str, question: str = "What is it?", **fields: Any) -> dict[str, Any]:
    """A row of one question and answer."""
    row = bases.chat(question, answer)
    row["messages"][1].update(fields)
    return row


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ask("A lamp."), ask(" A lamp. \n")),  # A14
        (ask("A lamp."), ask("A lamp.", "\tWhat is it?")),
        (
            ask("A lamp."),
            {
                "messages": [
                    {"content": "What is it?", "role": "user"},
                    {"content": "A lamp.", "role": "assistant"},
                ]
            },
        ),
        (ask("A lamp."), {"completion": "A lamp.", "prompt": "What is it?"}),
        (ask("one\ntwo"), ask("one\r\ntwo\r\n")),
        (ask("caf\u00e9"), ask("cafe\u0301")),
        (ask("a lamp"), ask("\ufeffa\u200b la\u00admp\u2060")),
        (ask("x", reasoning="hm"), ask("x", reasoning_content="hm\n")),
    ],
)
def test_a14_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert whole(one) == whole(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ask(INDENTED[0]), ask(INDENTED[1])),
        (ask("def F(): X=1"), ask("def f(): x=1")),
        (ask("ma\u00dfe"), ask("masse")),
        (ask("a  b"), ask("a b")),
        (ask("a\u00a0 b"), ask("a b")),
        (ask("a\nb"), ask("a b")),
        (ask("x", reasoning="two and two"), ask("x", reasoning="one and three")),
        (ask("x", reasoning="hm"), ask("x")),
        (ask("A lamp."), ask("A fern.")),
    ],
)
def test_not_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert whole(one) != whole(other)


def test_prompts_and_beginnings() -> None:
    def made(*texts: str) -> tuple[bytes, bytes, bytes]:
        return digests(convert(bases.chat(*texts), "messages"))

    short, long = made("u1", "a1"), made("u1", "a1", "u2", "a2", "u3", "a3")
    middle = made("u1", "a1", "u2", "a2")
    assert short[2] == b"" and len(long[2]) == 2 * BEGINNING_BYTES
    assert long[2] == short[0][:BEGINNING_BYTES] + middle[0][:BEGINNING_BYTES]
    other = made("u1", "another")
    assert other[1] == short[1] and other[0] != short[0]  # one prompt: one side
    assert made("u1", "a1", "u2", "else")[1] == middle[1] != short[1]
    # Tools are part of what is equal and of what begins alike, not of the prompt.
    row = {**bases.chat("u1", "a1", "u2", "a2"), "tools": [{"name": "f"}]}
    begin = {**bases.chat("u1", "a1"), "tools": [{"name": "f"}]}
    with_tools = digests(convert(row, "messages"))
    assert with_tools[2] == whole(begin)[:8] != short[0][:8]
    assert with_tools[1] == middle[1]


Words = np.uint64


def test_a_conversation_keeps_beside_those_that_begin_with_it() -> None:
    # 10 = (u1, a1); 20 = (u1, a1, u2, a2); 30 = (.., u3, a3); 40 has a beginning nobody else has.
    others = list(range(50, 57))  # three may follow of twelve
    groups = np.array([1, 2, 3, 4, 2, *others], dtype=Words)
    wholes = np.array([10, 20, 30, 40, 21, *others], dtype=Words)
    beginnings = np.array([10, 10, 20, 39, 10], dtype=Words)
    counts = np.array([0, 1, 2, 1, 1, *[0] * 7])
    found, trained = families(groups, wholes, beginnings, counts)
    assert found.tolist() == [1, 1, 1, 4, 1, *others] and not trained.any()
    assert groups.tolist() == [1, 2, 3, 4, 2, *others]
    none = np.zeros(0, dtype=Words)
    found, trained = families(groups, wholes, none, np.zeros(12, dtype=np.int32))
    assert found.tolist() == groups.tolist() and not trained.any()
    assert families(none, none, none, np.zeros(0, dtype=np.int32))[0].tolist() == []


def test_a_greeting_that_all_begin_with_does_not_make_one_group_of_all() -> None:
    count = 100
    groups = np.array([7, *range(1000, 1000 + count), 7], dtype=Words)
    wholes = np.array([10, *range(2000, 2000 + count), 11], dtype=Words)
    beginnings = np.full(count, 10, dtype=Words)
    found, trained = families(groups, wholes, beginnings, np.array([0] + [1] * count + [0]))
    assert found.tolist() == groups.tolist()
    # The greeting is trained on, with the other answer to its prompt: no held-out row begins so.
    assert np.flatnonzero(trained).tolist() == [0, count + 1]


def test_held_out_wholes_are_looked_for_in_trained_beginnings() -> None:
    wholes = np.array([10, 20, 30, 40], dtype=Words)
    from_eval = np.array([False, False, True, True])
    beginnings = np.array([30, 31, 40], dtype=Words)  # 40 begins only a held-out one
    found = begun_by_trained(wholes, beginnings, np.array([0, 2, 1, 0]), from_eval)
    assert found == ({2: 1}, [])


def test_a_held_out_greeting_is_no_overlap_of_all() -> None:
    # 7 and 8 are held out; of 20 trained ones 6 begin with 7 (more than a quarter), 5 with 8.
    wholes = np.array([7, 8, *range(100, 120)], dtype=Words)
    from_eval = np.arange(22) < 2
    beginnings = np.array([7] * 6 + [8] * 5, dtype=Words)
    counts = np.array([0, 0, *[1] * 11, *[0] * 9])
    assert begun_by_trained(wholes, beginnings, counts, from_eval) == ({1: 8}, [0])
    # The same trained conversation many times over is one that begins so.
    wholes[2:8] = 100
    assert begun_by_trained(wholes, beginnings, counts, from_eval)[0][0] == 2


def arrays(rows: list[tuple[str, ...]]) -> tuple[Any, Any, Any, Any]:
    """The arguments of `families` for conversations of turns."""
    made = [digests(convert(bases.chat(*row), "messages")) for row in rows]
    wholes = np.frombuffer(b"".join(d[0][:8] for d in made), dtype=Words)
    prompts = np.frombuffer(b"".join(d[1] for d in made), dtype=Words)
    beginnings = np.frombuffer(b"".join(d[2] for d in made), dtype=Words)
    return prompts, wholes, beginnings, np.array([len(d[2]) // 8 for d in made])


def greeted() -> list[tuple[str, ...]]:
    """200 chats whose first answers to one greeting differ, and each with its first exchange."""
    chats = [("Hello", f"Hello customer {i}", f"ask {i}", f"say {i}") for i in range(200)]
    return [*chats, *(chat[:2] for chat in chats)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("others", [0, 50])
def test_answers_to_one_greeting_do_not_make_one_group_of_all(others: int, seed: int) -> None:
    rows = [*greeted(), *((f"question {i}", f"answer {i}") for i in range(others))]
    made, trained = families(*arrays(rows))
    assert np.flatnonzero(trained).tolist() == list(range(200, 400))
    assert len(np.unique(made[~trained])) == 200 + others
    count = int(held_out(made[~trained], seed, 0.1).sum())
    # Binomial: three deviations of 200 or 250 draws of a tenth, 4.2 and 4.7.
    assert abs(count - (200 + others) / 10) < 15


def test_a_greeting_of_few_conversations() -> None:
    first = ("Hello", "Hello! How can I help you today?")
    made, trained = families(*arrays([first, *((*first, f"u{i}", f"a{i}") for i in range(20))]))
    assert trained.tolist() == [True] + [False] * 20
    assert len(np.unique(made[1:])) == 20


def test_two_conversations_of_three_keep_together() -> None:
    made, trained = families(*arrays([("u", "a"), ("u", "a", "v", "b"), ("x", "y")]))
    assert made[0] == made[1] != made[2] and not trained.any()


@pytest.mark.parametrize("seed", range(20))
def test_no_held_out_conversation_begins_a_trained_one(seed: int) -> None:
    """Random trees of turns, against a comparison of the texts themselves."""
    rng = np.random.default_rng(seed)
    rows = sorted(
        {
            tuple(f"{kind}{rng.integers(2)}" for _ in range(rng.integers(1, 4)) for kind in "ua")
            for _ in range(60)
        }
    )
    # Beside many others nothing is a greeting; alone, the first exchanges are.
    rows += [(f"x{i}", "y") for i in range(400)] if seed % 2 else []
    groups, trained = families(*arrays([(f"{seed} {row[0]}", *row[1:]) for row in rows]))
    assert trained.any() == (seed % 2 == 0)
    out = np.zeros(len(rows), dtype=bool)
    out[~trained] = held_out(groups[~trained], seed, 0.3)
    assert out.any() and not out.all()
    for a, one in enumerate(rows):
        for b, other in enumerate(rows):
            if one[:-1] == other[:-1]:
                assert out[a] == out[b], (one, other)
            if other[: len(one)] == one and not trained[a]:
                assert out[a] == out[b], (one, other)
