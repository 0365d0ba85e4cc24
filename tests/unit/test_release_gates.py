"""Gates, bootstrap and distances: numbers worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuneserve.config import GatesSection
from tuneserve.errors import GateRefused, RunFileError
from tuneserve.lm.scores import TOP, TopScores, divergence, flips, join_rows
from tuneserve.lm.structured import parses, recognize
from tuneserve.release import behaviour
from tuneserve.release.behaviour import (
    Answer,
    StructuredRow,
    gibberish,
    judge_answers,
    judge_canary,
    judge_structured,
    loops,
)
from tuneserve.release.bootstrap import Resampled
from tuneserve.release.decisions import rounded_down, rounded_up
from tuneserve.release.gate_report import markdown, write_report
from tuneserve.release.gates import Evidence, Gate, GateReport, judge
from tuneserve.release.judging import Measured
from tuneserve.runfile import parse_run
from tuneserve.thresholds import CanarySection

SOURCES = [f"chats.jsonl:{i}" for i in range(20)]


def evidence(count: int = 20, spread: float = 0.1, **means: float) -> Evidence:
    """Ten tokens a row; rows are harder and easier by turns, for all models alike."""
    tokens = np.full(count, 10.0)
    turns = np.where(np.arange(count) % 2, spread, -spread)
    nats = {name: tokens * (mean + turns) for name, mean in means.items() if "_" not in name}
    kl = {n[3:]: tokens * (m + turns / 100) for n, m in means.items() if n.startswith("kl_")}
    flip = {n[6:]: tokens * m for n, m in means.items() if n.startswith("flips_")}
    return Evidence(SOURCES[:count], tokens, nats, kl, flip)


def names(report: GateReport) -> dict[str, str]:
    return {gate.name: gate.decision for gate in report.gates}


def test_a_good_candidate_passes_every_gate() -> None:
    found = evidence(
        base=3.0, adapter=1.0, merged=1.05, served=1.1,
        kl_merge=0.05, kl_served=0.03, kl_rtn=0.04, flips_served=0.05, flips_rtn=0.04,
    )  # fmt: skip
    report = judge(GatesSection(), found)
    assert names(report) == dict.fromkeys(
        ["better than base", "merge keeps the tuning", "merged close to adapter",
         "served keeps the tuning", "close to merged", "same first choice"], "passed",
    )  # fmt: skip
    report.raise_if_refused("r1")
    text = markdown("Release r1", report)
    assert "| served | 1.1000 |" in text and "**Passed** all 6 gates" in text
    # (1.05 - 1.00) of the 2.0 gained, (1.10 - 1.05) of 1.95
    assert "lost 2.5% [2.5%, 2.5%]" in text and "lost 2.6% [2.6%, 2.6%]" in text


@pytest.mark.parametrize(
    ("changes", "gate", "setting"),
    [
        # 3.0 is not better than 3.0
        ({"served": 3.0}, "better than base", "gates.must_beat_base: false"),
        # 0.4 of 2.0 lost by merging: 20 %
        ({"merged": 1.4, "served": 1.4}, "merge keeps the tuning", "gates.max_merge_share: 0.2"),
        # 0.5 of 2.0 lost by quantizing: 25 %
        ({"served": 1.5}, "served keeps the tuning", "gates.max_quantize_share: 0.25"),
        # 0.12 > 2 x 0.04 + 0.02; (0.12 - 0.02) / 0.04 = 2.5
        ({"kl_merge": 0.12}, "merged close to adapter", "gates.max_merge_kl_over_rtn: 2."),
        # 0.1 > 1.5 x 0.04 + 0.02; (0.1 - 0.02) / 0.04 = 2, and the interval is a little wider
        ({"kl_served": 0.1}, "close to merged", "gates.max_kl_over_rtn: 2"),
        ({"flips_served": 0.2}, "same first choice", "gates.max_flips_over_rtn: 0.16"),
    ],
)
def test_each_fault_is_refused_by_its_own_gate(
    changes: dict[str, float], gate: str, setting: str
) -> None:
    good = {
        "base": 3.0, "adapter": 1.0, "merged": 1.0, "served": 1.0,
        "kl_served": 0.03, "kl_rtn": 0.04, "flips_served": 0.05, "flips_rtn": 0.04,
    }  # fmt: skip
    report = judge(GatesSection(), evidence(**{**good, **changes}))
    (refused,) = [g for g in report.refused if g.name == gate]
    assert refused.decision == "refused"
    assert refused.would_pass.startswith(setting)
    with pytest.raises(GateRefused, match=gate) as caught:
        report.raise_if_refused("r1")
    assert caught.value.exit_status == 4 and json.dumps(caught.value.details)
    hopeless = any(gate.hopeless for gate in report.refused)
    assert hopeless is (changes == {"served": 3.0})
    assert "try 16 bits too (`quantize.methods: [gptq, none]`)" in caught.value.hint
    with pytest.raises(GateRefused, match=gate) as caught:
        report.raise_if_refused("r1", advised=())
    assert "16 bits" not in caught.value.hint
    if not hopeless:
        assert "train longer, or change the thresholds in gates" in caught.value.hint
    if setting:
        name, value = refused.would_pass.removeprefix("gates.").split(": ")
        eased = judge(GatesSection.model_validate({name: value}), evidence(**{**good, **changes}))
        assert gate not in {g.name for g in eased.refused}  # what it says would pass, passes


def test_more_lost_than_was_gained_is_no_threshold_to_set() -> None:
    # 1.9 of 2.0 lost: 95 %; 2.0 of 2.0 and 3 of 2.0: all of it, and more
    for served, hopeless in ((2.9, False), (3.0, True), (4.0, True)):
        config = GatesSection(must_beat_base=False)
        report = judge(config, evidence(base=3.0, adapter=1.0, merged=1.0, served=served))
        (refused,) = report.refused
        assert refused.name == "served keeps the tuning" and refused.hopeless is hopeless
        with pytest.raises(GateRefused) as caught:
            report.raise_if_refused("r1", advised=("awq", "none"))
        hint, text = caught.value.hint, markdown("r1", report)
        assert "train longer" in hint and "`quantize.methods: [awq, none]`" in hint
        if hopeless:
            assert "gates.max_quantize_share" not in hint + text
            assert hint.endswith("; no sensible threshold passes served keeps the tuning")
            assert "No sensible threshold passes served keeps the tuning." in text
            assert caught.value.details["would_pass"] == report.would_pass == []
        else:
            assert report.would_pass == ["gates.max_quantize_share: 0.95"]
        assert GateReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_a_gain_that_may_be_chance_is_undecided() -> None:
    # half the conversations better by 1 nat a token, half worse by 0.8: better by 0.1 on the whole
    tokens = np.full(20, 10.0)
    base = tokens * 2
    served = base + tokens * np.where(np.arange(20) % 2, 0.8, -1.0)
    found = Evidence(SOURCES, tokens, {"base": base, "served": served})
    gate = judge(GatesSection(), found).gates[0]
    assert gate.decision == "undecided" and not gate.passed
    # half a width of 1.96 x 0.9 / sqrt(20) = 0.39; (0.39 / 0.1)^2 x 20 = 304
    said = int(gate.found.split("about ")[1].split()[0])
    assert 200 < said < 420
    # better by 0.01 on the whole: (0.43 / 0.01)^2 x 20 = 37,000 conversations are no advice
    served = base + tokens * np.where(np.arange(20) % 2, 0.98, -1.0)
    slight = judge(GatesSection(), Evidence(SOURCES, tokens, {"base": base, "served": served}))
    assert slight.gates[0].found.endswith(
        "20 held-out conversations are too few, far more would be needed"
    )
    eased = judge(GatesSection(allow_undecided=True), found).gates[0]
    assert eased.passed and eased.decision == "overridden" and "allow_undecided" in eased.found


def test_too_few_conversations_refuse_unless_allowed() -> None:
    found = evidence(count=5, base=3.0, served=1.0)
    gate = judge(GatesSection(), found).gates[0]
    assert gate.decision == "undecided" and "nothing is decided below 8" in gate.found
    assert "gates.allow_undecided: true" in gate.would_pass
    assert judge(GatesSection(allow_undecided=True), found).gates[0].passed
    assert judge(GatesSection(min_conversations=5), found).gates[0].decision == "passed"
    worse = evidence(count=5, base=3.0, served=3.1)  # the override does not pass what is worse
    assert judge(GatesSection(allow_undecided=True), worse).gates[0].decision == "refused"


def test_tuning_that_gained_nothing_has_no_share_to_keep() -> None:
    report = judge(GatesSection(), evidence(base=1.0, adapter=1.2, merged=1.2, served=1.2))
    (gate,) = [g for g in report.gates if g.name == "merge keeps the tuning"]
    assert gate.decision == "refused" and "gained nothing" in gate.found
    assert len(report.refused) > 1
    assert report.would_pass == ["gates.must_beat_base: false"]  # said once for all of them


def test_a_gain_that_is_not_asked_for_need_not_be_kept() -> None:
    """Tuning for a manner, on data that the base predicts as well: only closeness counts."""
    worse = {"base": 1.0, "adapter": 1.2, "merged": 1.2, "served": 1.2}
    near = {"kl_served": 0.03, "kl_rtn": 0.04, "flips_served": 0.05, "flips_rtn": 0.04}
    free = GatesSection(must_beat_base=False)
    report = judge(free, evidence(**worse, **near))
    assert not report.refused
    assert names(report) == dict.fromkeys(("close to merged", "same first choice"), "passed")
    said = [why for why in report.skipped if "gained nothing over the base" in why]
    assert [why.split(":")[0] for why in said] == [
        "merge keeps the tuning", "served keeps the tuning",
    ]  # fmt: skip
    far = judge(free, evidence(**worse, **{**near, "kl_served": 0.5}))
    assert [gate.name for gate in far.refused] == ["close to merged"]
    # where there is a gain it is kept, asked for or not
    kept = judge(free, evidence(base=3.0, adapter=1.0, merged=1.0, served=2.0))
    assert [gate.name for gate in kept.refused] == ["served keeps the tuning"]


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


def test_the_champion_is_compared_by_the_byte() -> None:
    size = np.full(12, 50.0)
    nats = {"champion": np.full(12, 10.0), "served": np.full(12, 10.5)}
    found = Evidence(
        SOURCES, np.full(20, 10.0), {"served": np.full(20, 1.0)},
        answer_sources=SOURCES[:12], answer_bytes=size, answer_nats=nats,
    )  # fmt: skip
    gate = judge(GatesSection(), found).gates[-1]
    assert gate.name == "not worse than the champion" and gate.passed
    assert "+0.0100" in gate.found  # 0.5 nats of 50 bytes
    strict = judge(GatesSection(max_over_champion=0.005), found).gates[-1]
    assert strict.decision == "refused" and strict.would_pass == "gates.max_over_champion: 0.01"


def test_a_champion_that_took_few_of_the_rows_leaves_it_undecided() -> None:
    nats = {"champion": np.full(3, 1.0), "served": np.full(3, 9.0)}
    found = Evidence(
        SOURCES, np.full(20, 10.0), {"served": np.full(20, 1.0)},
        answer_sources=SOURCES[:3], answer_bytes=np.full(3, 50.0), answer_nats=nats,
    )  # fmt: skip
    report = judge(GatesSection(min_conversations=8), found)
    (gate,) = report.refused
    assert gate.name == "not worse than the champion" and gate.decision == "undecided"
    assert "it could take 3 of 20 held-out conversations" in gate.found
    eased = judge(GatesSection(allow_undecided=True), found).gates[-1]
    assert eased.passed and eased.decision == "overridden" and "allow_undecided" in eased.found


@pytest.mark.parametrize("allowed", [False, True])
def test_a_champion_that_could_not_be_measured_leaves_it_undecided(allowed: bool) -> None:
    served = {"served": np.full(20, 1.0)}
    found = Evidence(
        SOURCES, np.full(20, 10.0), served, champion_unknown="r7 could not be measured (refused)"
    )
    report = judge(GatesSection(allow_undecided=allowed), found)
    gate = report.gates[-1]
    assert gate.name == "not worse than the champion" and gate.passed is allowed
    assert gate.decision == ("overridden" if allowed else "undecided")
    assert "r7 could not be measured (refused)" in gate.found
    if not allowed:
        with pytest.raises(GateRefused) as caught:
            report.raise_if_refused("r8")
        for setting in ("gates.allow_undecided: true", "gates.compare_champion: false"):
            assert setting in caught.value.hint
    nobody = judge(GatesSection(), Evidence(SOURCES, np.full(20, 10.0), served))
    assert not any("champion" in gate.name for gate in nobody.gates)  # nothing serves
    text = Evidence(SOURCES, np.full(20, 10.0), served, answer_nats={"champion": np.zeros(0)})
    silent = judge(GatesSection(), text).refused
    assert [g.decision for g in silent] == ["undecided"] and "has any text" in silent[0].found


def test_what_was_not_measured_is_said() -> None:
    report = judge(GatesSection(), evidence(served=1.0))
    assert len(report.skipped) == 7 and not report.gates
    off = judge(GatesSection(enabled=False), evidence(base=1.0, merged=1.0, served=9.0))
    assert not off.gates and "switched off" in off.skipped[0]
    assert "was not measured" in judge(GatesSection(), evidence(base=1.0)).skipped[0]


def test_a_report_survives_the_state_file_and_an_older_one_is_read() -> None:
    report = judge(GatesSection(), evidence(base=3.0, adapter=1.0, merged=1.0, served=2.0))
    again = GateReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report and again.refused
    old = {"name": "x", "passed": False, "found": "f", "wanted": "w"}
    assert GateReport.from_json({"losses": {}, "gates": [old]}).gates[0].decision == "refused"


def test_bootstrap_of_equal_differences_is_a_point() -> None:
    draws = Resampled(SOURCES, {"d": np.full(20, -2.0), "n": np.full(20, 2.0)})
    interval = draws.interval(lambda s: s["d"] / s["n"])
    assert (interval.mean, interval.low, interval.high) == (-1.0, -1.0, -1.0)


def test_bootstrap_bounds_are_near_the_normal_ones() -> None:
    # differences of +-1 nat, one token each, 100 conversations: the standard error is 0.1
    sources = [f"c:{i}" for i in range(100)]
    values = [1.0 if i % 2 else -1.0 for i in range(100)]

    def bounds(seed: int) -> Any:
        draws = Resampled(sources, {"d": values, "n": [1] * 100}, seed=seed)
        return draws.interval(lambda s: s["d"] / s["n"])

    interval = bounds(3)
    assert interval.mean == 0
    assert interval.low == pytest.approx(-0.196, abs=0.03)
    assert interval.high == pytest.approx(0.196, abs=0.03)
    assert bounds(3) == interval != bounds(4)


def test_rows_of_a_conversation_are_drawn_together() -> None:
    draws = Resampled(["a", "b"] * 5, {"d": [1.0, 3.0] * 5, "n": [1.0] * 10})
    assert draws.conversations == 2
    interval = draws.interval(lambda s: s["d"] / s["n"])
    # a and a, a and b, b and b: nothing in between
    assert (interval.low, interval.mean, interval.high) == (1.0, 2.0, 3.0)


def scores(*rows: dict[int, float], tokens: list[int]) -> TopScores:
    """One position a dictionary of probabilities; the likeliest first."""
    ids = np.full((len(rows), TOP), -1, np.int32)
    logs = np.full((len(rows), TOP), -np.inf, np.float32)
    actual = [math.log(row[token]) for row, token in zip(rows, tokens, strict=True)]
    for at, row in enumerate(rows):
        kept = sorted(row.items(), key=lambda pair: -pair[1])[:TOP]
        for place, (token, p) in enumerate(kept):
            ids[at, place], logs[at, place] = token, math.log(p)
    return TopScores(
        np.array([0, len(rows)]),
        np.array(tokens, np.int32),
        np.array(actual, np.float32),
        ids,
        logs,
    )


def test_divergence_of_whole_distributions_is_exact() -> None:
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.2, 2: 0.3, 3: 0.5}
    exact = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    found = divergence(scores(p, tokens=[2]), scores(q, tokens=[2]))
    assert found[0] == pytest.approx(exact, rel=1e-3)
    assert flips(scores(p, tokens=[2]), scores(q, tokens=[2])).tolist() == [True]
    assert divergence(scores(p, tokens=[2]), scores(p, tokens=[2]))[0] == pytest.approx(0, abs=1e-6)


def test_divergence_from_the_top_is_a_lower_bound_of_the_exact_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.full(300, 0.05)) + 1e-9, rng.dirichlet(np.full(300, 0.05)) + 1e-9
        q = 0.7 * p + 0.3 * q
        p, q = p / p.sum(), q / q.sum()
        token = int(rng.integers(300))
        exact = float((p * np.log(p / q)).sum())
        found = divergence(
            scores(dict(enumerate(p)), tokens=[token]), scores(dict(enumerate(q)), tokens=[token])
        )[0]
        assert 0 <= found <= exact + 1e-5


def test_divergence_without_a_common_token_is_of_the_token_and_the_rest() -> None:
    p = scores({5: 0.9, **{i: 0.1 / 30 for i in range(100, 130)}}, tokens=[5])
    q = scores({7: 0.9, **{i: 0.1 / 30 for i in range(200, 230)}, 5: 0.001}, tokens=[5])
    # two outcomes: token 5 (0.9 and 0.001), all others (0.1 and 0.999)
    exact = 0.9 * math.log(0.9 / 0.001) + 0.1 * math.log(0.1 / 0.999)
    assert divergence(p, q)[0] == pytest.approx(exact, rel=1e-3)
    with pytest.raises(ValueError, match="different tokens"):
        divergence(p, scores({6: 1.0}, tokens=[6]))


def test_scores_are_kept_and_read_back(tmp_path: Path) -> None:
    rows = join_rows([scores({1: 0.5, 2: 0.5}, tokens=[1]), scores({3: 1.0}, tokens=[3])])
    for name in ("a", "b"):
        rows.save(tmp_path / f"{name}.npz", rtn_kl=np.array([0.1, 0.2]))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    again, beside = TopScores.load(tmp_path / "a.npz")
    assert again.nats().tolist() == rows.nats().tolist() == pytest.approx([math.log(2), 0.0])
    assert beside["rtn_kl"].tolist() == [0.1, 0.2]


def answer(*tokens: str, ended: bool = True, nats: float = 0.1) -> Answer:
    return Answer("".join(tokens), ended, tokens, [-nats] * len(tokens))


def test_loops_are_one_token_or_a_phrase_to_the_end() -> None:
    assert loops(answer(*["!"] * 16))
    assert not loops(answer(*["!"] * 15))
    phrase = ["I", " do", " not", " know", "."]
    assert loops(answer("Well", *phrase * 6, ended=False))
    assert not loops(answer("Well", *phrase * 6))  # it came to an end
    assert not loops(answer(*phrase, *"abcdefghijklmnop", ended=False))


def test_gibberish_is_broken_text_or_a_guess() -> None:
    assert not gibberish(answer("All", " well", "\n", "\u4f60\u597d"), 2.5)
    assert gibberish(answer("\ufffd\x01", "a"), 2.5)
    assert gibberish(answer("kjh", " qq", nats=2.6), 2.5)
    cut = Answer("caf\ufffd", False, ["caf", "\ufffd"], [-0.1, -0.1])
    assert not gibberish(cut, 2.5)  # the limit fell between two bytes
    assert gibberish(answer(), 2.5) and gibberish(answer("\n", "\n", " "), 2.5)  # says nothing


def test_a_model_that_ends_every_answer_at_once_is_refused() -> None:
    """It ends, it does not loop, and it is sure of it."""
    gates = judge_answers(GatesSection(), [answer()] * 8)
    assert [gate.passed for gate in gates] == [True, True, False]
    assert "8 of 8 greedy answers are no text" in gates[2].found


def test_tokens_of_answers_are_told_apart_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of characters that the tokenizer does not know whole are the same replacement text."""
    asked: list[Any] = []

    def post(_: Path, __: str, body: Any, *___: Any) -> Any:
        asked.append(body)
        tokens = [f"token_id:{200 + n}" for n in range(18)]
        found = {"tokens": tokens, "token_logprobs": [-0.1] * 18}
        return {"choices": [{"text": "\u0f42" * 6, "finish_reason": "stop", "logprobs": found}]}

    monkeypatch.setattr(behaviour, "_post", post)
    (said,) = behaviour.ask_ids(Path("s"), "m", [([1, 2], 32)])
    assert asked[0]["return_tokens_as_token_ids"] is True and asked[0]["temperature"] == 0
    assert said.ended and len(said.tokens) == 18
    assert not loops(said) and not gibberish(said, 2.5)


