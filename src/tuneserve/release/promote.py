"""Start, switch, drain and stop servers, so that the address never stops answering.

What requests reach is one symlink. `blue_green`: the candidate is proven beside the champion,
the symlink is renamed, the champion finishes its answers and ends. `hold`: the symlink points at
nothing for a while, so the gateway holds new requests; the champion finishes and ends, the
candidate starts. A crash between two steps leaves `promoting` in the state file: `mend` finishes or
undoes what was begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tuneserve.errors import InputError, ServerError, TuneserveError
from tuneserve.release import entrance, hold, state
from tuneserve.release.address import Listen
from tuneserve.release.layout import Layout, current_release, point
from tuneserve.release.ready import Child, check_chat, healthy, wait_until_up
from tuneserve.release.sessions import process_start
from tuneserve.release.supervisor import Keeper, Program, server_program
from tuneserve.release.unixhttp import listens, load_of
from tuneserve.release.vllm_command import ServerCommand
from tuneserve.release.work import work_of

log = logging.getLogger(__name__)

HOLD = "hold"  # the folder a name points to while its requests are held
_KEPT_RELEASES = 5
_SETTLE_SECONDS = 0.5
# For one short chat: of a server that just started, and of one that has served all the time.
_FIRST_CHAT_SECONDS, _NEXT_CHAT_SECONDS = 180.0, 60.0


@dataclass(frozen=True)
class Servers:
    """The servers of one run root."""

    places: Layout
    keeper: Keeper

    def boot(self, release: state.Release, command: ServerCommand, drain_seconds: float) -> Child:
        """Start a release's server; the child is returned at once, not yet ready."""
        folder = self.places.socket(release.id).parent
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "id").write_text(release.id, encoding="ascii")
        self.places.release_folder(release.id).mkdir(parents=True, exist_ok=True)
        log_file = self.places.server_log(release.id)
        if log_file.is_file():  # death reports must not quote an earlier start
            log_file.replace(log_file.with_suffix(".log.before"))
        prover = {
            "prover": [os.getpid(), process_start(os.getpid())],
            "state_file": str(self.places.state_file),
            "name": release.name,
            "release": release.id,
        }
        program = Program(
            server_program(release.id),
            command.arguments,
            command.environment,
            log_file,
            self.places.socket(release.id),
            drain_seconds,
            prover,
        )
        self.keeper.put(program)
        self.keeper.start(program.name)
        return Child(self.keeper, release.id)

    def switch(self, name: str, release: str) -> None:
        """From now on requests for `name` reach `release`: one rename."""
        point(self.places.name_link(name), f"../r/{release}")

    def hold(self, name: str) -> None:
        """From now on requests for `name` are held by the gateway."""
        folder = self.places.sockets / "r" / HOLD
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "id").write_text("none", encoding="ascii")
        self.switch(name, HOLD)

    def drain(self, release: str, limit_seconds: float) -> bool:
        """Wait until a server that gets no new requests has answered all it had; whether it has.

        Its own count of running requests decides, twice in a row: a request may be between the
        gateway and the server when the symlink is renamed. SIGTERM comes only afterwards,
        because a server that is shutting down refuses what it has not begun. One that loads, or
        has died, has nothing to answer and is not waited for.
        """
        socket_path = self.places.socket(release)
        deadline = time.monotonic() + limit_seconds
        said, quiet = time.monotonic(), 0
        time.sleep(_SETTLE_SECONDS)
        while quiet < 2 and time.monotonic() < deadline:
            answer = healthy(socket_path, release, timeout_seconds=min(5.0, limit_seconds))
            load = load_of(answer) if answer else None
            if answer is None and listens(socket_path):
                time.sleep(_SETTLE_SECONDS)  # alive but too busy to answer: not a sign of rest
                continue
            if load is None:
                return True
            quiet = quiet + 1 if load[0] == 0 else 0
            if load[0] and time.monotonic() - said > 5:
                said = time.monotonic()
                log.info("draining %s: %d answers still running", release, load[0])
            time.sleep(0.3)
        return quiet >= 2

    def stop(self, release: str) -> None:
        """End a release's server and everything it started."""
        program = server_program(release)
        if self.keeper.info(program):
            self.keeper.stop(program)

    def discard(self, release: str) -> None:
        """End a candidate and forget its process."""
        with contextlib.suppress(ServerError):
            self.keeper.remove(server_program(release))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.places.socket(release).parent)

    def ensure_gateway(self, listen: Listen) -> None:
        """See `entrance.ensure`."""
        entrance.ensure(self.places, self.keeper, listen)


