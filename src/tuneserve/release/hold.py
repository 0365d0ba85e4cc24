"""How long requests are held at a switch by `hold`: foreseen, watched, and kept for the next one.

The gateway holds a request for as long as it was told when it started. What waits longer is lost,
so it is said before a switch that will take longer, and again when one does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator

from tuneserve.progress import human_seconds
from tuneserve.release import state
from tuneserve.release.address import Listen
from tuneserve.release.layout import Layout

log = logging.getLogger(__name__)

_MARGIN = 1.25  # what is advised, over what was measured


@contextlib.contextmanager
def watched(places: Layout, release: state.Release) -> Iterator[None]:
    """Around a switch by `hold` to `release`: warns of requests that are lost, and measures."""
    known = state.read(places)
    limit = Listen(**known.gateway).hold_seconds
    if (expected := expected_seconds(known, release.name)) > limit:
        log.warning(
            "%s: the last switch took %s, and requests are held for %s at most: later answers are "
            "errors; set serve.hold_seconds to %d or more",
            release.name,
            human_seconds(expected),
            human_seconds(limit),
            math.ceil(_MARGIN * expected),
        )
    late = threading.Timer(limit, _say_lost, (release.name, limit))
    late.daemon = True
    late.start()
    started = time.monotonic()
    try:
        yield
    finally:
        late.cancel()
    release.seconds_held = round(time.monotonic() - started, 1)
    with state.change(places) as changed:
        changed.releases[release.id].seconds_held = release.seconds_held


def expected_seconds(known: state.State, name: str) -> float:
    """What the last switch by `hold` to a release of `name` took; before there was one, what the
    current release took to become ready; 0 when neither is known."""
    entry = known.names.get(name, state.Name())
    before = [item["release"] for item in reversed(entry.history)]
    served = [known.releases[id] for id in (entry.active, *before) if id in known.releases]
    held = (release.seconds_held for release in served if release.seconds_held)
    return next(held, served[0].seconds_to_ready if served else 0.0)


def _say_lost(name: str, limit: int) -> None:
    log.warning(
        "%s: requests have been held for %s (serve.hold_seconds); who has waited so long gets an "
        "error now",
        name,
        human_seconds(limit),
    )