def test_answers_are_judged_by_shares() -> None:
    good, endless = answer("fine"), answer("on", " and", " on", ended=False)
    gates = judge_answers(GatesSection(), [good, good, endless])
    assert [gate.passed for gate in gates] == [True, True, True]
    gates = judge_answers(GatesSection(min_ended=0.9), [good, good, endless])
    assert [g.name for g in gates if not g.passed] == ["answers end"]
    assert gates[0].would_pass == "gates.min_ended: 0.66" and "on and on" in gates[0].found
    assert judge_answers(GatesSection(), []) == []


def test_shares_keep_two_digits_and_their_side() -> None:
    """29 of 100 is 0.29 both ways, though 0.29 x 100 is 28.999999999999996."""
    for value, down, up in (
        (29 / 100, "0.29", "0.29"), (7 / 100, "0.07", "0.07"), (2 / 3, "0.66", "0.67"),
        (1 / 3, "0.33", "0.34"), (1, "1", "1"), (0, "0", "0"), (0.996, "0.99", "1"),
        (-0.0123, "-0.013", "-0.012"), (1234.0, "1200", "1300"),
    ):  # fmt: skip
        assert (rounded_down(value), rounded_up(value)) == (down, up)


def test_what_would_pass_passes() -> None:
    """Also where a share has more than two digits: a third, three eighths, 29 of 100."""
    good, bad = answer("fine"), Answer("x" * 40, False, ["x"] * 40, [-9.0] * 40)
    call = StructuredRow("c:1", 0, "json", [1], 8, "{}", True)
    for count in (1, 2, 3, 6, 7, 8, 11, 16, 100):
        for wrong in range(1, count + 1):
            said = [bad] * wrong + [good] * (count - wrong)
            strict = {"min_ended": 1, "max_looping": 0, "max_gibberish": 0}
            gates = judge_answers(GatesSection.model_validate(strict), said)
            lost = judge_structured(
                GatesSection(),
                [call] * count,
                [answer("no")] * wrong + [answer("{}")] * (count - wrong),
            )
            assert lost is not None
            refused = [*gates, lost]
            assert [gate.passed for gate in refused] == [False] * 4
            advised = dict(gate.would_pass.removeprefix("gates.").split(": ") for gate in refused)
            config = GatesSection.model_validate({k: float(v) for k, v in advised.items()})
            again = judge_structured(
                config, [call] * count, [answer("no")] * wrong + [answer("{}")] * (count - wrong)
            )
            assert again is not None and again.passed, (count, wrong, advised)
            assert all(gate.passed for gate in judge_answers(config, said)), (count, wrong, advised)


