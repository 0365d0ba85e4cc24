"""`releases.json`: which release is current under each served name, and which were before.

Every change is one atomic write, made under a lock. What requests reach is decided by a symlink,
not by this file; `promote.reconcile` brings the two together after a crash between them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import DeviceBusy, InputError
from tuneserve.release.address import Listen
from tuneserve.release.layout import Layout

log = logging.getLogger(__name__)

FORMAT = 1
AT_REST = "serving stopped while a run trains"
"""What a run that stops what is served says it does when it holds a name's lock."""


def now() -> str:
    """The time as the state file keeps it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Release:
    """One model with one serving configuration.

    Attributes:
        id: ``r`` and a number, then the beginning of the serving key.
        name: The served name it was made for.
        key: SHA-256 of everything that decides its answers; the same key is the same release.
        model: Folder of the model.
        artifact: Artifact id of the model; empty for a folder from elsewhere.
        proven: Whether parity and gates were passed once.
        memory_bytes: Resident memory of its processes when it became ready.
        seconds_to_ready: From start to ready.
        created: When it was made.
        rollout: `serve.rollout` of the last release that asked for it; a rollback goes the same
            way.
        report: What the checks and gates measured.
        seconds_held: How long requests waited at the last switch to it by `hold`; 0: never so.
    """

    id: str
    name: str
    key: str
    model: str
    artifact: str = ""
    proven: bool = False
    memory_bytes: int = 0
    seconds_to_ready: float = 0.0
    created: str = field(default_factory=now)
    rollout: str = "blue_green"
    report: dict[str, Any] = field(default_factory=dict)
    seconds_held: float = 0.0


@dataclass
class Name:
    """What serves under one name.

    Attributes:
        active: The release that should answer; None before the first promotion.
        since: When it became active.
        wanted: ``up`` or ``down``: whether `up` starts it.
        history: Earlier active releases, latest last: ``{"release", "since", "until"}``.
        promoting: The release a promotion under way leads to, None at rest. Found by a command
            that holds the lock, it means that a promotion was killed.
        warm: A former release that is kept running for an instant rollback.
    """

    active: str | None = None
    since: str | None = None
    wanted: str = "up"
    history: list[dict[str, Any]] = field(default_factory=list)
    promoting: str | None = None
    warm: str | None = None


@dataclass
class State:
    """The whole file."""

    counter: int = 0
    default: str | None = None
    gateway: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Name] = field(default_factory=dict)
    releases: dict[str, Release] = field(default_factory=dict)

    def name(self, name: str) -> Name:
        """The entry of a served name.

        Raises:
            InputError: Nothing was ever released under it.
        """
        if name not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            raise InputError(
                f"nothing was released under the name {name!r}",
                expected=f"one of the served names: {known}",
                hint="`tuneserve status` lists them",
            )
        return self.names[name]

    def release(self, id: str) -> Release:
        """A release by its id or a unique beginning of it.

        Raises:
            InputError: There is none, or several begin so.
        """
        matches = [id] if id in self.releases else [r for r in self.releases if r.startswith(id)]
        if len(matches) != 1:
            found = f"{len(matches)} begin so" if matches else "there is none"
            known = ", ".join(sorted(self.releases))
            raise InputError(
                f"release {id!r}: {found}",
                expected=f"one of: {known}" if known else "a release; none was made yet",
                hint="`tuneserve status` shows the history of each name"
                if known
                else "`tuneserve run RUN.yaml` makes one",
            )
        return self.releases[matches[0]]

    def find(self, name: str, key: str) -> Release | None:
        """The release of `name` with this key."""
        return next((r for r in self.releases.values() if r.name == name and r.key == key), None)

    def add(self, name: str, key: str, model: str, artifact: str) -> Release:
        """A new release with the next number."""
        self.counter += 1
        release = Release(f"r{self.counter:04d}-{key[:8]}", name, key, model, artifact)
        self.releases[release.id] = release
        return release


def read(places: Layout) -> State:
    """The state as it is; empty when nothing was released yet. Fields that a later version added
    are left out: the format changes only when the others mean something else.

    Raises:
        InputError: The file cannot be read as what this version writes.
    """
    try:
        data = json.loads(places.state_file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        return State(
            counter=data["counter"],
            default=data["default"],
            gateway=_known(Listen, data["gateway"]),
            names={name: Name(**_known(Name, each)) for name, each in data["names"].items()},
            releases={id: Release(**_known(Release, r)) for id, r in data["releases"].items()},
        )
    except FileNotFoundError:
        return State()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{places.state_file}: cannot be read ({type(error).__name__}: {error})",
            expected=f"the release state, format {FORMAT}",
            hint="`tuneserve down`, then move the file away; the models themselves are not in it",
        ) from error


def _known(kind: type[Listen | Name | Release], value: dict[str, Any]) -> dict[str, Any]:
    ours = {each.name for each in fields(kind)}
    return {name: each for name, each in value.items() if name in ours}


@contextlib.contextmanager
def change(places: Layout) -> Iterator[State]:
    """Read, let the body change, write atomically; an exception in the body changes nothing."""
    with (places.root / "locks" / "state.lock").open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        state = read(places)
        yield state
        write_json_atomic(places.state_file, {"format": FORMAT, **asdict(state)})


@contextlib.contextmanager
def lock_name(places: Layout, name: str, doing: str) -> Iterator[None]:
    """Hold the right to switch `name`; it ends with its holder, however that ends.

    Raises:
        DeviceBusy: Another process holds it; the message says which and what it does.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", name):
        raise InputError(
            f"served name {name!r}",
            expected="lower-case letters, digits and dashes, at most 32",
            hint="choose another name",
        )
    with (places.root / "locks" / f"name-{name}.lock").open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise DeviceBusy(
                f"the served name {name!r} is held by {stream.read().strip() or 'another process'}",
                expected="one change of a name at a time",
                hint="wait until it has ended, or end it, then try again",
            ) from error
        stream.seek(0)
        stream.truncate()
        stream.write(f"process {os.getpid()} ({doing}, since {now()})")
        stream.flush()
        yield
