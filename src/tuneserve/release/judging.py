"""Measure a candidate that is up, on held-out rows, and decide about it.

What it is compared with was written to disk before it was started: the evaluation artifact (losses,
the merged model's likeliest tokens, plain rounding's distance from them, structured answers) and
the champion's losses.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tuneserve.errors import InputError
from tuneserve.lm import scores
from tuneserve.lm.conversations import round_robin
from tuneserve.lm.scores import TopScores
from tuneserve.lm.structured import parses
from tuneserve.release import behaviour
from tuneserve.release.answer_room import CUTS_ANSWERS, AnswerRoom
from tuneserve.release.champion import ChampionScores, paired
from tuneserve.release.decisions import Gate, GateReport
from tuneserve.release.gates import Evidence, judge
from tuneserve.release.heldout import Row, spread
from tuneserve.release.served_loss import served_scores
from tuneserve.thresholds import GatesSection

log = logging.getLogger(__name__)

REFERENCES = "references.npz"
STRUCTURED = "answers.jsonl"


@dataclass(frozen=True)
class Subject:
    """A candidate that is up.

    Attributes:
        socket_path: Where it listens.
        model: Its served name.
        gates: Thresholds.
        rows: Rows of the dataset, held-out ones when `held_out`.
        held_out: Whether the rows were held out.
        evaluation: Folder of the evaluation artifact.
        champion: What serves now, measured on `rows`; None: nothing does, or it was not measured.
        champion_unknown: Why it could not be measured, although it should have been.
        room: Longest answer.
        longest: Longest prompt with its answer, in tokens.
        alive: Raises when the server has died.
    """

    socket_path: Path
    model: str
    gates: GatesSection
    rows: list[Row]
    held_out: bool
    evaluation: Path | None
    champion: ChampionScores | None = None
    champion_unknown: str = ""
    room: AnswerRoom = AnswerRoom()
    longest: int = 1 << 30
    alive: Callable[[], None] = lambda: None


@dataclass
class Measured:
    """What a picture shows: divergence a token, of the served model and of plain rounding."""

    kl_served: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))
    kl_rtn: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))


def judge_candidate(
    subject: Subject, skipped: list[str], facts: dict[str, str]
) -> tuple[GateReport, Measured]:
    """Ask the candidate everything, and decide.

    Args:
        subject: The candidate.
        skipped: Proofs that were skipped already.
        facts: Other numbers for the report; more are added.

    Raises:
        InputError: The evaluation is not of this dataset.
        ServerError: The candidate does not answer, or gives numbers that are not finite.
    """
    evidence, measured = Evidence(), Measured()
    if subject.evaluation is None:
        skipped.append("losses of base, adapter and merged model: no evaluation was given")
    rows = rows_to_score(subject.rows, subject.held_out, subject.evaluation, subject.gates)
    if not rows:
        skipped.append("loss of the served model: there are no held-out rows")
    elif not subject.gates.enabled and subject.evaluation is None:
        skipped.append("loss of the served model: gates are switched off")
    else:
        found = served_scores(subject.socket_path, subject.model, rows, alive=subject.alive)
        evidence, measured = _evidence(subject, rows, found)
        facts["held-out rows"] = f"{len(rows)} with {len(found.tokens)} supervised tokens"
        facts["first choice"] = f"{found.first_choice().mean():.1%} of the supervised tokens"
    report = judge(subject.gates, evidence, skipped=skipped)
    report.facts = {**facts, **report.facts}
    if subject.evaluation is not None:  # one from elsewhere may hold means and no rows
        for name, loss in _losses(subject.evaluation).items():
            if name in report.losses and report.losses[name] is None:
                report.losses[name] = loss
    if subject.gates.enabled:
        if not rows and subject.evaluation is not None:
            report.gates.append(_nothing_held_out(subject.gates))
        report.gates += _behaviour(subject, report.skipped)
    return report, measured


def rows_to_score(
    rows: list[Row], held_out: bool, evaluation: Path | None, gates: GatesSection
) -> list[Row]:
    """The rows that evaluation measured: held-out ones that have something supervised, of as many
    conversations as there are."""
    if not held_out:
        return []
    count = gates.eval_rows
    if evaluation is not None:
        count = int(_losses(evaluation).get("rows", count))
    usable = [row for row in rows if row.supervised]
    return [usable[place] for place in round_robin([row.source for row in usable], count)]


def _losses(evaluation: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((evaluation / "losses.json").read_text(encoding="utf-8"))
    return found


def _nothing_held_out(gates: GatesSection) -> Gate:
    found, wanted = "no conversation was held out, so nothing can be decided", "held-out rows"
    if gates.allow_undecided:
        return Gate("held-out rows", True, f"{found}; gates.allow_undecided is set", wanted,
                    "overridden")  # fmt: skip
    return Gate(
        "held-out rows", False, found, wanted, "undecided",
        "data.eval or data.eval_fraction, or gates.allow_undecided: true",
    )  # fmt: skip


def _evidence(subject: Subject, rows: list[Row], found: TopScores) -> tuple[Evidence, Measured]:
    tokens = np.diff(found.starts).astype(np.float64)
    sources = [row.source for row in rows]
    nats = {"served": found.nats()}
    kl: dict[str, np.ndarray[Any, Any]] = {}
    flips: dict[str, np.ndarray[Any, Any]] = {}
    questions: tuple[list[str] | None, dict[str, np.ndarray[Any, Any]]] = (None, {})
    measured = Measured()
    if subject.evaluation is not None:
        known = _losses(subject.evaluation)
        if known.get("supervised_tokens") not in (None, len(found.tokens)):
            raise InputError(
                f"the evaluation counted {known['supervised_tokens']} supervised tokens in "
                f"{known['rows']} rows, the dataset has {len(found.tokens)}",
                expected="an evaluation of this dataset",
                hint="run evaluate again",
            )
        per_row = known.get("per_row") or {}
        if per_row and per_row.get("source") != sources:
            raise InputError(
                f"the evaluation is of other rows than the {len(rows)} measured here",
                expected="an evaluation of this dataset",
                hint="run evaluate again",
            )
        for name in ("base", "adapter", "merged"):
            if per_row.get(name):
                nats[name] = np.array(per_row[name], np.float64)
        if tried := per_row.get("questions"):  # an evaluation of an earlier version has none
            questions = (
                tried["source"],
                {
                    f"{name}_{where}": np.array(values, np.float64)
                    for name in ("base", "merged")
                    for where, values in tried.get(name, {}).items()
                },
            )
        if (subject.evaluation / REFERENCES).is_file():
            kl, flips, measured = _distances(subject.evaluation / REFERENCES, found)
    answer: tuple[Any, Any, Any] = ([], np.zeros(0), {})
    if subject.champion is not None:
        answer = paired(rows, _last_answer_nats(rows, found), subject.champion)
    return (
        Evidence(sources, tokens, nats, kl, flips, *questions, *answer, subject.champion_unknown),
        measured,
    )


def _distances(path: Path, found: TopScores) -> tuple[dict[str, Any], dict[str, Any], Measured]:
    """Distances from the merged model, of the served one and of plain rounding, by row."""
    merged, beside = TopScores.load(path)
    if not np.array_equal(merged.tokens, found.tokens):
        raise InputError(
            f"{path}: the references are about other tokens than the dataset's",
            expected="an evaluation of this dataset",
            hint="run evaluate again",
        )
    served = scores.divergence(merged, found)
    rtn = np.asarray(beside["rtn_kl"], np.float64)
    flipped = {
        "served": scores.flips(merged, found).astype(np.float64),
        "rtn": np.asarray(beside["rtn_flips"], np.float64),
    }
    apart = {"served": served, "rtn": rtn}
    if "adapter_kl" in beside:
        apart["merge"] = np.asarray(beside["adapter_kl"], np.float64)
    kl = {name: scores.row_sums(values, found.starts) for name, values in apart.items()}
    return (
        kl,
        {name: scores.row_sums(values, found.starts) for name, values in flipped.items()},
        Measured(served, rtn),
    )


def _last_answer_nats(rows: list[Row], found: TopScores) -> np.ndarray[Any, Any]:
    """The served model's nats of each row's last answer, out of those of all its answers."""
    values = []
    for at, row in enumerate(rows):
        start = row.answer_start
        inside = np.array([position >= start for position in row.supervised], bool)
        actual = found.actual[found.starts[at] : found.starts[at + 1]].astype(np.float64)
        values.append(-float(actual[inside].sum()))
    return np.array(values, np.float64)


def _behaviour(subject: Subject, skipped: list[str]) -> list[Gate]:
    config = subject.gates
    gates: list[Gate] = []

    def ask(prompts: list[tuple[list[int], int]]) -> list[behaviour.Answer]:
        return behaviour.ask_ids(subject.socket_path, subject.model, prompts, alive=subject.alive)

    usable = [
        row
        for row in subject.rows
        if row.supervised
        and row.messages[-1]["role"] == "assistant"
        and row.answer_start + subject.room.asked < subject.longest
    ]
    chosen = spread(usable, config.answers) if config.answers else []
    prompts = [(row.ids[: row.answer_start], subject.room.asked) for row in chosen]
    if prompts:
        gates += behaviour.judge_answers(config, ask(prompts), subject.room)
    elif subject.rows:
        skipped.append("greedy answers: none were asked for, or no held-out prompt fits")
    structured = _structured(subject, skipped)
    if structured:
        answers = ask([(row.prompt, row.max_tokens) for row in structured])
        if gate := behaviour.judge_structured(config, structured, answers):
            gates.append(gate)
    # Half of what the server takes is left for the prompt, of which only the text is known.
    most = min(subject.longest // 2, subject.room.served)
    asked = [
        canary.model_copy(update={"max_tokens": min(canary.max_tokens, most)})
        for canary in config.canaries
    ]
    said = behaviour.ask_canaries(subject.socket_path, subject.model, asked, alive=subject.alive)
    gates += [
        behaviour.judge_canary(canary, answer, most if most < canary.max_tokens else None)
        for canary, answer in zip(config.canaries, said, strict=True)
    ]
    return gates


def _structured(subject: Subject, skipped: list[str]) -> list[behaviour.StructuredRow]:
    """The structured rows to ask, each within what the server takes."""
    known, too_long = read_structured(
        subject.evaluation, subject.rows, subject.longest, subject.room.served
    )
    if too_long:
        short = subject.room.served < subject.longest
        skipped.append(
            f"structured answers: {too_long} do not fit into the {subject.longest} tokens served"
            + (f", or the {subject.room.served} of an answer ({CUTS_ANSWERS})" if short else "")
        )
    wanted = subject.gates.structured_answers
    asked = wanted and subject.evaluation is not None
    if asked and not known and not too_long and _has_tools(subject.rows):
        skipped.append(
            "structured answers: none found, though the data has tools; calls are compared in the "
            "forms of docs/gates.md, and this base's template writes another one"
        )
    return known[:wanted]


def _has_tools(rows: list[Row]) -> bool:
    return any(row.tools or any(m.get("tool_calls") for m in row.messages) for row in rows)


def read_structured(
    evaluation: Path | None, rows: list[Row], longest: int, longest_answer: int = 1 << 30
) -> tuple[list[behaviour.StructuredRow], int]:
    """The structured rows that evaluation asked the merged model.

    Args:
        evaluation: Folder of the evaluation artifact.
        rows: All held-out rows.
        longest: Longest prompt with its answer, in tokens.
        longest_answer: What the server gives at most, in tokens.

    Returns:
        Those that can be asked, and how many cannot: behind their prompt there is no room for an
        answer as long as the merged model's.
    """
    if evaluation is None or not (evaluation / STRUCTURED).is_file():
        return [], 0
    found, too_long = [], 0
    for line in (evaluation / STRUCTURED).read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        row = rows[data["row"]] if data["row"] < len(rows) else None
        if row is None or row.source != data["source"]:
            continue
        prompt = row.ids[: data.get("start", row.answer_start)]
        room = min(longest - len(prompt), longest_answer)
        if room < max(1, min(data.get("merged_tokens", 0) + 1, data["max_tokens"])):
            too_long += 1
            continue
        found.append(
            behaviour.StructuredRow(
                data["source"],
                data["row"],
                data["kind"],
                prompt,
                min(data["max_tokens"], room),
                data["merged"],
                # By today's rules, as the served answer: an evaluation may be of another version.
                parses(data["merged"], data["kind"], data.get("tools")),
                data.get("tools"),
            )
        )
    return found, too_long