def test_structured_answers_must_parse_as_often_as_before() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert recognize(call) == ("tool_call", None) and recognize('{"a": 1}') == ("json", None)
    assert recognize("The {thing} is red.") is None
    assert parses(call, "tool_call") and not parses(call[:-25], "tool_call")
    assert not parses("```json {}", "json")
    rows = [
        StructuredRow(f"c:{i}", i, "json", [1], 8, "{}" if i else "no", bool(i)) for i in range(4)
    ]
    same = [answer("no"), answer("{}"), answer("[1]"), answer("{}")]
    gate = judge_structured(GatesSection(), rows, same)
    assert gate is not None and gate.passed and "3 of 4 parse, 3" in gate.found
    fewer = judge_structured(GatesSection(), rows, [answer("no"), answer("{"), *same[2:]])
    assert fewer is not None and not fewer.passed and "c:1" in fewer.found
    assert fewer.would_pass == "gates.max_parse_loss: 0.25"
    assert judge_structured(GatesSection(), [], []) is None


def test_calls_are_held_against_the_chats_tools() -> None:
    told = "<function=look><parameter=at>x</parameter></function>"
    tools: dict[str, dict[str, str] | None] = {"look": {"at": "string"}}
    row = StructuredRow("c:1", 0, "xml_call", [1], 8, told, True, tools)
    for text, good in (
        (told, True),
        (told.replace("look", "see"), False),
        (told.replace("=at", "=to"), False),
    ):
        gate = judge_structured(GatesSection(), [row], [answer(text)])
        assert gate is not None and gate.passed is good, text


