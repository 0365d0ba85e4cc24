"""The environment variables that a run file names, checked before anything is made."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tuneserve.config import RunFile
from tuneserve.errors import RunFileError

# What urllib sends: an address without white space, such as a line's end that a file left there.
_ADDRESS = r"https?://[!-~]+"


def check_variables(run: RunFile, environment: Mapping[str, str]) -> None:
    """Refuse a run whose secrets are not there: it would train for hours and then fail, or tell
    nobody how it ended.

    Args:
        run: Its `serve.api_key_env` and `notify.url_env` name variables.
        environment: The variables of the process that runs it.

    Raises:
        RunFileError: Some are not set, or hold what cannot be used; names all of them, and shows
            no value.
    """
    from tuneserve.release.keys import KEY_PATTERN

    key, address = run.serve.api_key_env, run.notify.url_env
    wanted = [
        ("serve.api_key_env", key, KEY_PATTERN, "16 to 256 printable characters without spaces"),
        ("notify.url_env", address if run.notify.events else None, _ADDRESS, "an http(s) address"),
    ]
    problems, expected = [], []
    for field, name, pattern, words in wanted:
        value = environment.get(name, "") if name else ""
        if name and not re.fullmatch(pattern, value):
            what = f"holds {len(value)} characters that cannot be used" if value else "is not set"
            problems.append(f"{field} names {name}, which {what}")
            expected.append(f"{name}: {words}")
    if problems:
        raise RunFileError(
            "\n  ".join(problems),
            expected="; ".join(expected),
            hint="set it where the run starts (the worker's environment, a file of /run/secrets, "
            "the Secret `tuneserve`), or take the field out of the run file",
        )
