"""Promotion gates: compare numbers that were measured elsewhere, and say the decision in words.

Pure. A gate passes when the whole interval of its number lies within the threshold, is refused when
the number itself does not, and is undecided, which refuses as well, when too few conversations were
held out to tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tuneserve.release.bootstrap import Resampled, Sums
from tuneserve.release.bounded import bounded
from tuneserve.release.decisions import Gate, GateReport, rounded_up
from tuneserve.release.questions import FOLLOW, judge_questions
from tuneserve.thresholds import GatesSection

MODELS = ("base", "adapter", "merged", "served", "champion")
_CHAMPION = "not worse than the champion"
_NO_GAIN = "gates.must_beat_base: false"
_WITHOUT_CHAMPION = "gates.allow_undecided: true, or gates.compare_champion: false"


@dataclass(frozen=True)
class Evidence:
    """What was measured, a value a held-out row; all sequences are as long as `sources`.

    Attributes:
        sources: Conversation of each row.
        tokens: Supervised tokens.
        nats: Summed loss by model: some of `MODELS` but the champion.
        kl: Summed divergence from the merged model of `served` and of `rtn`, plain 4-bit rounding;
            and of the merged model from the adapter, `merge`.
        flips: Tokens with another first choice than the merged model's, of the same two.
        question_sources: Conversations of the rows whose longest answer was also tried behind
            another conversation's question; None: this was not measured.
        questions: Its summed loss there and where it belongs: `base_own`, `base_other`,
            `merged_own`, `merged_other`.
        answer_bytes: UTF-8 bytes of each row's last answer.
        answer_nats: Its summed loss: of `served` and of `champion`.
        answer_sources: Conversations of those rows, where the champion could be measured.
        champion_unknown: Why what serves now could not be measured; empty: it was, or nothing
            serves.
    """

    sources: Sequence[str] = ()
    tokens: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    nats: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    kl: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    flips: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    question_sources: Sequence[str] | None = None
    questions: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    answer_sources: Sequence[str] = ()
    answer_bytes: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    answer_nats: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    champion_unknown: str = ""

    def loss(self, name: str) -> float | None:
        """Mean nats per supervised token of a model; None: not measured."""
        if name not in self.nats or not self.tokens.sum():
            return None
        return float(self.nats[name].sum() / self.tokens.sum())


def judge(config: GatesSection, evidence: Evidence, *, skipped: Sequence[str] = ()) -> GateReport:
    """Decide on the losses and distances whether the served model may be promoted.

    Args:
        config: Thresholds of the run file.
        evidence: What was measured. A gate whose numbers are missing is skipped aloud.
        skipped: Proofs that were skipped already.
    """
    losses = {name: evidence.loss(name) for name in MODELS if name != "champion"}
    report = GateReport(losses, skipped=list(skipped))
    if not config.enabled:
        report.skipped.append("gates: switched off in the run file (gates.enabled)")
        return report
    if "served" not in evidence.nats:
        report.skipped.append("gates on the loss: the served model's loss was not measured")
        return report
    columns = {"tokens": evidence.tokens, **evidence.nats}
    columns |= {f"kl_{name}": values for name, values in evidence.kl.items()}
    columns |= {f"flips_{name}": values for name, values in evidence.flips.items()}
    draws = Resampled(evidence.sources, columns, seed=config.seed, confidence=config.confidence)
    for name in evidence.nats:
        interval = draws.interval(_mean_of(name))
        report.intervals[name] = (interval.low, interval.high)
    decisions = [
        gate(config, draws, report)
        for gate in (_over_base, _merge_keeps, _merge_close, _served_keeps, _close, _same_choice)
    ]
    for decided in (decisions[0], *_questions(config, evidence), *decisions[1:]):
        if isinstance(decided, str):
            report.skipped.append(decided)
        else:
            report.gates.append(decided)
    if (compared := _champion(config, evidence)) is not None:
        report.gates.append(compared)
    return report


def _mean_of(name: str) -> Callable[[Sums], Any]:
    """The mean of a column a supervised token."""
    return lambda sums: sums[name] / sums["tokens"]


def _over_base(config: GatesSection, draws: Resampled, report: GateReport) -> Gate | str:
    if not config.must_beat_base:
        return "better than base: not asked for (gates.must_beat_base)"
    base, served = report.losses["base"], report.losses["served"]
    if base is None or served is None:
        return "better than base: the base model's loss was not measured"
    interval = draws.interval(lambda s: (s["served"] - s["base"]) / s["tokens"])
    gate = bounded(
        config,
        "better than base",
        interval,
        0.0,
        strict=True,
        found=f"served {served:.4f}, base {base:.4f}: {interval} nats a token",
        wanted="a loss surely below the base's",
    )
    return replace(gate, would_pass=_NO_GAIN) if gate.decision == "refused" else gate


def _questions(config: GatesSection, evidence: Evidence) -> list[Gate | str]:
    if evidence.question_sources is None:
        return [f"{FOLLOW}: the evaluation did not try answers behind other questions"]
    held_out = len(set(evidence.sources))
    return judge_questions(config, evidence.question_sources, evidence.questions, held_out)


def _merge_keeps(config: GatesSection, draws: Resampled, report: GateReport) -> Gate | str:
    if None in (report.losses[name] for name in ("base", "adapter", "merged")):
        return "merge keeps the tuning: base, adapter or merged model was not measured"
    return _share(
        config, draws, report, "merge keeps the tuning", "adapter", "merged", "max_merge_share"
    )


def _served_keeps(config: GatesSection, draws: Resampled, report: GateReport) -> Gate | str:
    if None in (report.losses[name] for name in ("base", "merged")):
        return "served keeps the tuning: base or merged model was not measured"
    return _share(
        config, draws, report, "served keeps the tuning", "merged", "served", "max_quantize_share"
    )


def _share(
    config: GatesSection,
    draws: Resampled,
    report: GateReport,
    name: str,
    before: str,
    after: str,
    setting: str,
) -> Gate | str:
    """What `after` lost of what `before` had gained over the base, as a share."""
    limit = float(getattr(config, setting))
    gain = draws.interval(lambda s: (s["base"] - s[before]) / s["tokens"])
    share = draws.interval(lambda s: (s[after] - s[before]) / (s["base"] - s[before]))
    numbers = f"{after} {report.losses[after]:.4f}, {before} {report.losses[before]:.4f}"
    wanted = f"at most {limit:.0%} of what tuning gained, {gain.mean:.4f} nats a token"
    if gain.mean <= 0 and not config.must_beat_base:  # how far apart the models are still counts
        return (
            f"{name}: tuning gained nothing over the base ({gain}), and gates.must_beat_base is off"
        )
    if gain.mean <= 0:
        found = f"{numbers}: tuning gained nothing over the base ({gain})"
        return Gate(name, False, found, wanted, "refused", _NO_GAIN)
    # A quotient has no bounds when a draw's gain may be zero; the same question without it has.
    room = draws.interval(
        lambda s: (s[after] - s[before] - limit * (s["base"] - s[before])) / s["tokens"]
    )
    sure = gain.low > 0
    lost = share.percent() if sure else f"{share.mean:.1%}"
    gate = bounded(
        config,
        name,
        room,
        0.0,
        found=f"{numbers}: lost {lost} of what tuning gained",
        wanted=wanted,
        setting=f"gates.{setting}",
        most=share.high if sure else math.inf,
    )
    # To allow the loss of all that was gained is to ask for no tuning.
    if sure and gate.decision == "refused" and float(rounded_up(share.high)) >= 1:
        return replace(gate, would_pass="", hopeless=True)
    return gate


def _merge_close(config: GatesSection, draws: Resampled, report: GateReport) -> Gate | str:
    if "kl_merge" not in draws.sums or "kl_rtn" not in draws.sums:
        return "merged close to adapter: there are no references of the adapter"
    return _divergence(
        config,
        draws,
        "merged close to adapter",
        "merge",
        ("max_merge_kl_over_rtn", "merge_kl_floor"),
    )


def _close(config: GatesSection, draws: Resampled, report: GateReport) -> Gate | str:
    if "kl_served" not in draws.sums or "kl_rtn" not in draws.sums:
        return "close to merged: there are no references of the merged model"
    served, rtn = (draws.sums[f"kl_{name}"] / draws.sums["tokens"] for name in ("served", "rtn"))
    report.facts["divergence from merged"] = (
        f"at least {served:.4f} nats a token served, {rtn:.4f} by plain rounding"
    )
    return _divergence(config, draws, "close to merged", "served", ("max_kl_over_rtn", "kl_floor"))


def _divergence(
    config: GatesSection, draws: Resampled, name: str, whose: str, settings: tuple[str, str]
) -> Gate:
    factor, floor = (float(getattr(config, setting)) for setting in settings)
    ours, rtn = draws.interval(_mean_of(f"kl_{whose}")), draws.interval(_mean_of("kl_rtn"))
    over = draws.interval(lambda s: (s[f"kl_{whose}"] - factor * s["kl_rtn"]) / s["tokens"])
    needed = draws.interval(lambda s: (s[f"kl_{whose}"] - floor * s["tokens"]) / s["kl_rtn"])
    return bounded(
        config,
        name,
        over,
        floor,
        found=f"KL {ours} nats a token; plain rounding to 4 bits {rtn.mean:.4f}",
        wanted=f"at most {factor:g} times plain rounding, and {floor:g} more",
        setting=f"gates.{settings[0]}",
        most=needed.high if rtn.low > 0 else math.inf,
    )


def _same_choice(config: GatesSection, draws: Resampled, report: GateReport) -> Gate | str:
    if "flips_served" not in draws.sums or "flips_rtn" not in draws.sums:
        return "same first choice: there are no references of the merged model"
    served = draws.interval(lambda s: 1 - s["flips_served"] / s["tokens"])
    rtn = draws.interval(lambda s: 1 - s["flips_rtn"] / s["tokens"])
    over = draws.interval(lambda s: (s["flips_served"] - s["flips_rtn"]) / s["tokens"])
    limit = config.max_flips_over_rtn
    report.facts["first choice as merged"] = (
        f"{served.mean:.1%} of the tokens served, {rtn.mean:.1%} by plain rounding"
    )
    return bounded(
        config,
        "same first choice",
        over,
        limit,
        found=f"the merged model's choice in {served.percent()} of the tokens; "
        f"plain rounding to 4 bits {rtn.mean:.1%}",
        wanted=f"at most {limit:.1%} of the tokens below plain rounding",
        setting="gates.max_flips_over_rtn",
    )


def _champion(config: GatesSection, evidence: Evidence) -> Gate | None:
    limit = config.max_over_champion
    wanted = f"at most {limit:+g} nats a byte of answer"
    if evidence.champion_unknown:
        return _champion_unknown(config, evidence.champion_unknown, wanted)
    if "champion" not in evidence.answer_nats:
        return None
    if not evidence.answer_bytes.sum():
        return _champion_unknown(config, "no held-out answer has any text", wanted)
    compared, held_out = len(set(evidence.answer_sources)), len(set(evidence.sources))
    if compared < config.min_conversations <= held_out:
        why = f"it could take {compared} of {held_out} held-out conversations, too few to compare"
        return _champion_unknown(config, why, wanted)
    columns = {"bytes": evidence.answer_bytes, **evidence.answer_nats}
    draws = Resampled(
        evidence.answer_sources, columns, seed=config.seed, confidence=config.confidence
    )
    served, champion = (draws.sums[name] / draws.sums["bytes"] for name in ("served", "champion"))
    over = draws.interval(lambda s: (s["served"] - s["champion"]) / s["bytes"])
    return bounded(
        config,
        _CHAMPION,
        over,
        limit,
        found=f"candidate {served:.4f}, champion {champion:.4f}: {over} nats a byte of answer",
        wanted=wanted,
        setting="gates.max_over_champion",
    )


def _champion_unknown(config: GatesSection, why: str, wanted: str) -> Gate:
    """What serves now could not be compared: nobody knows whether the candidate is worse."""
    if config.allow_undecided:
        said = f"{why}; gates.allow_undecided is set"
        return Gate(_CHAMPION, True, said, wanted, "overridden")
    return Gate(_CHAMPION, False, f"undecided: {why}", wanted, "undecided", _WITHOUT_CHAMPION)
