"""Gates that ask whether answers depend on what is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gate_evidence import SOURCES, evidence
from tuneserve.config import GatesSection
from tuneserve.release.gates import Evidence, Gate, judge


def asked(base: list[float], merged: list[float], sources: list[str] | None = None) -> Evidence:
    """Twenty conversations held out, and by how much answers were likelier at their questions."""
    own = np.full(len(base), 30.0)
    nats = {"base_own": own, "base_other": own + base,
            "merged_own": own, "merged_other": own + merged}  # fmt: skip
    return replace(
        evidence(served=1.0), question_sources=SOURCES[: len(base)] if sources is None else sources,
        questions=nats,
    )  # fmt: skip


def questions(found: Evidence, **gates: Any) -> list[Gate]:
    made = judge(GatesSection.model_validate(gates), found).gates
    assert [g.name for g in made] == ["answers follow questions", "questions count as before"]
    return made


def test_answers_must_be_likelier_at_their_own_question() -> None:
    base = [10.0] * 20
    gate, _ = questions(asked(base, [10.0] * 19 + [0.0]))  # one of twenty is no likelier
    assert gate.passed and gate.found.startswith("1 of 20 answers are as likely behind")
    assert "5.0% [0.0%, 15.0%]" in gate.found  # binomial: 0 to 3 of 20
    by_chance = asked(base, [-1.0, 1.0] * 10)
    chance, _ = questions(by_chance)
    assert chance.decision == "refused" and "50.0%" in chance.found
    advised = float(chance.would_pass.removeprefix("gates.max_misplaced: "))
    assert 0.6 < advised < 0.8  # 0.5 and 1.96 x 0.5 / sqrt(20) = 0.22
    assert questions(by_chance, max_misplaced=advised)[0].passed
    # 30 % and 1.96 x sqrt(0.3 x 0.7 / 20) = 20 %: chance would do it as well
    assert questions(asked(base, [-1.0] * 6 + [9.0] * 14))[0].decision == "undecided"
    assert questions(asked(base, [-1.0] * 20), max_misplaced=1)[0].passed


def test_questions_must_count_as_much_as_with_the_base() -> None:
    base = [8.0, 12.0] * 10
    _, gate = questions(asked(base, [0.75 * b for b in base]))
    assert gate.passed and "by 10.00 and 7.50 nats" in gate.found
    assert "lost 25.0% [25.0%, 25.0%]" in gate.found
    assert questions(asked(base, [2 * b for b in base]))[1].passed
    less = asked(base, [0.25 * b for b in base])
    _, gate = questions(less)
    assert gate.decision == "refused" and gate.would_pass == "gates.max_heed_share: 0.75"
    assert questions(less, max_heed_share=0.75)[1].passed
    # half of them keep all and half of them nothing: 50 % [28 %, 72 %]
    assert questions(asked([10.0] * 20, [10.0, 0.01] * 10), max_heed_share=0.6)[1].decision == (
        "undecided"
    )
    free = judge(GatesSection(max_heed_share=1), asked(base, [-1.0] * 20))
    assert "questions count as before: not asked for" in "".join(free.skipped)
    assert [g.name for g in free.gates] == ["answers follow questions"]


def test_a_base_that_tells_no_questions_apart_is_no_measure() -> None:
    report = judge(GatesSection(), asked([5.0, -5.0] * 10, [9.0] * 20))
    assert [g.name for g in report.gates] == ["answers follow questions"]
    assert "questions count as before: to the base itself" in "".join(report.skipped)


def test_answers_that_are_all_alike_tell_nothing_about_questions() -> None:
    alike = judge(GatesSection(), asked([], []))
    assert "answers follow questions: 0 of 20 held-out conversations" in alike.skipped[1]
    few = judge(GatesSection(), asked([1.0] * 7, [-1.0] * 7))
    assert "7 of 20 held-out conversations have another answer" in few.skipped[1]
    older = judge(GatesSection(), evidence(served=1.0))
    assert "did not try answers behind other questions" in older.skipped[1]
    assert not alike.gates and not few.gates and not older.gates
