"""The gateway's process: started, and restarted when it should listen otherwise.

Whether it works is what its own process listens on and answers, not what supervisord says of it: a
gateway that is started again and again because a stranger has its port counts as up there. Where
what it listens on cannot be seen, supervisord is believed, and the answer. A gateway that works is
not lost to settings it cannot start with: the former ones are put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.config import ServeSection
from tuneserve.errors import RunFileError, ServerError, TuneserveError
from tuneserve.places import run_root
from tuneserve.release import gateway, state
from tuneserve.release.address import Listen, answers, check_port, listen_for, ports_of
from tuneserve.release.keys import read_keys
from tuneserve.release.layout import Layout, layout
from tuneserve.release.supervisor import GATEWAY, Keeper, Program, tail

log = logging.getLogger(__name__)

_START_SECONDS = 15.0


def listen_of(serve: ServeSection, keys: Mapping[str, str]) -> Listen:
    """How a run file asks to listen, with API keys by name.

    Raises:
        RunFileError: See `listen_for`.
    """
    return listen_for(
        serve.host,
        serve.port,
        keys,
        hold_seconds=serve.longest_hold_seconds,
        tls=serve.tls,
        certificate=serve.tls_certificate,
        key=serve.tls_key,
    )


def check_early(serve: ServeSection) -> None:
    """Ask before anything is trained what `check` asks when it is to be released.

    Where the gateway runs in other namespaces nothing is asked: who listens there cannot be seen.

    Raises:
        RunFileError, PortTaken: See `check` and `listen_for`.
    """
    # The key itself is checked where the run starts, and written down by the release.
    keys = {serve.api_key_env: ""} if serve.api_key_env else {}
    if not run_root().is_dir():
        check_port(listen_of(serve, keys))
        return
    places = layout()
    keeper = Keeper(places)
    listen = listen_of(serve, {**read_keys(places.keys), **keys})
    if not (keeper.running() and keeper.is_elsewhere()):
        check(places, keeper, listen, serve.name)


def held() -> frozenset[int]:
    """The ports that the gateway of this TUNESERVE_HOME listens on now.

    Raises:
        TuneserveError: What runs there cannot be read.
    """
    if not run_root().is_dir():
        return frozenset()
    places = layout()
    known = state.read(places).gateway
    return _held(Keeper(places), Listen(**known) if known else None)


def check(
    places: Layout, keeper: Keeper, listen: Listen, name: str, *, may_hold_less: bool = False
) -> Listen:
    """Before anything is loaded for `name`: the ports must be ours or free, and what other names
    are reached by must stay as it is.

    Args:
        places: The run root.
        keeper: Its processes.
        listen: What the gateway is asked to be.
        name: The served name that asks.
        may_hold_less: Its run file says how long requests are held; else a shorter time alone is no
            reason to restart the gateway, which cuts long answers.

    Returns:
        `listen`, which holds requests at least as long as before while there are other names, and
        unless it may hold less.

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
            hint="use those; or another TUNESERVE_HOME; or "
            f"`tuneserve down --name {others[0]}` first",
        )
    check_port(listen, but=_held(keeper, former))
    if former and (others or not may_hold_less):
        return replace(listen, hold_seconds=max(listen.hold_seconds, former.hold_seconds))
    return listen


def ensure(places: Layout, keeper: Keeper, listen: Listen) -> None:
    """Start the gateway, or restart it when it should listen otherwise.

    Raises:
        PortTaken: Somebody else listens there.
        ServerError: It does not start; the former one, if there was one, runs again.
    """
    keeper.ensure_running()
    with _alone(places):
        _ensure(places, keeper, listen)