def test_canaries_say_what_they_miss() -> None:
    canary = CanarySection(
        prompt="What colour is the lamp?",
        contains=["amber"],
        matches=[r"lamp is \w+\."],
        lacks=["I"],
    )
    assert judge_canary(canary, Answer("The lamp is amber.", True)).passed
    gate = judge_canary(canary, Answer("I think red.", True))
    assert not gate.passed and gate.name == "canary 'What colour is the lamp?'"
    for part in ("lacks 'amber'", "does not match", "holds 'I'"):
        assert part in gate.found
    assert "cut" not in gate.found
    for asked, why in ((None, "256 tokens (its max_tokens)"), (9, "9 tokens, by serve.max_tokens")):
        cut = judge_canary(canary, Answer("I think", False), asked)
        assert f"it was cut after {why}" in cut.found
        assert "cut" not in judge_canary(canary, Answer("The lamp is amber.", False), asked).found


def test_canaries_are_checked_with_the_run_file() -> None:
    run = {"name": "x", "model": {"base": "b"}, "data": {"train": "t"}}
    with pytest.raises(RunFileError) as caught:
        parse_run(
            {**run, "gates": {"canaries": [{"prompt": "a", "matches": "("}, {"prompt": "b"}]}}
        )
    assert "no regular expression" in str(caught.value)
    assert "says nothing about the answer" in str(caught.value)


