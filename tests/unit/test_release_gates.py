"""Gates on losses and distances: numbers worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gate_evidence import SOURCES, evidence
from tuneserve.config import GatesSection
from tuneserve.errors import GateRefused
from tuneserve.release.gate_report import markdown
from tuneserve.release.gates import Evidence, GateReport, judge
from tuneserve.thresholds import CanarySection


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
    assert caught.value.hint.startswith("what was serving goes on serving; ")
    with pytest.raises(GateRefused, match=gate) as caught:
        report.raise_if_refused("r1", advised=(), serves=False, report="/here/gates.md")
    assert caught.value.hint.startswith("nothing serves; train longer")
    assert caught.value.hint.endswith("; the whole report: /here/gates.md")
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


def test_every_threshold_has_a_sentence() -> None:
    for section in (GatesSection, CanarySection):
        for name, field in section.model_fields.items():
            assert field.description and field.description.endswith("."), name
