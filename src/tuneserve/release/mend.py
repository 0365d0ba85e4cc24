"""After a crash: what symlink, state file and processes say is brought together again.

A command that is killed in the middle of a switch leaves `promoting` in the state file, a symlink
that points elsewhere, or a server that nothing refers to. Whoever looks next and gets the name's
lock mends that.
"""

from __future__ import annotations

import logging

from tuneserve.errors import TuneserveError
from tuneserve.release import promote, state
from tuneserve.release.layout import current_release
from tuneserve.release.supervisor import server_program

log = logging.getLogger(__name__)


def tidy(servers: promote.Servers, name: str) -> None:
    """Bring symlink, state file and processes together after a crash, as far as that needs no
    start. Hold the name's lock.

    The release that requests reach wins when its server lives; else the one the file calls active.
    Servers that are neither are ended: they may have the memory that the next start needs.
    """
    places = servers.places
    known = state.read(places)
    if name not in known.names or known.names[name].wanted != "up":
        return
    current, begun = current_release(places, name), known.names[name].promoting
    if begun:
        log.warning("a switch of %s to %s was interrupted; putting it in order", name, begun)
    up = _up(servers, known, name)
    with state.change(places) as changed:
        entry = changed.names[name]
        if begun and current == begun and begun in up:
            promote.set_active(changed, name, begun)
        entry.promoting = None
        if entry.warm not in up:
            entry.warm = None
    _end_strays(servers, name)
    if entry.active and entry.active in up and current not in up:
        servers.switch(name, entry.active)


def reconcile(servers: promote.Servers, name: str, *, ready_seconds: float) -> None:
    """`tidy`, then start the active release unless it runs, and let it answer a chat.

    Raises:
        InputError: Its model folder is gone.
        ServerError: It does not come up, or does not answer.
    """
    tidy(servers, name)
    known = state.read(servers.places)
    entry = known.names.get(name)
    if entry is None or entry.wanted != "up" or not entry.active:
        return
    promote.start_again(servers, known.release(entry.active), ready_seconds)
    if current_release(servers.places, name) != entry.active:
        servers.switch(name, entry.active)
        _end_strays(servers, name)
    promote.point_default(servers)


def settle(servers: promote.Servers, name: str, *, ready_seconds: float) -> bool:
    """Reconcile; what cannot be started must not bar its successor. Whether it is in order."""
    try:
        reconcile(servers, name, ready_seconds=ready_seconds)
    except TuneserveError as error:
        log.error("what served %s does not serve: %s", name, error)
        return False
    return True


def out_of_order(servers: promote.Servers) -> list[str]:
    """Names whose symlink, state and processes do not agree: somebody is at it, or was killed."""
    known = state.read(servers.places)
    return [
        name
        for name, entry in known.names.items()
        if entry.wanted == "up"
        and (
            entry.promoting
            or current_release(servers.places, name) != entry.active
            or _up(servers, known, name) - {entry.active, entry.warm}
        )
    ]


def ended(servers: promote.Servers) -> list[str]:
    """Names that should be served and whose active release has no process: the keeper of the
    processes gave it up after many trials, or somebody ended it."""
    known = state.read(servers.places)
    return [
        name
        for name, entry in known.names.items()
        if entry.active and entry.wanted == "up" and entry.active not in _up(servers, known, name)
    ]


def _up(servers: promote.Servers, known: state.State, name: str) -> set[str]:
    """Releases of a name whose server runs, or is being started again."""
    processes = servers.keeper.all()
    return {
        release.id
        for release in known.releases.values()
        if release.name == name
        and (info := processes.get(server_program(release.id))) is not None
        and info.up
    }


def _end_strays(servers: promote.Servers, name: str) -> None:
    known = state.read(servers.places)
    entry = known.names[name]
    kept = {entry.active, entry.warm, current_release(servers.places, name)}
    for release in _up(servers, known, name) - kept:
        log.warning("ending %s, which nothing refers to", release)
        servers.drain(release, 30.0)
        servers.stop(release)
