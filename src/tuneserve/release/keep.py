"""Keep the servers up in the foreground: what a container or a service manager runs."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType

from tuneserve.errors import DeviceBusy, TuneserveError
from tuneserve.release import control, entrance, mend, promote, state
from tuneserve.release.address import Listen
from tuneserve.release.layout import Layout, layout
from tuneserve.release.supervisor import GATEWAY, Keeper

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0


class _Asked(BaseException):
    """We were asked to end; not an Exception, so that nothing that retries takes it for its own."""


def keep() -> None:
    """Start what was serving, and the process keeper for releases to come; ends them at SIGTERM.

    What served is started again by the next `keep`: ending it so is not `tuneserve down`.
    A server or a gateway that does not come up is logged, does not end the others, and is tried
    again. A renewed certificate file is taken. SIGTERM is heard at any
    time, also while a server loads: that one is given up, the others finish their answers.
    """
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ask_once)
    try:
        log.info("keeping the servers of %s", places.root)
        _look_after(servers)
    except _Asked:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        started = time.monotonic()
        ended: list[str] = []
        try:
            known = servers.keeper.all()
            ended = [name for name, info in known.items() if info.up and name != GATEWAY]
        except TuneserveError as error:
            log.warning("%s", error)
        promote.end_all(servers)
        log.info("ended after %.1f s: %s", time.monotonic() - started, ", ".join(ended) or "idle")


def _ask_once(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):  # asking twice must not interrupt the end itself
        signal.signal(each, signal.SIG_IGN)
    log.info("%s: ending the servers", signal.Signals(number).name)
    raise _Asked


def _look_after(servers: promote.Servers) -> None:
    """Start everything, and again whenever the process keeper had to be started anew; then whatever
    is found out of order. What fails is tried again, after growing pauses."""
    anew, due, pause = True, 0.0, _LOOK_SECONDS
    said: set[str] = set()
    while True:
        failed: list[TuneserveError] = []
        try:
            # A refused first release ends it, and a kill -9 all that it kept.
            if servers.keeper.ensure_running():
                anew, due = True, 0.0
            if time.monotonic() >= due:
                failed = _look(servers, every=anew)
                anew = bool(failed)
        except TuneserveError as error:
            failed = [error]
        for each in failed:
            if str(each) not in said:  # once, not at every trial
                log.error("%s", each)
        if failed:
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            due = time.monotonic() + pause
            said = {str(each) for each in failed}
        elif time.monotonic() >= due:
            pause, said = _LOOK_SECONDS, set()
        time.sleep(_LOOK_SECONDS)


def _look(servers: promote.Servers, *, every: bool) -> list[TuneserveError]:
    """Start the gateway and the servers that are wanted and missing; returns what failed.

    Args:
        servers: The servers.
        every: Look at every server, not only at names that an interrupted command left behind or
            whose server has no process any more.
    """
    failed: list[TuneserveError] = []
    try:
        _look_at_gateway(servers)
    except TuneserveError as error:  # the servers load meanwhile
        failed.append(error)
    names = {*mend.out_of_order(servers), *mend.ended(servers)}
    for name in sorted(names.union(_wanted(servers.places) if every else ())):
        try:
            with state.lock_name(servers.places, name, "starting what served"):
                restored = mend.restore(servers, name, ready_seconds=control.READY_SECONDS)
            if restored:  # a release need not wait for the answer
                _check_serves(servers, *restored)
        except DeviceBusy as error:  # who holds it puts it in order, unless that is killed
            if every:
                failed.append(error)
        except TuneserveError as error:
            failed.append(error)
    return failed


def _check_serves(servers: promote.Servers, release: state.Release, chat_seconds: float) -> None:
    try:
        promote.check_serves(servers, release, chat_seconds=chat_seconds)
    except TuneserveError:
        entry = state.read(servers.places).names[release.name]
        if entry.promoting is None and (entry.active, entry.wanted) == (release.id, "up"):
            raise  # else another command has ended it meanwhile


def _look_at_gateway(servers: promote.Servers) -> None:
    if not _wanted(servers.places):
        return
    listen = Listen(**state.read(servers.places).gateway)
    if listen.is_renewed():
        servers.ensure_gateway(listen.as_files_are())
    entrance.mend(servers.places, servers.keeper)


def _wanted(places: Layout) -> list[str]:
    return [name for name, e in state.read(places).names.items() if e.active and e.wanted == "up"]
