"""The release stage: boot a candidate, prove it, judge it, then switch to it.

Whatever is refused or fails leaves the champion serving and no process behind.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuneserve.config import ServeSection
from tuneserve.errors import InputError, RunFileError
from tuneserve.progress import human_bytes
from tuneserve.release import address, capacity, entrance, keys, mend, promote, state
from tuneserve.release.gate_report import markdown
from tuneserve.release.gates import GateReport
from tuneserve.release.heldout import Row, read_rows
from tuneserve.release.layout import layout
from tuneserve.release.model_files import ModelFacts, read_model
from tuneserve.release.proving import Candidate, measure_champion, prove, title_of
from tuneserve.release.request import ReleaseRequest, check_tools, request_of
from tuneserve.release.supervisor import Keeper, server_program
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

_MEMORY_WAIT_SECONDS = 60.0


def run(context: StageContext) -> dict[str, Any]:
    """The stage's entry: see `release`."""
    # A cancelled run sends SIGTERM: what is under way is then undone like after any other error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return release(request_of(context))


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
        listen = entrance.check(
            places,
            servers.keeper,
            listen,
            name,
            may_hold_less=request.serve.hold_seconds is not None,
        )
        try:
            record, reused = _release_locked(servers, request, facts, rows, side, listen)
            servers.ensure_gateway(listen)  # loading took minutes: is the address still ours?
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
    listen: address.Listen,
) -> tuple[state.Release, bool]:
    """Re-use the active release when it is the one asked for, else bring up a candidate."""
    places, name = servers.places, request.serve.name
    servers.keeper.ensure_running()
    answers = mend.settle(servers, name, ready_seconds=request.serve.ready_timeout_seconds)
    known = state.read(places)
    entry = known.names.get(name, state.Name())
    record = known.find(name, request.key)
    champion = entry.active if entry.wanted == "up" else None
    servers.ensure_gateway(listen)
    if record and record.proven and record.id == champion and answers:
        log.info("%s already serves this model as %s", name, record.id)
        return record, True
    kept = record is not None and servers.keeper.info(server_program(record.id)) is not None
    if record and record.proven and kept and champion in (None, record.id):
        log.info("%s was proven before and nothing else serves: starting it again", record.id)
        _start_anew(servers, record, champion, request.serve)
        return record, True
    promote.end_warm(servers, name)
    room = _room(request, facts, rows, servers, champion)
    with state.change(places) as changed:
        record = changed.find(name, request.key) or changed.add(
            name, request.key, str(request.model), request.artifact
        )
        record.rollout = request.serve.rollout
    candidate = Candidate(request, facts, rows, side, record, room)
    measure_champion(servers, candidate, champion, answers=answers)
    _bring_up(servers, candidate, champion)
    return record, False


def _start_anew(
    servers: promote.Servers, record: state.Release, champion: str | None, serve: ServeSection
) -> None:
    """Start a release that was proven before and make it current; one that runs, but answers
    nothing, is ended first, after what it may still answer."""
    promote.check_startable(servers, record)
    drain_seconds = float(serve.drain_timeout_seconds)
    with promote.promoting(servers, record):
        try:
            if champion:
                servers.hold(record.name)
                servers.drain(record.id, drain_seconds)
            servers.stop(record.id)
            promote.start_again(servers, record, serve.ready_timeout_seconds)
        except BaseException:
            if champion:  # the process keeper goes on trying
                servers.switch(record.name, record.id)
            else:
                servers.stop(record.id)
            raise
    promote.make_current(servers, record, drain_seconds=drain_seconds)


def _listen(request: ReleaseRequest, keys_file: Path) -> address.Listen:
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
    return entrance.listen_of(serve, keys.read_keys(keys_file))


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


def _bring_up(servers: promote.Servers, candidate: Candidate, champion: str | None) -> None:
    """Boot, prove, judge and switch, in the way `serve.rollout` asks for."""
    serve, record = candidate.request.serve, candidate.record
    drain = float(serve.drain_timeout_seconds)
    if champion == record.id:  # the same release, whose server had died
        champion = None
    if serve.rollout == "hold" and champion:
        promote.replace_while_held(
            servers,
            record,
            lambda: prove(servers, candidate),
            drain_seconds=drain,
            restart_champion=lambda old: promote.start_again(
                servers, old, serve.ready_timeout_seconds
            ),
            end_refused=servers.discard,
        )
        return
    try:
        prove(servers, candidate)
    except BaseException:
        servers.discard(record.id)
        raise
    promote.make_current(servers, record, drain_seconds=drain, keep_warm=serve.keep_warm)


def _end_if_idle(servers: promote.Servers) -> None:
    """After a refused first release nothing serves: leave no gateway and no keeper behind."""
    known = state.read(servers.places)
    if not any(entry.active and entry.wanted == "up" for entry in known.names.values()):
        promote.safely(lambda: promote.end_all(servers), "ending the gateway")


def _metrics(
    listen: address.Listen, known: state.State, record: state.Release, *, reused: bool
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
        "report": markdown(title_of(record), GateReport.from_json(record.report)),
        "report_folder": str(layout().release_folder(record.id)),
        "reused": reused,
    }
