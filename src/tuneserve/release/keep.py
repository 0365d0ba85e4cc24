"""Keep the servers up in the foreground: what a container or a service manager runs."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType

from tuneserve.errors import TuneserveError
from tuneserve.release import control, promote, state
from tuneserve.release.layout import Layout, layout
from tuneserve.release.supervisor import GATEWAY, Keeper

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


class _Asked(BaseException):
    """We were asked to end; not an Exception, so that nothing that retries takes it for its own."""


def keep() -> None:
    """Start what was serving, and the process keeper for releases to come; ends them at SIGTERM.

    What served is started again by the next `keep`: ending it so is not `tuneserve down`.
    A server that does not come up is logged, and does not end the others. SIGTERM is heard at any
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
        ended = [name for name, info in servers.keeper.all().items() if info.up and name != GATEWAY]
        promote.end_all(servers)
        log.info("ended after %.1f s: %s", time.monotonic() - started, ", ".join(ended) or "idle")


def _ask_once(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):  # asking twice must not interrupt the end itself
        signal.signal(each, signal.SIG_IGN)
    log.info("%s: ending the servers", signal.Signals(number).name)
    raise _Asked


def _look_after(servers: promote.Servers) -> None:
    """Start everything, and again whenever the process keeper had to be started anew."""
    started_anew = True
    while True:
        try:
            if started_anew and _wanted(servers.places):
                control.up()  # each name by itself: one that fails does not end the others
        except TuneserveError as error:
            log.error("%s", error)
        time.sleep(_LOOK_SECONDS)
        try:
            # A refused first release ends it, and a kill -9 all that it kept.
            started_anew = servers.keeper.ensure_running()
        except TuneserveError as error:  # the next look tries again
            log.error("%s", error)
            started_anew = False


def _wanted(places: Layout) -> bool:
    return any(e.active and e.wanted == "up" for e in state.read(places).names.values())
