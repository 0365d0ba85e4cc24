"""A Prefect server for one run, where none is configured.

Without PREFECT_API_URL Prefect starts a server for the run and ends it at exit, but not when the
run is killed (SIGKILL, out of memory): the server would stay for ever. And it starts it late, after
importing the whole server into the run's own process: `own_server` starts the same one first and
lets it come up while the run imports what it needs (11 s instead of 17 s on two cores).

Nothing here imports Prefect.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tuneserve.errors import ServiceError

_READY_SECONDS = 180.0  # making the database for the first time takes long on a busy machine

# It ends when our end of its standard input closes; the start time tells a recycled pid apart.
_WATCH = """
read line
[ "$(cut -d' ' -f22 /proc/$1/stat 2>/dev/null)" = "$2" ] && kill -TERM "$1"
"""


def own_server() -> Callable[[], None]:
    """Start a Prefect server that ends with this process, unless one is configured.

    Call it before Prefect is imported, which then reads the address; import, and call what is
    returned before the first run: it waits until the server answers.

    Raises:
        ServiceError: While waiting: the server ended, or did not answer in time.
    """
    if _configured():
        return lambda: None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = _start(port)
    # What is registered first is called last: Prefect sends its last logs and states at exit.
    atexit.register(_end, server, watch(server.pid))
    address = f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_API_URL"] = address
    os.environ["PREFECT_UI_URL"] = ""  # it has no pages, and is gone with the run
    return lambda: _wait(server, address)


def _configured() -> bool:
    """Whether the environment or the active profile names a server."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    path = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect") / "profiles.toml"
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Prefect itself says what is wrong with it
        return False
    active = os.environ.get("PREFECT_PROFILE") or known.get("active")
    return bool(known.get("profiles", {}).get(active, {}).get("PREFECT_API_URL"))


def _start(port: int) -> subprocess.Popen[bytes]:
    """The server as Prefect itself starts it for a run (prefect.server.api.server)."""
    found = find_spec("prefect")
    assert found is not None and found.origin is not None
    command = [
        *(sys.executable, "-m", "uvicorn", "--app-dir", str(Path(found.origin).parents[1])),
        *("--factory", "prefect.server.api.server:create_app"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"),
    ]
    own = {
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
    }
    return subprocess.Popen(command, env={**os.environ, **own}, stdin=subprocess.DEVNULL)


def _end(server: subprocess.Popen[bytes], watcher: subprocess.Popen[bytes]) -> None:
    watcher.terminate()
    watcher.wait()
    server.terminate()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with contextlib.suppress(OSError), direct.open(f"{address}/health", timeout=5):
            return
        if server.poll() is not None:
            raise ServiceError(
                f"Prefect's server ended with status {server.returncode} before it answered",
                hint="read the lines above, and run it again",
            )
        if time.monotonic() > deadline:
            raise ServiceError(
                f"Prefect's server did not answer at {address} within {_READY_SECONDS:.0f} s",
                hint="run it again when the machine is less busy",
            )
        time.sleep(0.05)


@contextlib.contextmanager
def server_ends_with_us() -> Iterator[None]:
    """Watch the embedded server while the body runs; nothing where there is none."""
    # Prefect imports its server only where it starts one; importing it takes seconds.
    module = sys.modules.get("prefect.server.api.server")
    servers = module.SubprocessASGIServer._instances.values() if module else ()
    pids = {server.server_process.pid for server in servers if server.server_process is not None}
    watchers = [watch(pid) for pid in pids]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.terminate()
            watcher.wait()


def watch(pid: int) -> subprocess.Popen[bytes]:
    """A process of a few kilobytes that ends `pid` when we are gone."""
    started = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "watch", str(pid), started],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
