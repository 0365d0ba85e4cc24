"""What `status` looks at. It is asked by health checks every few seconds: it waits for nobody, and
what it cannot put in order it logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from tuneserve.errors import DeviceBusy, TuneserveError
from tuneserve.release import entrance, keys, mend, promote, state
from tuneserve.release.capacity import device_memory_bytes
from tuneserve.release.layout import Layout, current_release
from tuneserve.release.ready import healthy
from tuneserve.release.supervisor import Keeper, ProcessInfo, server_program
from tuneserve.release.unixhttp import load_of

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 3.0


def put_in_order(servers: promote.Servers) -> dict[str, str]:
    """Finish or undo switches whose process is gone, and the gateway's changes; returns who is at
    the others, by name. Where the processes cannot be seen from here, nothing is touched.

    What was stopped half-way is started, and may take a few seconds until it answers; after that it
    shows as being started.
    """
    busy: dict[str, str] = {}
    begun: list[state.Release] = []
    if not servers.keeper.running():
        return busy
    try:
        entrance.check_seen(servers.keeper)
    except TuneserveError as error:
        log.warning("%s", error)
        return busy
    try:
        entrance.mend(servers.places, servers.keeper, passing=True)
    except TuneserveError as error:  # a stranger has the port, or the certificate has expired
        log.warning("%s", error)
    try:
        names = mend.out_of_order(servers)
    except TuneserveError as error:
        log.warning("%s", error)
        return busy
    for name in names:
        try:
            with state.lock_name(servers.places, name, "mending"):
                if release := mend.begin(servers, name):
                    begun.append(release)
        except DeviceBusy as error:  # it is not interrupted
            busy[name] = str(error)
        except TuneserveError as error:
            log.warning("%s: %s", name, error)
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end and not all(
        healthy(servers.places.socket(release.id), release.id) for release in begun
    ):
        time.sleep(0.05)
    return busy


def processes(keeper: Keeper) -> Mapping[str, ProcessInfo]:
    """The known processes; none when supervisord is just ending."""
    try:
        return keeper.all()
    except TuneserveError as error:
        log.warning("%s", error)
        return {}


def key_names(places: Layout) -> list[str]:
    """Names of the API keys; none, and why, when their file cannot be used."""
    try:
        return sorted(keys.read_keys(places.keys))
    except TuneserveError as error:
        log.warning("%s", error)
        return []


def name_status(
    servers: promote.Servers,
    name: str,
    entry: state.Name,
    known: state.State,
    running: Mapping[str, ProcessInfo],
    busy: str,
) -> dict[str, Any]:
    """What serves under a name: its release, state, health, memory in bytes and load.

    Args:
        servers: Of this user.
        name: A served name.
        entry: What the state file says of it.
        known: The state file.
        running: The known processes.
        busy: Who holds the name's lock; empty when nobody does.
    """
    current = current_release(servers.places, name)
    record = known.releases.get(entry.active or "")
    found: dict[str, Any] = {
        "release": entry.active,
        "since": entry.since,
        "state": "down",
        "health": "down",
        "memory_bytes": 0,
        "requests_running": None,
        "requests_total": None,
        "model": record.model if record else None,
        "artifact": record.artifact if record else None,
        "losses": record.report.get("losses") if record else None,
        "warm": entry.warm,
        "warm_memory_bytes": 0,
        "device_memory_bytes": 0,
        "history": entry.history,
    }
    if entry.wanted != "up" or not entry.active:
        return found
    program = server_program(entry.active)
    info = running.get(program)
    answer = healthy(servers.places.socket(entry.active), entry.active)
    load = load_of(answer) if answer else None
    found["health"] = "healthy" if answer else ("starting" if info and info.up else "down")
    if entry.promoting or current != entry.active:
        found["state"] = "at rest" if state.AT_REST in busy else "switching"
    elif answer:
        found["state"] = "serving"
    else:
        found["state"] = "restarting" if info and info.up else "failed"
    found["memory_bytes"] = servers.keeper.memory_bytes(program)
    found["device_memory_bytes"] = device_memory_bytes(servers.keeper.members(program))
    if entry.warm:
        found["warm_memory_bytes"] = servers.keeper.memory_bytes(server_program(entry.warm))
    if load:
        found["requests_running"], found["requests_total"] = load
    return found