@contextlib.contextmanager
def promoting(servers: Servers, release: state.Release) -> Iterator[None]:
    """Mark that a switch to `release` is under way; taken back when the body raises."""
    with state.change(servers.places) as changed:
        changed.names.setdefault(release.name, state.Name()).promoting = release.id
    try:
        yield
    except BaseException:
        with state.change(servers.places) as changed:
            changed.names[release.name].promoting = None
        raise


def make_current(
    servers: Servers, release: state.Release, *, drain_seconds: float, keep_warm: bool = False
) -> None:
    """Switch a name to a proven release, then let the former one finish and end it.

    Hold the name's lock. Requests are answered by exactly one of the two at every moment.
    """
    places = servers.places
    old = current_release(places, release.name)
    with state.change(places) as changed:
        changed.names.setdefault(release.name, state.Name()).promoting = release.id
    servers.switch(release.name, release.id)
    with state.change(places) as changed:
        set_active(changed, release.name, release.id, keep_warm=keep_warm)
    point_default(servers)
    log.info("%s: requests now reach %s", release.name, release.id)
    if old and old not in (release.id, HOLD) and not keep_warm:
        servers.drain(old, drain_seconds)
        servers.stop(old)
        log.info("%s has answered what it had and ended", old)
    _forget_old(servers, release.name)


def end_warm(servers: Servers, name: str, *, but: str | None = None) -> None:
    """End the release that is kept warm, unless it is `but`: before a third server of the name
    starts, so that there is never need for more memory than for two."""
    warm = state.read(servers.places).names.get(name, state.Name()).warm
    if warm is None or warm == but:
        return
    log.info("%s was kept warm; it ends before another one starts", warm)
    with state.change(servers.places) as changed:
        changed.names[name].warm = None
    servers.stop(warm)


def set_active(changed: state.State, name: str, release: str, *, keep_warm: bool = False) -> None:
    """Write down that a release is the one that requests of `name` reach."""
    entry = changed.names[name]
    entry.promoting = None
    entry.wanted = "up"
    if entry.active != release:
        if entry.active:
            entry.history.append(
                {"release": entry.active, "since": entry.since, "until": state.now()}
            )
        entry.warm = entry.active if keep_warm else None
        entry.active, entry.since = release, state.now()
    elif not keep_warm:
        entry.warm = None
    known = changed.names.get(changed.default or "")
    if known is None or known.wanted != "up":
        changed.default = name


def replace_while_held(
    servers: Servers,
    release: state.Release,
    start_and_prove: Callable[[], None],
    *,
    drain_seconds: float,
    restart_champion: Callable[[state.Release], None],
    end_refused: Callable[[str], None],
) -> None:
    """The `hold` way: stop the champion first, while the gateway holds new requests.

    When the candidate is refused, the champion is started again and gets the held requests.

    Args:
        servers: The servers.
        release: The candidate.
        start_and_prove: Brings it up; raises when it is refused.
        drain_seconds: How long the champion may finish its answers.
        restart_champion: Starts a release again.
        end_refused: Ends a refused candidate: `Servers.discard`, or `Servers.stop` for one that
            was proven before.
    """
    places = servers.places
    champion = state.read(places).names.get(release.name, state.Name()).active
    with promoting(servers, release), hold.watched(places, release):
        try:
            if champion:
                servers.hold(release.name)
                log.info("%s: new requests are held while %s finishes", release.name, champion)
                servers.drain(champion, drain_seconds)
                servers.stop(champion)
            start_and_prove()
        except BaseException:
            if champion:
                info = servers.keeper.info(server_program(champion))
                if info is not None and info.up:  # cancelled before it was stopped
                    servers.switch(release.name, champion)
            try:
                safely(lambda: end_refused(release.id), f"ending {release.id}")
            finally:  # whatever became of the candidate, somebody must take the held requests
                if champion:
                    log.warning("the candidate was refused: starting %s again", champion)
                    try:
                        restart_champion(state.read(places).release(champion))
                    finally:  # they are held until it listens
                        servers.switch(release.name, champion)
            raise
    make_current(servers, release, drain_seconds=drain_seconds)


