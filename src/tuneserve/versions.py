"""Which versions of which packages an interpreter has."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys

from tuneserve.errors import InputError


@functools.lru_cache(maxsize=32)
def _versions_elsewhere(
    interpreter: str, packages: tuple[str, ...]
) -> tuple[tuple[str, str | None], ...]:
    code = (
        "import json,sys,importlib.metadata as m\n"
        "def v(p):\n try: return m.version(p)\n except m.PackageNotFoundError: return None\n"
        "print(json.dumps([[p, v(p)] for p in sys.argv[1:]]))"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", code, *packages],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"{interpreter} cannot be asked for its packages ({error})",
            expected="a Python interpreter",
            hint="check engines.*.python in the run file",
        ) from error
    return tuple((name, version) for name, version in json.loads(done.stdout))


def package_versions(interpreter: str, packages: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions in an interpreter's environment; None where a package is absent."""
    if interpreter != sys.executable:
        return dict(_versions_elsewhere(interpreter, packages))
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
