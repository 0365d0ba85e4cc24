"""The release stage: boot a candidate, prove it, judge it, then switch to it.

Whatever is refused or fails leaves the champion serving and no process behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import GateRefused, InputError, RunFileError
from tuneserve.progress import human_bytes, human_seconds
from tuneserve.release import capacity, gateway, keys, promote, state, vllm_command
from tuneserve.release.card import CardFacts, write_card
from tuneserve.release.champion import ChampionScores, safely_measure
from tuneserve.release.gate_report import markdown, write_report
from tuneserve.release.gates import Gate, GateReport
from tuneserve.release.heldout import Row, read_rows, spread
from tuneserve.release.judging import Measured, Subject, judge_candidate, rows_to_score
from tuneserve.release.layout import layout
from tuneserve.release.model_files import ModelFacts, read_model
from tuneserve.release.parity import check_parity
from tuneserve.release.ready import check_answers, healthy, prompts_of, wait_until_up
from tuneserve.release.request import ReleaseRequest, check_tools, request_of
from tuneserve.release.supervisor import GATEWAY, Keeper, server_program
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

HOLD_SECONDS = 300
_MEMORY_WAIT_SECONDS = 60.0
_SAMPLES = 4
_SIMPLE_PROMPT = [{"role": "user", "content": "Reply with one word: hello"}]


def run(context: StageContext) -> dict[str, Any]:
    """The stage's entry: see `release`."""
    # A cancelled run sends SIGTERM: what is under way is then undone like after any other error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return release(request_of(context))


@dataclass
class _Candidate:
    """What is known of a candidate while it is being proven."""

    request: ReleaseRequest
    facts: ModelFacts
    rows: list[Row]
    side: str
    record: state.Release
    room: capacity.Capacity
    champion: ChampionScores | None = None
    skipped: list[str] = field(default_factory=list)


def release(request: ReleaseRequest) -> dict[str, Any]:
    """Serve `request.model` under `request.serve.name`, proven and judged.

    Returns:
        endpoint, model, release, losses, parity, seconds_to_ready, memory_bytes, report, reused.

    Raises:
        GateRefused: A proof or a gate refused the candidate.
        TuneserveError: It cannot be served; what was serving goes on serving.
    """
    facts = read_model(request.model, trust_remote_code=request.trust_remote_code)
    rows, side = read_rows(request.dataset) if request.dataset else ([], "")
    check_tools(rows, request.serve)
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    listen = _listen(request, places.keys)
    name = request.serve.name
    with state.lock_name(places, name, f"releasing {request.artifact or request.model.name}"):
        _check_gateway(servers, listen, name)
        try:
            record, reused = _release_locked(servers, request, facts, rows, side, listen)
        except BaseException:
            _end_if_idle(servers)
            raise
        return _metrics(listen, state.read(places), record, reused=reused)


def _release_locked(
    servers: promote.Servers,
    request: ReleaseRequest,
    facts: ModelFacts,
    rows: list[Row],
    side: str,
    listen: gateway.Listen,
) -> tuple[state.Release, bool]:
    """Re-use the active release when it is the one asked for, else bring up a candidate."""
    places, name = servers.places, request.serve.name
    servers.keeper.ensure_running()
    promote.settle(servers, name, ready_seconds=request.serve.ready_timeout_seconds)
    known = state.read(places)
    entry = known.names.get(name, state.Name())
    record = known.find(name, request.key)
    champion = entry.active if entry.wanted == "up" else None
    servers.ensure_gateway(listen)
    if record and record.proven and record.id == champion:
        if healthy(places.socket(record.id), record.id):
            log.info("%s already serves this model as %s", name, record.id)
            return record, True
    if record and record.proven and champion in (None, record.id):
        log.info("%s was proven before and nothing else serves: starting it again", record.id)
        with promote.promoting(servers, record):
            promote.start_again(servers, record, request.serve.ready_timeout_seconds)
        promote.make_current(
            servers, record, drain_seconds=float(request.serve.drain_timeout_seconds)
        )
        return record, True
    room = _room(request, facts, rows, servers, champion)
    if record is None:
        with state.change(places) as changed:
            record = changed.add(name, request.key, str(request.model), request.artifact)
    candidate = _Candidate(request, facts, rows, side, record, room)
    _measure_champion(servers, candidate, champion)
    _bring_up(servers, candidate, champion)
    return record, False


