"""The gateway's process: started, and restarted when it should listen otherwise.

A gateway that works is not lost to settings it cannot start with: the former ones are put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import RunFileError, ServerError, TuneserveError
from tuneserve.release import gateway, state
from tuneserve.release.address import Listen, answers, check_port
from tuneserve.release.layout import Layout
from tuneserve.release.supervisor import GATEWAY, Keeper, Program, tail

log = logging.getLogger(__name__)

_START_SECONDS = 15.0


def check(places: Layout, keeper: Keeper, listen: Listen, name: str) -> None:
    """Before anything is loaded for `name`: the ports must be ours or free, and what other names
    are reached by must stay as it is.

    Raises:
        RunFileError: Other names would be reached at another address, or no longer by HTTPS, or
            with another certificate.
        PortTaken: Somebody else listens there.
    """
    known = state.read(places)
    former = Listen(**known.gateway) if known.gateway else None
    others = [
        other
        for other, entry in known.names.items()
        if other != name and entry.wanted == "up" and entry.active
    ]
    if former and others and not former.reached_like(listen):
        raise RunFileError(
            f"this run file asks for {listen.described}, and the gateway serves "
            f"{', '.join(others)} at {former.described}",
            expected="the same serve.host, serve.port, serve.tls and certificate files for every "
            "name of one machine",
            hint=f"use those; or another TUNESERVE_HOME; or `tuneserve down {others[0]}` first",
        )
    check_port(listen, but=former if _is_up(keeper) else None)


def ensure(places: Layout, keeper: Keeper, listen: Listen) -> None:
    """Start the gateway, or restart it when it should listen otherwise.

    Raises:
        PortTaken: Somebody else listens there.
        ServerError: It does not start; the former one, if there was one, runs again.
    """
    keeper.ensure_running()
    with _alone(places):
        up = _is_up(keeper)
        known = state.read(places).gateway
        if up and known == listen.to_json():
            return
        former = Listen(**known) if up and known else None
        check_port(listen, but=former)
        config = places.conf / "gateway.json"
        before = json.loads(config.read_text("utf-8")) if former else None
        try:
            _start(places, keeper, gateway.caddy_config(places, listen))
            _wait(places, keeper, listen)
        except BaseException as error:
            if former is not None:
                _put_back(places, keeper, before, former, wait=isinstance(error, Exception))
            else:
                keeper.remove(GATEWAY)
            raise
        with state.change(places) as changed:
            changed.gateway = listen.to_json()


@contextlib.contextmanager
def _alone(places: Layout) -> Iterator[None]:
    """Two releases, of two names, must not restart it at once."""
    with (places.root / "locks" / "gateway.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _is_up(keeper: Keeper) -> bool:
    info = keeper.info(GATEWAY)
    return info is not None and info.up


def _start(places: Layout, keeper: Keeper, content: Any) -> None:
    config = places.conf / "gateway.json"
    write_json_atomic(config, content)
    config.chmod(0o600)
    home = str(places.root / "caddy")
    program = Program(
        GATEWAY,
        [gateway.caddy_binary(), "run", "--config", str(config)],
        {"XDG_DATA_HOME": home, "XDG_CONFIG_HOME": home, "HOME": home},
        places.logs / "gateway-start.log",
    )
    keeper.put(program)
    keeper.start(GATEWAY)


def _wait(places: Layout, keeper: Keeper, listen: Listen) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        info = keeper.info(GATEWAY)
        if info is None or info.state not in ("STARTING", "RUNNING"):
            break
        if answers(listen):
            return
        time.sleep(0.05)
    lines = tail(places.logs / "gateway.log", 1)
    raise ServerError(
        f"the gateway does not start: {lines[-800:]}",
        hint=f"read {places.logs}/gateway.log",
    )


def _put_back(places: Layout, keeper: Keeper, content: Any, former: Listen, *, wait: bool) -> None:
    """Run with the former settings again, while another error is on its way."""
    log.warning("the gateway goes on with its former settings, %s", former.described)
    try:
        _start(places, keeper, content)
        if wait:
            _wait(places, keeper, former)
    except TuneserveError as error:
        log.error("the gateway does not start with its former settings either: %s", error)