def start_again(servers: Servers, release: state.Release, ready_seconds: float) -> None:
    """Start a release that was proven before, unless it runs; wait until it answers a chat.

    Raises:
        InputError: Its model folder is gone.
        ServerError: It does not come up, or does not answer; it is left running.
    """
    check_serves(servers, release, chat_seconds=bring_back(servers, release, ready_seconds))


def bring_back(servers: Servers, release: state.Release, ready_seconds: float) -> float:
    """Start a release that was proven before, unless it runs; wait until it is up.

    Returns:
        How long its first chat may take, in seconds.

    Raises:
        InputError: Its model folder is gone.
        ServerError: It does not come up.
    """
    if begin_again(servers, release):
        return _NEXT_CHAT_SECONDS
    child = Child(servers.keeper, release.id)
    socket_path = servers.places.socket(release.id)
    wait_until_up(child, socket_path, release.name, limit_seconds=ready_seconds)
    return _FIRST_CHAT_SECONDS


def begin_again(servers: Servers, release: state.Release) -> bool:
    """Start a release that was proven before, unless it runs, and return at once: whether it is
    well already.

    Raises:
        InputError: Its model folder is gone, or it was cleaned up.
        ServerError: supervisord refuses.
    """
    info = servers.keeper.info(server_program(release.id))
    if info and info.up and healthy(servers.places.socket(release.id), release.id):
        return True
    check_startable(servers, release)
    assert info is not None
    if not info.up:
        log.info("starting %s again", release.id)
        servers.keeper.start(info.name)
    return False


def check_startable(servers: Servers, release: state.Release) -> None:
    """Refuse what could not be started, before anything is stopped for it.

    Raises:
        InputError: Its model folder is gone, or it was cleaned up.
    """
    if not (Path(release.model) / "config.json").is_file():
        raise InputError(
            f"the model of {release.id} is gone: {release.model}",
            expected="the folder that was released",
            hint="make it again, or promote another release",
        )
    if servers.keeper.info(server_program(release.id)) is None:
        raise InputError(
            f"release {release.id} was cleaned up; {_KEPT_RELEASES} are kept for each name",
            expected="a release that is kept",
            hint=f"release it again: tuneserve release {release.model}",
        )


def check_serves(servers: Servers, release: state.Release, *, chat_seconds: float) -> None:
    """Ask a server that is up for one short chat. One that has so much to do that this does not
    come in time serves as well: what counts is whether it goes on answering.

    Raises:
        ServerError: It refuses the chat, or answers nothing at all although /health is well.
    """
    socket_path = servers.places.socket(release.id)
    before = work_of(socket_path)
    try:
        check_chat(
            Child(servers.keeper, release.id),
            socket_path,
            release.name,
            timeout_seconds=chat_seconds,
        )
    except ServerError as error:
        if isinstance(error.__cause__, TimeoutError) and before.goes_on_in(work_of(socket_path)):
            log.warning(
                "%s is busy: a short chat took more than %.0f s, while it answered others",
                release.id,
                chat_seconds,
            )
            return
        if chat_seconds == _NEXT_CHAT_SECONDS:
            error.hint = (
                f"`tuneserve down --name {release.name}`, then `tuneserve up`, starts it anew"
            )
        raise


def _forget_old(servers: Servers, name: str) -> None:
    """Forget processes of releases that are far back in the history; their reports stay."""
    known = state.read(servers.places)
    entry = known.names[name]
    recent = [item["release"] for item in entry.history[-_KEPT_RELEASES:]]
    keep = {entry.active, entry.warm, entry.promoting, *recent}
    for release in known.releases.values():
        if release.name == name and release.id not in keep:
            if servers.keeper.info(server_program(release.id)):
                servers.discard(release.id)


def point_default(servers: Servers) -> None:
    """Let /v1 reach the default name."""
    if default := state.read(servers.places).default:
        point(servers.places.default_link, f"n/{default}")


def end_all(servers: Servers) -> None:
    """End every server, the gateway and supervisord."""
    with entrance.ending(servers.places):
        servers.keeper.shutdown()
    for link in (servers.places.default_link, *(servers.places.sockets / "n").iterdir()):
        link.unlink(missing_ok=True)


def safely(action: Callable[[], None], what: str) -> None:
    """Do something while another error is on its way, without hiding that error."""
    try:
        action()
    except TuneserveError as error:
        log.error("%s failed as well: %s", what, error)
