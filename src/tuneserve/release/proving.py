"""The proofs of a candidate: it is booted, compared with its training, measured and judged."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import GateRefused
from tuneserve.progress import human_seconds
from tuneserve.release import capacity, promote, state, vllm_command
from tuneserve.release.answer_room import AnswerRoom, answer_room
from tuneserve.release.card import CardFacts, write_card
from tuneserve.release.champion import ChampionScores, safely_measure
from tuneserve.release.gate_report import REPORT_NAME, write_report
from tuneserve.release.gates import Gate, GateReport
from tuneserve.release.heldout import Row, spread
from tuneserve.release.judging import Measured, Subject, judge_candidate, rows_to_score
from tuneserve.release.model_files import ModelFacts, write_generation
from tuneserve.release.parity import check_parity
from tuneserve.release.ready import (
    SHORT_CHAT,
    check_answers,
    healthy,
    prompts_of,
    wait_until_up,
)
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.supervisor import server_program

log = logging.getLogger(__name__)

_SAMPLES = 4
_POLL_SECONDS = 0.25
# supervisord's states of a process that it starts no more; EXITED is passed through.
_GIVEN_UP = ("FATAL", "STOPPED", "UNKNOWN")


@dataclass
class Candidate:
    """What is known of a candidate while it is being proven."""

    request: ReleaseRequest
    facts: ModelFacts
    rows: list[Row]
    side: str
    record: state.Release
    room: capacity.Capacity
    champion: ChampionScores | None = None
    champion_unknown: str = ""
    skipped: list[str] = field(default_factory=list)


def prove(servers: promote.Servers, candidate: Candidate) -> None:
    """Boot the candidate and let it pass every proof; the record is filled and written."""
    request, record, places = candidate.request, candidate.record, servers.places
    serve = request.serve
    socket_path = places.socket(record.id)
    command = vllm_command.build(
        candidate.facts,
        serve,
        candidate.room,
        release=record.id,
        socket=socket_path,
        python=request.python,
        trust_remote_code=request.trust_remote_code,
        cores=len(os.sched_getaffinity(0)),
        given=os.environ,
        generation=write_generation(candidate.facts, places.release_folder(record.id)),
    )
    defaults = vllm_command.sampling_defaults(candidate.facts, serve)
    shown = ", ".join(f"{key} {value}" for key, value in defaults.items()) or "vLLM's own"
    log.info("starting %s for %s; sampling defaults: %s", record.id, serve.name, shown)
    started = time.monotonic()
    child = servers.boot(record, command, serve.drain_timeout_seconds + 15.0)
    wait_until_up(child, socket_path, serve.name, limit_seconds=serve.ready_timeout_seconds)
    log.info("the server is up after %s; proving it", human_seconds(time.monotonic() - started))
    skipped = list(candidate.skipped)
    facts: dict[str, str] = {}
    parity: dict[str, Any] = {}
    if candidate.rows:
        if candidate.side != "eval":
            skipped.append("held-out chats: none were held out, so training chats were compared")
        chosen = spread(candidate.rows, request.gates.parity_chats)
        with _named(servers, candidate, "parity", skipped, facts, command.arguments):
            parity = check_parity(socket_path, serve.name, chosen).to_json()
        facts["parity"] = f"{parity['chats']} chats give exactly the trained ids"
    else:
        skipped.append("parity with the trained ids: no dataset was given")
    prompts = prompts_of(candidate.rows, _SAMPLES) or [SHORT_CHAT]
    with _named(servers, candidate, "answers end", skipped, facts, command.arguments):
        sample = check_answers(
            child,
            socket_path,
            serve.name,
            prompts,
            room=_answer_room(candidate),
            must_stop=bool(candidate.rows),
        )
    facts["one greedy answer"] = (
        f"ended with {sample.finish_reason} after {sample.tokens} tokens in {sample.seconds:.1f} s"
    )
    record.seconds_to_ready = round(time.monotonic() - started, 1)
    report, measured = _judge(candidate, socket_path, child.check, skipped, facts)
    child.check()
    record.memory_bytes = servers.keeper.memory_bytes(server_program(record.id))
    record.report = {**report.to_json(), "parity": parity}
    ran = [f"{name} ({found})" for name, found in facts.items()]
    ran += [f"{gate.name} ({gate.decision})" for gate in report.gates]
    log.info("proofs that ran: %s", "; ".join(["its own process names the model", *ran]))
    for reason in report.skipped:
        log.warning("skipped: %s", reason)
    folder = _write_report(servers, candidate, report, measured, command.arguments)
    entry = state.read(places).names.get(serve.name, state.Name())
    try:
        report.raise_if_refused(
            record.id,
            advised=_advised_methods(candidate),
            serves=bool(entry.active) and entry.wanted == "up",
            report=str(folder / REPORT_NAME),
        )
    except GateRefused as error:
        error.details["report_folder"] = str(folder)
        raise
    record.proven = True
    with state.change(places) as changed:
        changed.releases[record.id] = record


def _answer_room(candidate: Candidate) -> AnswerRoom:
    serve = candidate.request.serve
    most = vllm_command.sampling_defaults(candidate.facts, serve).get("max_new_tokens")
    return answer_room(
        candidate.rows, serve, None if most is None else int(most), candidate.room.max_model_len
    )


def measure_champion(
    servers: promote.Servers, candidate: Candidate, champion: str | None, *, answers: bool
) -> None:
    """Measure what serves on the candidate's rows, and keep it, before the candidate boots.

    A champion that ends meanwhile is waited for, which the process keeper starts anew, and measured
    once more.

    Args:
        servers: Of this user.
        candidate: Gets the scores, or why there are none.
        champion: What serves, or should.
        answers: Whether it answered when the release began.
    """
    request, record = candidate.request, candidate.record
    if not champion or champion == record.id:
        return
    if not (request.gates.enabled and request.gates.compare_champion):
        candidate.skipped.append("not worse than the champion: not asked for in gates")
        return
    rows = rows_to_score(
        candidate.rows, candidate.side == "eval", request.evaluation, request.gates
    )
    if not rows or request.evaluation is None:
        candidate.skipped.append("not worse than the champion: there are no held-out rows")
        return
    if not answers:
        # Nobody is served by it: to keep the candidate out would keep the product down.
        candidate.skipped.append(f"not worse than the champion: {champion} does not answer")
        return
    folder = Path(state.read(servers.places).release(champion).model)
    socket_path = servers.places.socket(champion)
    process = servers.keeper.info(server_program(champion))
    found, why = safely_measure(socket_path, request.serve.name, champion, rows, folder)
    after = servers.keeper.info(server_program(champion))
    same = process and after and process.pid == after.pid and healthy(socket_path, champion)
    if found is None and not same:
        log.warning("%s; waiting for its server, to measure it once more", why)
        limit = request.serve.ready_timeout_seconds
        if _comes_back(servers, champion, limit):
            found, why = safely_measure(socket_path, request.serve.name, champion, rows, folder)
    if found is None:
        candidate.champion_unknown = why
        return
    folder = servers.places.release_folder(record.id)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / "champion.json")
    candidate.champion = found


def _comes_back(servers: promote.Servers, release: str, limit_seconds: float) -> bool:
    """Wait until a server that the process keeper starts anew is well, or is given up."""
    until = time.monotonic() + limit_seconds
    while healthy(servers.places.socket(release), release) is None:
        info = servers.keeper.info(server_program(release))
        if info is None or info.state in _GIVEN_UP or time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _judge(
    candidate: Candidate,
    socket_path: Path,
    alive: Callable[[], None],
    skipped: list[str],
    facts: dict[str, str],
) -> tuple[GateReport, Measured]:
    """Ask the candidate everything, and decide."""
    request = candidate.request
    subject = Subject(
        socket_path,
        request.serve.name,
        request.gates,
        candidate.rows,
        candidate.side == "eval",
        request.evaluation,
        candidate.champion,
        candidate.champion_unknown,
        _answer_room(candidate),
        candidate.room.max_model_len,
        alive,
    )
    report, measured = judge_candidate(subject, skipped, facts)
    report.rungs = _rungs(candidate, "refused" if report.refused else "passed")
    return report, measured


def _rungs(candidate: Candidate, decision: str) -> list[dict[str, str]]:
    """What was tried before on the ladder of exports, and this one; empty where it is the first."""
    before = list(candidate.request.hints.get("rungs", ()))
    method = candidate.facts.quantization or "16 bits"
    return [*before, {"method": method, "decision": decision, "reason": ""}] if before else []


def _advised_methods(candidate: Candidate) -> list[str]:
    """What to set `quantize.methods` to; empty where another export follows anyway, or 16 bits were
    tried."""
    hints, export = candidate.request.hints, candidate.facts.quantization
    methods = list(hints.get("methods", ())) or [export or "none"]
    follows = len(hints.get("rungs", ())) + 1 < len(methods)
    return [] if export is None or follows or "none" in methods else [*methods, "none"]


@contextlib.contextmanager
def _named(
    servers: promote.Servers,
    candidate: Candidate,
    gate: str,
    skipped: list[str],
    facts: dict[str, str],
    arguments: list[str],
) -> Iterator[None]:
    """A proof that comes before the measuring: when it refuses, the report says so as a gate."""
    try:
        yield
    except GateRefused as error:
        setting = ", ".join(error.details.get("would_pass", ()))
        refused = Gate(gate, False, error.message, error.expected, "refused", setting)
        report = GateReport({}, [refused], skipped, facts, rungs=_rungs(candidate, "refused"))
        folder = _write_report(servers, candidate, report, Measured(), arguments)
        error.details |= {**report.to_json(), "report_folder": str(folder)}
        raise


def _write_report(
    servers: promote.Servers,
    candidate: Candidate,
    report: GateReport,
    measured: Measured,
    arguments: list[str],
) -> Path:
    """Write the report and the card; returns their folder."""
    request, record = candidate.request, candidate.record
    folder = servers.places.release_folder(record.id)
    write_report(folder, title_of(record), report, measured, request.model)
    card = CardFacts(
        record.id, record.name, request.model, request.base, request.inputs, record.created
    )
    write_card(folder, card, report)
    write_json_atomic(
        folder / "report.json",
        {**record.report, "release": record.id, "model": record.model, "command": arguments},
    )
    return folder


def title_of(record: state.Release) -> str:
    """How reports call a release."""
    return f"Release {record.id} of {record.name}"
