"""One run per served name and per GPU at a time.

The locks are flock(2) locks: they end with their holder, however it ends, and a lock file that lies
around means nothing. The holder's stages inherit them, so that a lock is held until the last
process that could still use the card is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tuneserve.config import RunFile
from tuneserve.devices import card_ids, visible_gpus
from tuneserve.errors import DeviceBusy, InputError
from tuneserve.places import home

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_SHARED = "tuneserve-gpus"
_held: set[int] = set()


def held_descriptors() -> tuple[int, ...]:
    """The lock files this process holds, for its children to inherit."""
    return tuple(sorted(_held))


@contextlib.contextmanager
def hold(run: RunFile, run_id: str, since: str) -> Iterator[None]:
    """Hold the served name and every visible GPU while the body runs.

    Args:
        run: Its `serve.name` is locked, its `overlap` says whether to wait.
        run_id: What others are told who holds them.
        since: Since when, ISO 8601.

    Raises:
        DeviceBusy: Another run holds one of them; the message says which, and since when.
    """
    holder = json.dumps({"run": run_id, "name": run.name, "since": since, "pid": os.getpid()})
    limit = run.overlap.max_wait_seconds if run.overlap.when_busy == "wait" else 0.0
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack:
        for what, path in _wanted(run):
            stack.enter_context(_locked(what, path, holder, deadline))
        yield


def _wanted(run: RunFile) -> list[tuple[str, Path]]:
    """What a run needs for itself, always in the same order, so that two never wait for each
    other.
    """
    wanted = [(f"the served name {run.serve.name!r}", home() / "locks" / f"{run.serve.name}.lock")]
    # A card belongs to the machine, not to one TUNESERVE_HOME.
    cards = Path(tempfile.gettempdir()) / _SHARED
    for id, gpu in sorted(zip(card_ids(), visible_gpus(), strict=True)):
        path = cards / f"{re.sub(r'[^A-Za-z0-9-]', '_', id)}.lock"
        if path not in [other for _, other in wanted]:  # a card named twice is still one
            wanted.append((f"GPU {gpu}", path))
    return wanted


@contextlib.contextmanager
def _locked(what: str, path: Path, holder: str, deadline: float) -> Iterator[None]:
    with _open(path) as stream:
        told = ""
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                other = _describe(stream)
                if time.monotonic() >= deadline:
                    raise DeviceBusy(
                        f"{what} is held by {other}",
                        expected="one run at a time",
                        hint="wait until that run has ended, cancel it, or set overlap.when_busy: "
                        "wait",
                    ) from error
                if other != told:
                    log.info("waiting: %s is held by %s", what, other)
                    told = other
                time.sleep(_POLL_SECONDS)
        stream.seek(0)
        stream.truncate()
        stream.write(holder)
        stream.flush()
        _held.add(stream.fileno())
        try:
            yield
        finally:
            _held.discard(stream.fileno())
            fcntl.flock(stream, fcntl.LOCK_UN)  # also for a child that still has the file open


def _open(path: Path) -> IO[str]:
    shared = path.parent.name == _SHARED
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            if shared:
                path.parent.chmod(0o1777)  # the cards belong to all users of the machine
        if path.parent.is_symlink() and shared:
            raise OSError(errno.ELOOP, "it lies behind a symbolic link")
        # A link planted in a shared folder must not lead us to a file of ours.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        except PermissionError:  # another user made it: sticky folders refuse O_CREAT on those
            descriptor = os.open(path, flags)
        if shared:
            with contextlib.suppress(PermissionError):
                os.fchmod(descriptor, 0o666)
    except OSError as error:
        raise InputError(
            f"{path} cannot be opened ({error.strerror})",
            expected="a file that this user may write",
            hint="remove that file, or ask its owner to",
        ) from error
    return os.fdopen(descriptor, "r+", encoding="utf-8")


def _describe(stream: IO[str]) -> str:
    stream.seek(0)
    try:
        found = json.loads(stream.read())
        return (
            f"run {found['run']} ({found['name']}, process {found['pid']}) since {found['since']}"
        )
    except (ValueError, KeyError, TypeError):
        return "a run that is just starting"
