"""End Prefect's embedded server when the run that started it is killed.

Without PREFECT_API_URL Prefect starts a server for the run and ends it at exit, but not when the
run is killed (SIGKILL, out of memory): the server would stay for ever.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# It ends when our end of its standard input closes; the start time tells a recycled pid apart.
_WATCH = """
read line
[ "$(cut -d' ' -f22 /proc/$1/stat 2>/dev/null)" = "$2" ] && kill -TERM "$1"
"""


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