def test_every_threshold_has_a_sentence() -> None:
    for section in (GatesSection, CanarySection):
        for name, field in section.model_fields.items():
            assert field.description and field.description.endswith("."), name


def test_the_report_has_pictures_and_all_rungs(tmp_path: Path) -> None:
    report = judge(
        GatesSection(), evidence(base=3.0, merged=1.0, served=2.9, kl_served=1.0, kl_rtn=0.1)
    )
    report.rungs = [
        {"method": "gptq", "decision": "refused", "reason": "a | b\nc",
         "would_pass": "gates.max_quantize_share: 0.31"},
        {"method": "awq", "decision": "passed", "reason": ""},
    ]  # fmt: skip
    model = tmp_path / "model"
    model.mkdir()
    (model / "quant_loss.png").write_bytes(b"png")
    out = tmp_path / "out"
    out.mkdir()
    rng = np.random.default_rng(0)
    measured = Measured(rng.exponential(0.1, 500), rng.exponential(0.02, 500))
    text = write_report(out, "Release r1", report, measured, model).read_text()
    assert "**Refused** by 2 of 3 gates: served keeps the tuning, close to merged." in text
    assert "| export | decision | why | would have passed with |" in text
    assert "| gptq | refused | a \\| b c | gates.max_quantize_share: 0.31 |" in text
    assert "| awq | passed |  |  |" in text
    for name in ("losses.png", "kl.png", "quant_loss.png"):
        assert f"]({name})" in text and (out / name).is_file()
    for name in ("losses.png", "kl.png"):
        from PIL import Image

        with Image.open(out / name) as picture:
            assert picture.mode == "RGBA"  # no ground of its own: light and dark pages alike
            assert picture.getpixel((1, 1))[3] == 0


def test_an_empty_report_is_readable() -> None:
    text = markdown("Release r1", GateReport({}, [Gate("parity", False, "x", "y", "refused")]))
    assert "**Refused** by 1 of 1 gates: parity." in text
    call = Gate("a", True, "'<tool_call> a|b'", "y")
    assert r"| a | passed | '\<tool_call> a\|b' | y |" in markdown("r", GateReport({}, [call]))
