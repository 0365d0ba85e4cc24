"""Keep the servers up in the foreground: what a container or a service manager runs."""

from __future__ import annotations

import logging
import signal
import threading

from tuneserve.release import control, promote, state
from tuneserve.release.layout import layout
from tuneserve.release.supervisor import Keeper

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


def keep() -> None:
    """Start what was serving, and the process keeper for releases to come; ends them at SIGTERM.

    What served is started again by the next `keep`: ending it so is not `tuneserve down`.

    Raises:
        ServerError: A server or the keeper does not come up.
    """
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    known = state.read(places)
    if any(entry.active and entry.wanted == "up" for entry in known.names.values()):
        control.up()
    log.info("keeping the servers of %s", places.root)
    try:
        while not ended.wait(_LOOK_SECONDS):
            servers.keeper.ensure_running()  # a refused first release ends it
    finally:
        promote.end_all(servers)