def _listen(request: ReleaseRequest, keys_file: Path) -> gateway.Listen:
    serve = request.serve
    if serve.api_key_env:
        value = os.environ.get(serve.api_key_env, "")
        if not value:
            raise RunFileError(
                f"serve.api_key_env names {serve.api_key_env}, which is not set",
                expected="an environment variable that holds the API key",
                hint=f"export {serve.api_key_env}=...",
            )
        keys.add_key(keys_file, serve.api_key_env, value)
    known = keys.read_keys(keys_file)
    return gateway.listen_for(serve.host, serve.port, known, hold_seconds=HOLD_SECONDS)


def _check_gateway(servers: promote.Servers, listen: gateway.Listen, name: str) -> None:
    """Before anything is loaded: the port must be ours or free, and other names must not lose
    theirs."""
    info = servers.keeper.info(GATEWAY)
    known = state.read(servers.places)
    if not (info and info.up):
        gateway.check_port(listen)
        return
    if known.gateway.get("port") == listen.port and known.gateway.get("host") == listen.host:
        return
    others = [
        other for other, entry in known.names.items() if other != name and entry.wanted == "up"
    ]
    if others:
        raise RunFileError(
            f"serve.host and serve.port are {listen.host}:{listen.port}, and the gateway serves "
            f"{', '.join(others)} at {known.gateway['host']}:{known.gateway['port']}",
            expected="the same address for every name of one machine",
            hint="use that address, or another TUNESERVE_HOME",
        )
    gateway.check_port(listen)


def _room(
    request: ReleaseRequest,
    facts: ModelFacts,
    rows: list[Row],
    servers: promote.Servers,
    champion: str | None,
) -> capacity.Capacity:
    """Length, KV cache and memory of the candidate; waits for memory that is just coming back."""
    longest = max([request.longest_row, *(len(row.ids) for row in rows)])
    free = capacity.read_free_memory(request.serve.tensor_parallel)
    held = 0
    if champion and request.serve.rollout == "hold":
        held = servers.keeper.memory_bytes(server_program(champion))
        free = replace(free, free_bytes=free.free_bytes + held)
    room = capacity.plan_capacity(
        facts, request.serve, request.hints, free, wanted_len=max(2048, 2 * longest)
    )
    too_long = [row for row in rows if len(row.ids) >= room.max_model_len]
    if too_long:
        raise InputError(
            f"{len(too_long)} held-out rows have {room.max_model_len} tokens or more "
            f"({too_long[0].source})",
            expected=f"rows shorter than the served length, {room.max_model_len}",
            hint="raise serve.max_model_len, or lower data.max_length",
        )

    def read() -> capacity.FreeMemory:
        now = capacity.read_free_memory(request.serve.tensor_parallel)
        return replace(now, free_bytes=now.free_bytes + held)

    capacity.wait_for_room(
        room,
        read,
        limit_seconds=_MEMORY_WAIT_SECONDS,
        rollout=request.serve.rollout,
        beside=champion,
    )
    log.info(
        "serving up to %d tokens, KV cache %s (%.0f chats of that length), about %s in all",
        room.max_model_len,
        human_bytes(room.kv_cache_bytes),
        room.chats,
        human_bytes(room.needed_bytes),
    )
    return room


def _bring_up(servers: promote.Servers, candidate: _Candidate, champion: str | None) -> None:
    """Boot, prove, judge and switch, in the way `serve.rollout` asks for."""
    serve, record = candidate.request.serve, candidate.record
    drain = float(serve.drain_timeout_seconds)
    if champion == record.id:  # the same release, whose server had died
        champion = None
    if serve.rollout == "hold" and champion:
        promote.replace_while_held(
            servers,
            record,
            lambda: _prove(servers, candidate),
            drain_seconds=drain,
            restart_champion=lambda old: promote.start_again(
                servers, old, serve.ready_timeout_seconds
            ),
        )
        return
    try:
        _prove(servers, candidate)
    except BaseException:
        servers.discard(record.id)
        raise
    keep_warm = bool(candidate.request.hints.get("keep_warm"))
    promote.make_current(servers, record, drain_seconds=drain, keep_warm=keep_warm)


def _end_if_idle(servers: promote.Servers) -> None:
    """After a refused first release nothing serves: leave no gateway and no keeper behind."""
    known = state.read(servers.places)
    if not any(entry.active and entry.wanted == "up" for entry in known.names.values()):
        promote.safely(lambda: promote.end_all(servers), "ending the gateway")


