"""Promotion gates: compare numbers that were measured elsewhere, and say the decision in words.
Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tuneserve.config import GatesSection
from tuneserve.errors import GateRefused
from tuneserve.release.bootstrap import Interval


@dataclass(frozen=True)
class Gate:
    """One decision: what was asked, what was found."""

    name: str
    passed: bool
    found: str
    wanted: str


@dataclass(frozen=True)
class GateReport:
    """All decisions about one candidate.

    Attributes:
        losses: Mean nats per supervised token of base, adapter, merged and served model; None:
            not measured.
        gates: The decisions.
        skipped: Proofs that were not made, and why.
        facts: Other numbers for the report, by the words they are shown with.
    """

    losses: dict[str, float | None]
    gates: list[Gate] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> list[Gate]:
        """Gates that were not passed."""
        return [gate for gate in self.gates if not gate.passed]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "losses": self.losses,
            "gates": [vars(gate) for gate in self.gates],
            "skipped": self.skipped,
            "facts": self.facts,
        }

    def to_markdown(self, title: str) -> str:
        """For people."""
        lines = [f"# {title}", ""]
        if any(value is not None for value in self.losses.values()):
            lines += ["| model | held-out loss (nats per supervised token) |", "|---|---|"]
            for name, loss in self.losses.items():
                lines.append(f"| {name} | {'not measured' if loss is None else f'{loss:.4f}'} |")
            lines.append("")
        if self.gates:
            lines += ["| gate | decision | found | wanted |", "|---|---|---|---|"]
            for gate in self.gates:
                verdict = "passed" if gate.passed else "**refused**"
                lines.append(f"| {gate.name} | {verdict} | {gate.found} | {gate.wanted} |")
            lines.append("")
        lines += [f"- {name}: {value}" for name, value in self.facts.items()]
        lines += [f"- skipped: {reason}" for reason in self.skipped]
        return "\n".join(lines).rstrip() + "\n"

    def raise_if_refused(self, release: str) -> None:
        """Raise when a gate was not passed.

        Raises:
            GateRefused: Names every gate that refused, with its numbers.
        """
        if not self.refused:
            return
        reasons = "; ".join(f"{gate.name}: {gate.found}" for gate in self.refused)
        raise GateRefused(
            f"release {release} was refused by {len(self.refused)} of {len(self.gates)} gates: "
            f"{reasons}",
            expected="; ".join(gate.wanted for gate in self.refused),
            hint="what was serving goes on serving; train longer, choose another quantize method, "
            "or change "
            "the thresholds in gates",
            details=self.to_json(),
        )


def judge(
    config: GatesSection,
    losses: dict[str, float | None],
    *,
    over_base: Interval | None = None,
    skipped: list[str] | None = None,
    facts: dict[str, str] | None = None,
) -> GateReport:
    """Decide whether the served model may be promoted.

    Args:
        config: Thresholds of the run file.
        losses: `base`, `adapter`, `merged`, `served`; a gate whose numbers are missing is
            skipped aloud.
        over_base: Served minus base, bounded over conversations; decides in place of the point
            when there are enough conversations.
        skipped: Proofs that were skipped already.
        facts: Other numbers to show.
    """
    gates: list[Gate] = []
    said = list(skipped or [])
    served, base, merged = losses.get("served"), losses.get("base"), losses.get("merged")
    if not config.enabled:
        said.append("gates: switched off in the run file (gates.enabled)")
    elif served is None:
        said.append("gates on the loss: the served model's loss was not measured")
    else:
        if not config.must_beat_base:
            said.append("better than base: not asked for (gates.must_beat_base)")
        elif base is None:
            said.append("better than base: the base model's loss was not measured")
        else:
            gates.append(_better_than_base(served, base, over_base))
        if merged is None:
            said.append("close to merged: the merged model's loss was not measured")
        else:
            gates.append(_close_to_merged(config.max_loss_over_merged, served, merged))
    return GateReport(dict(losses), gates, said, dict(facts or {}))


def _better_than_base(served: float, base: float, interval: Interval | None) -> Gate:
    found = f"served {served:.4f}, base {base:.4f}"
    if interval is None:
        return Gate("better than base", served < base, found, "a loss below the base's")
    return Gate(
        "better than base",
        interval.high < 0,
        f"{found}: {interval} over {interval.conversations} conversations",
        "the whole 95 % interval below zero",
    )


def _close_to_merged(most: float, served: float, merged: float) -> Gate:
    rise = (served - merged) / merged if merged > 0 else 0.0
    return Gate(
        "close to merged",
        rise <= most,
        f"served {served:.4f}, merged {merged:.4f}: {rise:+.1%}",
        f"at most {most:+.1%} over the merged model's loss",
    )
