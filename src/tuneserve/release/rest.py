"""`serve.while_training: stop`: what is served here gives its memory to a run's heavy stages.

Before the first of them every server that has memory of the run's cards ends, after its running
answers; before the release, and whatever becomes of the run, all start again. Meanwhile this
process holds their names' locks. When it is killed the locks end with it, links are missing, and
`keep`, or the next `status`, `up` or run, finds that out of order and starts the servers.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import ExitStack
from types import TracebackType

from tuneserve.artifacts import artifact_id
from tuneserve.calls import StageCall, StageResult
from tuneserve.config import RunFile
from tuneserve.errors import DeviceBusy
from tuneserve.ladder import Execute
from tuneserve.places import run_root
from tuneserve.plan.machine import all_cards, visible_cards
from tuneserve.release import mend, promote, state
from tuneserve.release.address import Listen
from tuneserve.release.layout import layout
from tuneserve.release.supervisor import Keeper, server_program

log = logging.getLogger(__name__)

HEAVY = frozenset({"train", "evaluate", "quantize"})
"""Stages that the plan counts without what is served."""


class AtRest:
    """Runs stages, with what is served at rest while one of `HEAVY` has the card.

    Used as a context around a whole run.

    Args:
        run: The run file; does nothing unless its `serve.while_training` is `stop`.
        execute: Runs one stage.
    """

    def __init__(self, run: RunFile, execute: Execute) -> None:
        self._run, self._execute = run, execute
        self._wanted = run.serve.while_training == "stop"
        self._locks: ExitStack | None = None
        self._resting: list[str] = []

    def __enter__(self) -> AtRest:
        if self._wanted:
            self._mend()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wake()

    def execute(self, call: StageCall) -> StageResult:
        """Run a stage."""
        if self._wanted and call.stage in HEAVY and not _is_there(call):
            self._rest()
        elif call.stage == "release":
            self._wake()
        return self._execute(call)

    def _running(self) -> promote.Servers | None:
        """What serves here; None when nothing does."""
        if not run_root().is_dir():
            return None
        places = layout()
        servers = promote.Servers(places, Keeper(places))
        return servers if servers.keeper.running() else None

    def _rest(self) -> None:
        servers = self._running()
        if self._locks is not None or servers is None:
            return
        names = [
            name
            for name, entry in state.read(servers.places).names.items()
            if entry.active
            and entry.wanted == "up"
            and not _is_elsewhere(servers, name, self._run.train.gpus)
        ]
        with ExitStack() as locks:
            for name in names:
                locks.enter_context(state.lock_name(servers.places, name, state.AT_REST))
            log.warning(
                "downtime: %s stopped until the card is free again (serve.while_training: stop)",
                ", ".join(names) or "nothing",
            )
            self._locks, self._resting = locks.pop_all(), names
        for name in names:
            self._end(servers, name)

    def _end(self, servers: promote.Servers, name: str) -> None:
        known = state.read(servers.places)
        servers.places.name_link(name).unlink(missing_ok=True)
        if active := known.names[name].active:
            servers.drain(active, self._run.serve.drain_timeout_seconds)
        for release in known.releases.values():
            if release.name == name:
                servers.stop(release.id)

    def _wake(self) -> None:
        if self._locks is None:
            return
        places = layout()
        servers = promote.Servers(places, Keeper(places))  # its keeper may have died meanwhile
        try:
            if self._resting:
                servers.keeper.ensure_running()
                listen = Listen(**state.read(places).gateway)
                promote.safely(
                    lambda: servers.ensure_gateway(listen.as_files_are()), "the gateway's start"
                )
            for name in self._resting:
                mend.settle(servers, name, ready_seconds=self._run.serve.ready_timeout_seconds)
        finally:
            self._locks.close()
            self._locks, self._resting = None, []

    def _mend(self) -> None:
        """Start what a run that was killed left at rest."""
        servers = self._running()
        for name in mend.out_of_order(servers) if servers else ():
            assert servers is not None
            with contextlib.suppress(DeviceBusy):  # it is not left: somebody is at it
                with state.lock_name(servers.places, name, "mending"):
                    mend.settle(servers, name, ready_seconds=self._run.serve.ready_timeout_seconds)


def _is_elsewhere(servers: promote.Servers, name: str, gpus: int) -> bool:
    """Whether the servers of `name` are seen on cards that the run does not take, and on no other.

    Where the driver does not show processes (inside most containers) nothing is seen.
    """
    pids = {
        pid
        for release in state.read(servers.places).releases.values()
        if release.name == name
        for pid in servers.keeper.members(server_program(release.id))
    }
    anywhere = {process.pid for card in all_cards() for process in card.processes}
    ours = {process.pid for card in visible_cards()[:gpus] for process in card.processes}
    return bool(pids & anywhere) and not pids & ours


def _is_there(call: StageCall) -> bool:
    """Whether the store has what the stage would make."""
    kind = call.spec.makes
    return kind is not None and call.store.find(artifact_id(kind, call.key())) is not None
