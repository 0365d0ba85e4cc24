"""One run per served name across all worker hosts, through a global concurrency limit.

The locks of `tuneserve.runlock` serve one machine. The limit's lease is renewed while the run
lives and lapses after it was killed. A server that restarts forgets its leases but not the taken
slots: who waits looks whether the holder still runs, and frees a slot that nobody holds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed
from prefect.variables import Variable

from tuneserve.config import RunFile
from tuneserve.errors import DeviceBusy
from tuneserve.runs import RunRecord, now

log = logging.getLogger(__name__)

_LEASE_SECONDS = 120.0
_LOOK_SECONDS = 10.0


@contextlib.contextmanager
def alone(run: RunFile, flow_run_id: str) -> Iterator[None]:
    """Hold the served name on all hosts that use this Prefect server.

    Raises:
        DeviceBusy: Another run holds it (see `overlap` in the run file).
    """
    # The service logs from its own thread, also after we have heard of it: so for good.
    logging.getLogger("prefect._internal.concurrency").addFilter(_no_mere_wait)
    limit = f"tuneserve-{run.serve.name}"
    patience = run.overlap.max_wait_seconds if run.overlap.when_busy == "wait" else 0.0
    deadline = time.monotonic() + patience
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(limit, 1)
        slot = contextlib.ExitStack()
        told, ended_looks = "", 0
        while True:
            try:
                slot.enter_context(_slot(limit, flow_run_id))
                break
            except TimeoutError as error:
                other = _holder(client, run.serve.name)
                # One look can fall between a new holder's slot and the note that names it.
                ended_looks = 0 if other else ended_looks + 1
                if ended_looks == 1:
                    continue
                if other is None:
                    log.warning("the slot of %s was held by a run that ended: freeing it", limit)
                    freed = GlobalConcurrencyLimitUpdate(active_slots=0)
                    client.update_global_concurrency_limit(limit, freed)
                elif time.monotonic() >= deadline:
                    raise DeviceBusy(
                        f"the served name {run.serve.name!r} is held by {other}",
                        expected="one run at a time",
                        hint="wait until that run has ended, cancel it, or set overlap.when_busy: "
                        "wait",
                    ) from error
                elif other != told:
                    log.info("waiting: %r is held by %s", run.serve.name, other)
                    told = other
        held = {"run": flow_run_id, "since": now(), "host": socket.gethostname()}
        Variable.set(_variable(run.serve.name), json.dumps(held), overwrite=True)
    try:
        yield
    finally:
        try:
            slot.close()
        except httpx.HTTPError as error:  # the lease lapses by itself
            log.warning("the slot of %s could not be given back: %s", limit, error)


def mark_crashed(stale: Sequence[RunRecord]) -> None:
    """Tell Prefect of runs of this machine that were killed; it would show them running."""
    with get_client(sync_client=True) as client:
        for record in stale:
            with contextlib.suppress(ValueError, ObjectNotFound, httpx.HTTPError):
                found = client.read_flow_run(UUID(record.id))
                if found.state is None or not found.state.is_final():
                    crashed: Any = Crashed(message=record.error)
                    client.set_flow_run_state(found.id, crashed, force=True)


def _slot(limit: str, flow_run_id: str) -> contextlib.AbstractContextManager[None]:
    return concurrency(
        limit,
        occupy=1,
        strict=True,
        timeout_seconds=_LOOK_SECONDS,
        lease_duration=_LEASE_SECONDS,
        holder=ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run_id)),
        raise_on_lease_renewal_failure=False,  # a server that is away must not end the run
    )


def _no_mere_wait(record: logging.LogRecord) -> bool:
    """Drop what Prefect logs as an error when a look for a slot finds none: we are told as well."""
    service = record.args[0] if isinstance(record.args, tuple) and record.args else None
    looks = service == "ConcurrencySlotAcquisitionWithLeaseService"
    return not (looks and isinstance(sys.exc_info()[1], TimeoutError))


def _holder(client: SyncPrefectClient, served: str) -> str | None:
    """Who holds the name, as a phrase; None when that run has ended."""
    known = Variable.get(_variable(served), default=None)
    if known is None:
        return "a run that is just starting"
    held = json.loads(str(known))
    try:
        state = client.read_flow_run(UUID(held["run"])).state
    except ObjectNotFound:
        return None
    if state is None or state.is_final():
        return None
    return f"run {held['run']} on {held['host']} since {held['since']}"


def _variable(served: str) -> str:
    return f"tuneserve_holder_{served.replace('-', '_')}"