def _prove(servers: promote.Servers, candidate: _Candidate) -> None:
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
    prompts = prompts_of(candidate.rows, _SAMPLES) or [_SIMPLE_PROMPT]
    with _named(servers, candidate, "answers end", skipped, facts, command.arguments):
        sample = check_answers(
            child,
            socket_path,
            serve.name,
            prompts,
            max_tokens=_answer_tokens(candidate),
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
    for reason in report.skipped:
        log.warning("skipped: %s", reason)
    _write_report(servers, candidate, report, measured, command.arguments)
    report.raise_if_refused(record.id)
    record.proven = True
    with state.change(places) as changed:
        changed.releases[record.id] = record


def _answer_tokens(candidate: _Candidate) -> int:
    """Room for an answer: twice the longest known one, at least 64, at most 512 and what the
    server takes."""
    longest = max((len(row.ids) - row.answer_start for row in candidate.rows), default=64)
    return min(max(64, 2 * longest), 512, candidate.room.max_model_len // 2)


def _measure_champion(
    servers: promote.Servers, candidate: _Candidate, champion: str | None
) -> None:
    """Measure what serves on the candidate's rows, and keep it, before the candidate boots."""
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
    folder = Path(state.read(servers.places).release(champion).model)
    socket_path = servers.places.socket(champion)
    found, why = safely_measure(socket_path, request.serve.name, champion, rows, folder)
    if found is None:
        candidate.skipped.append(f"not worse than the champion: {why}")
        return
    folder = servers.places.release_folder(record.id)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / "champion.json")
    candidate.champion = found


def _judge(
    candidate: _Candidate,
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
        _answer_tokens(candidate),
        candidate.room.max_model_len,
        alive,
    )
    report, measured = judge_candidate(subject, skipped, facts)
    report.rungs = _rungs(candidate, "refused" if report.refused else "passed")
    return report, measured


def _rungs(candidate: _Candidate, decision: str) -> list[dict[str, str]]:
    """What was tried before on the ladder of exports, and this one; empty where it is the first."""
    before = list(candidate.request.hints.get("rungs", ()))
    method = candidate.facts.quantization or "16 bits"
    return [*before, {"method": method, "decision": decision, "reason": ""}] if before else []


@contextlib.contextmanager
def _named(
    servers: promote.Servers,
    candidate: _Candidate,
    gate: str,
    skipped: list[str],
    facts: dict[str, str],
    arguments: list[str],
) -> Iterator[None]:
    """A proof that comes before the measuring: when it refuses, the report says so as a gate."""
    try:
        yield
    except GateRefused as error:
        refused = Gate(gate, False, error.message, error.expected, "refused")
        report = GateReport({}, [refused], skipped, facts, rungs=_rungs(candidate, "refused"))
        _write_report(servers, candidate, report, Measured(), arguments)
        raise


def _write_report(
    servers: promote.Servers,
    candidate: _Candidate,
    report: GateReport,
    measured: Measured,
    arguments: list[str],
) -> None:
    request, record = candidate.request, candidate.record
    folder = servers.places.release_folder(record.id)
    write_report(folder, _title(record), report, measured, request.model)
    card = CardFacts(
        record.id, record.name, request.model, request.base, request.inputs, record.created
    )
    write_card(folder, card, report)
    write_json_atomic(
        folder / "report.json",
        {**record.report, "release": record.id, "model": record.model, "command": arguments},
    )


def _title(record: state.Release) -> str:
    return f"Release {record.id} of {record.name}"


def _metrics(
    listen: gateway.Listen, known: state.State, record: state.Release, *, reused: bool
) -> dict[str, Any]:
    prefix = "" if known.default == record.name else f"/{record.name}"
    if not reused:
        log.info("%s serves %s at %s%s/v1", record.name, record.id, listen.base_url, prefix)
    return {
        "endpoint": f"{listen.base_url}{prefix}/v1",
        "model": record.name,
        "release": record.id,
        "losses": record.report["losses"],
        "parity": record.report["parity"],
        "gates": record.report["gates"],
        "seconds_to_ready": record.seconds_to_ready,
        "memory_bytes": record.memory_bytes,
        "report": markdown(_title(record), GateReport.from_json(record.report)),
        "report_folder": str(layout().release_folder(record.id)),
        "reused": reused,
    }
