"""One decision about a candidate, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tuneserve.errors import GateRefused

Decision = Literal["passed", "refused", "undecided", "overridden"]


@dataclass(frozen=True)
class Gate:
    """One decision.

    Attributes:
        name: What is asked, in a few words.
        passed: Whether it lets the candidate through.
        found: What was measured.
        wanted: What would pass.
        decision: How it came out.
        would_pass: The run-file setting with which it would have passed; empty when it did, or
            when no setting would.
        hopeless: No sensible threshold passes it.
    """

    name: str
    passed: bool
    found: str
    wanted: str
    decision: Decision = "passed"
    would_pass: str = ""
    hopeless: bool = False


@dataclass
class GateReport:
    """All decisions about one candidate.

    Attributes:
        losses: Mean nats per supervised token of base, adapter, merged and served model; None:
            not measured.
        gates: The decisions.
        skipped: Proofs that were not made, and why.
        facts: Other numbers for the report, by the words they are shown with.
        intervals: Low and high bound of each loss.
        rungs: What was tried before on the ladder of exports: method, decision, reason.
    """

    losses: dict[str, float | None]
    gates: list[Gate] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    rungs: list[dict[str, str]] = field(default_factory=list)

    @property
    def refused(self) -> list[Gate]:
        """Gates that were not passed."""
        return [gate for gate in self.gates if not gate.passed]

    @property
    def would_pass(self) -> list[str]:
        """Settings with which the refused gates would have passed, each once; none where a gate is
        hopeless."""
        if any(gate.hopeless for gate in self.refused):
            return []
        return list(dict.fromkeys(gate.would_pass for gate in self.refused if gate.would_pass))

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "losses": self.losses,
            "gates": [vars(gate) for gate in self.gates],
            "skipped": self.skipped,
            "facts": self.facts,
            "intervals": self.intervals,
            "rungs": self.rungs,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GateReport:
        """Rebuild what `to_json` gave, also of an earlier version that kept less."""
        return GateReport(
            dict(data["losses"]),
            [
                Gate(**{"decision": "passed" if gate["passed"] else "refused", **gate})
                for gate in data.get("gates", ())
            ],
            list(data.get("skipped", ())),
            dict(data.get("facts", {})),
            {name: (low, high) for name, (low, high) in data.get("intervals", {}).items()},
            list(data.get("rungs", ())),
        )

    def raise_if_refused(
        self,
        release: str,
        *,
        advised: Sequence[str] = ("gptq", "none"),
        serves: bool = True,
        report: str = "",
    ) -> None:
        """Raise when a gate was not passed.

        Args:
            release: Its id.
            advised: What `quantize.methods` might be; empty: another export is no advice.
            serves: Whether the name has a release that goes on serving.
            report: Path of the whole report, where one was written.

        Raises:
            GateRefused: Names every gate that refused, with its numbers.
        """
        if not self.refused:
            return
        reasons = "; ".join(f"{gate.name}: {gate.found}" for gate in self.refused)
        advice = ["train longer"]
        if advised:
            advice.append(f"try 16 bits too (`quantize.methods: [{', '.join(advised)}]`)")
        if hopeless := [gate.name for gate in self.refused if gate.hopeless]:
            todo = f"{' or '.join(advice)}; no sensible threshold passes {', '.join(hopeless)}"
        else:
            settings = f" ({', '.join(self.would_pass)})" if self.would_pass else ""
            todo = ", ".join([*advice, f"or change the thresholds in gates{settings}"])
        kept = "what was serving goes on serving" if serves else "nothing serves"
        whole = f"; the whole report: {report}" if report else ""
        raise GateRefused(
            f"release {release} was refused by {len(self.refused)} of {len(self.gates)} gates: "
            f"{reasons}",
            expected="; ".join(f"{gate.name}: {gate.wanted}" for gate in self.refused),
            hint=f"{kept}; {todo}{whole}",
            details={**self.to_json(), "would_pass": self.would_pass},
        )


def rounded_up(value: float) -> str:
    """Two significant digits, never below the value: advice that passes."""
    return _two_digits(value, 1)


def rounded_down(value: float) -> str:
    """Two significant digits, never above the value."""
    return _two_digits(value, -1)


def _two_digits(value: float, side: int) -> str:
    """The nearest such number, or its neighbour where that lies on the other side of the value."""
    near = float(f"{value:.1e}")
    if side * (near - value) < 0:
        near += side * 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return f"{near:.6g}"
