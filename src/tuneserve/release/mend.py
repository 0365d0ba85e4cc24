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

_DRAIN_SECONDS, _PASSING_SECONDS = 30.0, 2.0


def tidy(servers: promote.Servers, name: str, *, passing: bool = False) -> list[str]:
    """Bring symlink, state file and processes together after a crash, as far as that needs no
    start. Hold the name's lock.

    The release that requests reach wins when its server lives; else the one the file calls active.
    Servers that are neither are ended: they may have the memory that the next start needs.

    Args:
        servers: Of this user.
        name: A served name.
        passing: For a command that only looks: a server that still answers requests is left to
            them.

    Returns:
        The servers that were left.
    """
    places = servers.places
    known = state.read(places)
    if name not in known.names or known.names[name].wanted != "up":
        return []
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
    left = _end_strays(servers, name, passing=passing)
    if entry.active and entry.active in up and current not in up:
        servers.switch(name, entry.active)
    return left


def reconcile(servers: promote.Servers, name: str, *, ready_seconds: float) -> None:
    """`restore`, and let the active release answer a chat.

    Raises:
        InputError: Its model folder is gone.
        ServerError: It does not come up, or does not answer.
    """
    if restored := restore(servers, name, ready_seconds=ready_seconds):
        release, chat_seconds = restored
        promote.check_serves(servers, release, chat_seconds=chat_seconds)


def restore(
    servers: promote.Servers, name: str, *, ready_seconds: float
) -> tuple[state.Release, float] | None:
    """`tidy`, then start the active release unless it runs, and wait until it is up.

    Returns:
        It, and how many seconds its first chat may take; None when nothing should serve.

    Raises:
        InputError: Its model folder is gone.
        ServerError: It does not come up.
    """
    tidy(servers, name)
    release = _wanted(servers, name)
    if release is None:
        return None
    chat_seconds = promote.bring_back(servers, release, ready_seconds)
    _let_reach(servers, release)
    return release, chat_seconds


def begin(servers: promote.Servers, name: str) -> state.Release | None:
    """The same, but waits for no server; requests are held until it listens.

    Nothing is started beside a server that was left, which may have the memory for it.
    """
    left = tidy(servers, name, passing=True)
    release = _wanted(servers, name)
    if release is None:
        return None
    if left and release.id not in _up(servers, state.read(servers.places), name):
        return None
    promote.begin_again(servers, release)
    _let_reach(servers, release, passing=True)
    return release


def _wanted(servers: promote.Servers, name: str) -> state.Release | None:
    known = state.read(servers.places)
    entry = known.names.get(name)
    if entry is None or entry.wanted != "up" or not entry.active:
        return None
    return known.release(entry.active)


def _let_reach(servers: promote.Servers, release: state.Release, *, passing: bool = False) -> None:
    if current_release(servers.places, release.name) != release.id:
        servers.switch(release.name, release.id)
        _end_strays(servers, release.name, passing=passing)
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


def _end_strays(servers: promote.Servers, name: str, *, passing: bool) -> list[str]:
    """End the servers that nothing refers to; returns those that were left, see `tidy`."""
    known = state.read(servers.places)
    entry = known.names[name]
    kept = {entry.active, entry.warm, current_release(servers.places, name)}
    left = []
    for release in _up(servers, known, name) - kept:
        if not servers.drain(release, _PASSING_SECONDS if passing else _DRAIN_SECONDS) and passing:
            log.warning("%s, which nothing refers to, still answers: left until it has", release)
            left.append(release)
            continue
        log.warning("ending %s, which nothing refers to", release)
        servers.stop(release)
    return left