def mend(places: Layout, keeper: Keeper, *, passing: bool = False) -> None:
    """Start the gateway where something is served and it does not listen as the state says: a
    command was killed while it changed that, or the gateway was ended.

    Args:
        places: The run root.
        keeper: Its processes.
        passing: For a command that only looks: it leaves the gateway to who is at it, which may be
            ending everything.

    Raises:
        TuneserveError: See `ensure`.
    """
    wait_seconds = 0.0 if passing else float("inf")
    with contextlib.suppress(BlockingIOError), _alone(places, wait_seconds=wait_seconds):
        known = state.read(places)
        served = any(each.active and each.wanted == "up" for each in known.names.values())
        if not (served and known.gateway and keeper.running()):
            return
        listen = Listen(**known.gateway)
        check_seen(keeper)
        if not listens(keeper, listen):
            log.warning("the gateway does not listen at %s: starting it", listen.described)
            _ensure(places, keeper, listen.as_files_are())


def _ensure(places: Layout, keeper: Keeper, listen: Listen) -> None:
    check_seen(keeper)
    known = state.read(places).gateway
    former = Listen(**known) if known else None
    works = former is not None and _works(keeper, former)
    before, content = _written(places), gateway.caddy_config(places, listen)
    # Both are compared: a command may have been killed between writing one and the other.
    if works and former == listen and before == content:
        return
    check_port(listen, but=_held(keeper, former))
    try:
        _start(places, keeper, content)
        _wait(places, keeper, listen)
    except BaseException as error:
        if works and former is not None and before is not None:
            _put_back(places, keeper, before, former, wait=isinstance(error, Exception))
        else:
            keeper.remove(GATEWAY)
        raise
    with state.change(places) as changed:
        changed.gateway = listen.to_json()


@contextlib.contextmanager
def ending(places: Layout) -> Iterator[None]:
    """Nobody starts the gateway while everything ends. Who is at it already is waited for, but not
    without end."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(BlockingIOError):
            held.enter_context(_alone(places, wait_seconds=2 * _START_SECONDS))
        yield


@contextlib.contextmanager
def _alone(places: Layout, *, wait_seconds: float = float("inf")) -> Iterator[None]:
    """Two releases, of two names, must not restart it at once.

    Raises:
        BlockingIOError: Another command is at it for longer than that.
    """
    deadline = time.monotonic() + wait_seconds
    with (places.root / "locks" / "gateway.lock").open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        yield


def check_seen(keeper: Keeper) -> None:
    """Leave a gateway alone that works where we cannot see it, as one of another container.

    Raises:
        ServerError: It runs in other PID or network namespaces than this command.
    """
    if keeper.is_elsewhere():
        raise ServerError(
            "the gateway and the servers run in other PID or network namespaces: whether they "
            "listen cannot be seen from here",
            expected="the namespaces of the command that started them, such as `tuneserve keep`",
            hint="run this in the serving container's PID and network namespace",
        )


def listens(keeper: Keeper, listen: Listen) -> bool:
    """Whether it is our own gateway that has the ports."""
    return _held(keeper, listen).issuperset(listen.ports)


def _held(keeper: Keeper, listen: Listen | None) -> frozenset[int]:
    """The ports that our own gateway listens on now. Where that cannot be seen: those of `listen`
    when ours is up and a gateway answers there."""
    if (held := ports_of(keeper.members(GATEWAY))) is not None:
        return held
    info = keeper.info(GATEWAY)
    believed = listen is not None and info is not None and info.up and answers(listen)
    return frozenset(listen.ports) if listen and believed else frozenset()


def _works(keeper: Keeper, listen: Listen) -> bool:
    """Whether it is our own gateway that answers there."""
    return listens(keeper, listen) and answers(listen)


def _written(places: Layout) -> Any:
    """The configuration that the gateway was last started with; None: there is none."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((places.conf / "gateway.json").read_text("utf-8"))
    return None


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
        drain_seconds=gateway.GRACE_SECONDS + 5.0,
    )
    keeper.put(program)
    keeper.start(GATEWAY)


def _wait(places: Layout, keeper: Keeper, listen: Listen) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        info = keeper.info(GATEWAY)
        if info is None or info.state not in ("STARTING", "RUNNING"):
            break
        if _works(keeper, listen):
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
