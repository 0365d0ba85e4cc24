"""Keep the servers up in the foreground: what a container or a service manager runs."""

from __future__ import annotations

import logging
import signal
import threading

from tuneserve.errors import TuneserveError
from tuneserve.release import control, promote, state
from tuneserve.release.layout import Layout, layout
from tuneserve.release.supervisor import Keeper

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


def keep() -> None:
    """Start what was serving, and the process keeper for releases to come; ends them at SIGTERM.

    What served is started again by the next `keep`: ending it so is not `tuneserve down`.
    A server that does not come up is logged, and does not end the others.
    """
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    log.info("keeping the servers of %s", places.root)
    try:
        started_anew = True
        while True:
            try:
                if started_anew and _wanted(places):
                    control.up()  # each name by itself: one that fails does not end the others
            except TuneserveError as error:
                log.error("%s", error)
            if ended.wait(_LOOK_SECONDS):
                return
            try:
                # A refused first release ends it, and a kill -9 all that it kept.
                started_anew = servers.keeper.ensure_running()
            except TuneserveError as error:  # the next look tries again
                log.error("%s", error)
                started_anew = False
    finally:
        promote.end_all(servers)


def _wanted(places: Layout) -> bool:
    return any(e.active and e.wanted == "up" for e in state.read(places).names.values())
