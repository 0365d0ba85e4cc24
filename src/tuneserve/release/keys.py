"""API keys: random, named, several, revocable, in one file that only its owner can read.

Each key is a line ``Bearer KEY`` below a comment line with its name: the gateway compares the whole
Authorization header with the lines, and reads the file anew for every request. So a key works at
once and stops working at once, without a restart, and no configuration holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from tuneserve.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# What a header can carry without quoting, and long enough not to be guessed.
KEY_PATTERN = r"[!-~]{16,256}"
_NAMED, _KEY = "# ", "Bearer "  # what the lines begin with


def read_keys(path: Path) -> dict[str, str]:
    """Keys by name.

    Raises:
        InputError: Others than the owner can read the file, or a line has not its pair.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return {}
    if mode & 0o077:
        raise InputError(
            f"{path}: mode {mode & 0o777:o}",
            expected="mode 600, because it holds API keys",
            hint=f"chmod 600 {path}, and replace the keys: others could read them",
        )
    return _read(path)


def without_keys(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that hold a key of the file, or are called like one.

    `serve.api_key_env` may name any variable, and a key is called after the one that it came from.
    """
    # A slip of the hand in that file keeps no server down: every line counts by itself here.
    lines = _lines(path)
    names = {line.removeprefix(_NAMED).split(" ")[0] for line in lines if line.startswith(_NAMED)}
    said = [line.removeprefix(_KEY) for line in lines if line.startswith(_KEY)]
    known = [key for key in said if re.fullmatch(KEY_PATTERN, key)]
    return {
        name: value
        for name, value in environment.items()
        if name not in names and not any(key in value for key in known)
    }


def _read(path: Path) -> dict[str, str]:
    keys: dict[str, str] = {}
    named: tuple[int, str] | None = None  # the name that waits for its key, and its line
    for number, line in enumerate(_lines(path), 1):
        if not line.isascii():
            raise _unpaired(path, number, "characters beyond ASCII")
        if line.startswith(_NAMED):
            if named:
                raise _unpaired(path, named[0], "a name without a key below")
            named = number, line.removeprefix(_NAMED).split(" ")[0]
        elif line.startswith(_KEY):
            if not named:
                raise _unpaired(path, number, "a key without a name above")
            keys[named[1]] = line.removeprefix(_KEY)
            named = None
    if named:
        raise _unpaired(path, named[0], "a name without a key below")
    return keys


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except FileNotFoundError:
        return []


def _unpaired(path: Path, line: int, found: str) -> InputError:
    return InputError(
        f"{path}:{line}: {found}",
        expected=f"pairs of lines: '{_NAMED}NAME', then '{_KEY}KEY'",
        hint="mend that line; the gateway takes every key of the file meanwhile",
    )


def add_key(path: Path, name: str, key: str | None = None) -> str:
    """Add the key called `name`, or replace it by the one given; without, a random one is made.
    Returns the key.

    Raises:
        InputError: The name or the key cannot be used, or a random one would replace another.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"key name {name!r}", expected="letters, digits, dots and dashes", hint="rename it"
        )
    given, key = key, key or f"tsk-{secrets.token_urlsafe(32)}"
    if not re.fullmatch(KEY_PATTERN, key):
        raise InputError(
            f"the key {name!r} has {len(key)} characters, or some that a header cannot carry",
            expected="16 to 256 printable ASCII characters without spaces",
            hint='make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"',
        )
    with _alone(path):
        known = read_keys(path)
        if given is None and name in known:  # applications use it
            raise InputError(
                f"there is a key named {name!r} already",
                expected="a new name",
                hint=f"to replace it, `tuneserve keys revoke {name}` first",
            )
        _write(path, {**known, name: key})
    return key


def revoke_key(path: Path, name: str) -> None:
    """Remove a key; requests with it are refused from now on.

    Raises:
        InputError: There is no such key.
    """
    with _alone(path):
        keys = read_keys(path)
        if name not in keys:
            raise InputError(
                f"there is no key named {name!r}",
                expected=f"one of: {', '.join(sorted(keys))}"
                if keys
                else "a key; none was made yet",
                hint="`tuneserve keys list` names them",
            )
        del keys[name]
        _write(path, keys)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else changes the file between our reading and writing it."""
    with path.with_name(f".{path.name}.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _write(path: Path, keys: dict[str, str]) -> None:
    provisional = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(provisional, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.writelines(f"# {name}\nBearer {key}\n" for name, key in keys.items())
        stream.flush()
        os.fsync(stream.fileno())
    provisional.replace(path)
