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
    assert "by ranks of how much 0.5% [" in gate.found  # 1 of 210, the sum of 1 to 20
    by_chance = asked(base, [-1.0, 1.0] * 10)
    chance, _ = questions(by_chance)
    assert chance.decision == "refused" and "50.0%" in chance.found
    assert chance.would_pass == "gates.max_misplaced: 0.5"
    assert questions(by_chance, max_misplaced=0.5)[0].passed
    assert questions(asked(base, [-1.0] * 20), max_misplaced=1)[0].passed
    assert questions(asked(base, [0.0] * 20))[0].decision == "refused"  # no question is heard


def test_near_misses_are_no_chance() -> None:
    """Three of ten are as likely behind another question, as the labels of a hard task are: by
    their number chance could do it, 30 % and 1.96 x sqrt(0.3 x 0.7 / 20) = 20 %, but the seven
    others are told apart far more widely."""
    base = [10.0] * 20
    near = asked(base, [-0.1] * 6 + [9.0] * 14)
    gate, _ = questions(near)  # the ranks 1 to 6 are 21 of 210
    assert gate.passed and "30.0%" in gate.found and "10.0% [" in gate.found
    wide = asked(base, [-9.0] * 6 + [0.1] * 14)  # the ranks 15 to 20 are 105 of 210
    assert questions(wide)[0].decision in ("refused", "undecided")
    # Eight conversations, the fewest: two near misses pass, for ranks 1 and 2 are 3 of 36.
    few = asked(base[:8], [-0.1, -0.2, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert questions(few)[0].passed
    # Three narrow ones out of eight and three wide ones leave chance in.
    assert not questions(asked(base[:8], [-4.0, -5.0, -6.0, 1.0, 2.0, 3.0, 7.0, 8.0]))[0].passed


def test_questions_must_count_half_as_much_as_with_the_base() -> None:
    base = [8.0, 12.0] * 10
    _, gate = questions(asked(base, [0.75 * b for b in base]))
    assert gate.passed and "by 10.00 and 7.50 nats" in gate.found
    assert "lost 25.0% [25.0%, 25.0%]" in gate.found
    assert questions(asked(base, [2 * b for b in base]))[1].passed
    less = asked(base, [0.25 * b for b in base])
    _, gate = questions(less)
    assert gate.decision == "refused" and gate.would_pass == "gates.max_heed_share: 0.75"
    assert questions(less, max_heed_share=0.75)[1].passed
    # Half of them keep all and half of them nothing: 50 % [28 %, 72 %].
    halved = asked([10.0] * 20, [10.0, 0.01] * 10)
    assert questions(halved, max_heed_share=0.4)[1].decision == "refused"
    assert questions(halved, max_heed_share=0.6)[1].passed
    free = judge(GatesSection(max_heed_share=1), asked(base, [-1.0] * 20))
    assert "questions count as before: not asked for" in "".join(free.skipped)
    assert [g.name for g in free.gates] == ["answers follow questions"]


def test_what_may_be_nothing_is_not_lost() -> None:
    """One answer out of twenty is most of the base's nats: 1 - 10 / (19 x 0.5 + 40) = 79.8 % are
    lost, but none in the third of the draws that it is not in."""
    base, merged = [0.5] * 19 + [40.0], [0.5] * 20
    gate = questions(asked(base, merged))[1]
    assert gate.passed and "lost 79.8% [0.0%" in gate.found


def test_a_base_that_tells_no_questions_apart_is_no_measure() -> None:
    report = judge(GatesSection(), asked([5.0, -5.0] * 10, [9.0] * 20))
    assert [g.name for g in report.gates] == ["answers follow questions"]
    assert "questions count as before: to the base itself" in "".join(report.skipped)


def test_answers_that_are_all_alike_tell_nothing_about_questions() -> None:
    alike = judge(GatesSection(), asked([], []))
    assert "answers follow questions: 0 of 20 held-out conversations" in alike.skipped[1]
    few = judge(GatesSection(), asked([1.0] * 7, [-1.0] * 7))
    assert "7 of 20 held-out conversations have a partner with another" in few.skipped[1]
    older = judge(GatesSection(), evidence(served=1.0))
    assert "did not try answers behind other questions" in older.skipped[1]
    assert not alike.gates and not few.gates and not older.gates
