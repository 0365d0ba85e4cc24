"""Keeps a server process and everything it starts together.

Run as `python -m tuneserve.release.wrapper LAUNCH.json`: supervisord starts this wrapper, the
wrapper starts the server as a session of its own. Four rules:

- SIGTERM goes to the server alone, so that it can finish its answers; then its whole session is
  killed.
- When the server dies, the rest of its session, and what it started in sessions of their own, is
  killed before the wrapper ends: a restart finds free memory.
- When supervisord dies, the kernel kills the wrapper (PR_SET_PDEATHSIG, prctl(2)).
- When the wrapper dies, however it went, a guard process sees their pipe close and kills the
  session.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tuneserve.release.sessions import (
    end_children,
    end_session,
    process_start,
    record_session,
    session_members,
)
from tuneserve.release.unixhttp import ask

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.1
_HEALTH_EVERY_SECONDS = 5.0
_HEALTH_TIMEOUT_SECONDS = 20.0
# A busy event loop may be late; an engine that says it is dead (503) is believed at the second
# time.
_SILENT_LIMIT, _DEAD_LIMIT = 4, 2


def main(arguments: list[str]) -> int:
    """Run the server of a launch file until it ends or we are told to stop."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        return 1  # supervisord went before the kernel knew our wish
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server become ours, so none can hide
    launch: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if launch.get("prover") and _forsaken(launch):
        return 0  # started again by supervisord, and still nobody's
    socket_path = Path(launch["socket"]) if launch.get("socket") else None
    if socket_path:
        socket_path.unlink(missing_ok=True)  # left by a server that was killed; vLLM would not bind
    server = subprocess.Popen(
        launch["command"],
        env={**os.environ, **launch["environment"]},
        cwd=launch["cwd"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    guard, pipe = _start_guard(server.pid)
    record = Path(launch["group_file"])
    record_session(record, server.pid)
    stopping = threading.Event()

    def stop(signum: int = 0, frame: FrameType | None = None) -> None:
        if not stopping.is_set():
            stopping.set()
            server.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    healthy, broken = threading.Event(), threading.Event()
    if socket_path:
        watch = threading.Thread(target=_watch, args=(socket_path, healthy, broken), daemon=True)
        watch.start()
    if launch.get("prover"):
        threading.Thread(target=_watch_prover, args=(launch, stop), daemon=True).start()
    if socket_path is None:  # nobody asks the gateway how it is; it too has answers to finish
        healthy.set()
    drain_seconds = float(launch["drain_seconds"])
    status = _wait(server, stopping, broken, lambda: drain_seconds if healthy.is_set() else 5.0)
    end_session(server.pid)
    end_children(but=guard)
    if not session_members(server.pid):  # its number may be anybody's from now on
        record.unlink(missing_ok=True)
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            os.write(pipe, b"0")
    os.close(pipe)
    return 0 if stopping.is_set() else status or 1


def _wait(
    server: subprocess.Popen[bytes],
    stopping: threading.Event,
    broken: threading.Event,
    drain_seconds: Callable[[], float],
) -> int:
    """Wait for the server's end; kill it when it drains too long or has stopped working."""
    deadline = float("inf")
    while (status := server.poll()) is None:
        if stopping.is_set() and deadline == float("inf"):
            deadline = time.monotonic() + drain_seconds()
        if time.monotonic() > deadline or (broken.is_set() and not stopping.is_set()):
            server.kill()
        time.sleep(_POLL_SECONDS)
    return status


def _watch(socket_path: Path, healthy: threading.Event, broken: threading.Event) -> None:
    """Set `broken` when a server that once was healthy is so no longer."""
    silent, dead = 0, 0
    while not broken.is_set():
        time.sleep(_HEALTH_EVERY_SECONDS if healthy.is_set() and not dead else 0.5)
        try:
            status = ask(
                socket_path, "GET", "/health", timeout_seconds=_HEALTH_TIMEOUT_SECONDS
            ).status
        except (OSError, http.client.HTTPException):
            status = 0
        if status == 200:
            healthy.set()
            silent, dead = 0, 0
        else:  # while it loads, nobody listens: a 503 is never a part of starting
            silent, dead = silent + healthy.is_set(), dead + (status == 503)
            if silent >= _SILENT_LIMIT or dead >= _DEAD_LIMIT:
                sys.stderr.write(f"tuneserve: the server stopped working (/health: {status})\n")
                broken.set()


def _watch_prover(launch: dict[str, Any], stop: Callable[[], None]) -> None:
    """End a candidate whose prover died before it was promoted: nobody else would."""
    pid, started = launch["prover"]
    while process_start(pid) == started or _referred(launch, "promoting"):
        time.sleep(1.0)
    if _forsaken(launch):
        stop()


def _referred(launch: dict[str, Any], *fields: str) -> bool:
    """Whether one of these fields of the name's state is this release."""
    try:
        state = json.loads(Path(launch["state_file"]).read_text(encoding="utf-8"))
        entry = state["names"][launch["name"]]
        return launch["release"] in [entry[field] for field in fields]
    except (OSError, ValueError, KeyError):
        return False


def _forsaken(launch: dict[str, Any]) -> bool:
    """Whether a candidate's prover is gone and nothing in the state refers to the candidate."""
    pid, started = launch["prover"]
    if process_start(pid) == started or _referred(launch, "active", "warm", "promoting"):
        return False
    sys.stderr.write(f"tuneserve: process {pid}, which was proving this server, is gone\n")
    return True


def _start_guard(session: int) -> tuple[int, int]:
    """Fork a process that kills `session` when our end of the pipe closes and nothing was written
    to it; returns the process and our end."""
    reading, writing = os.pipe()
    if guard := os.fork():
        os.close(reading)
        return guard, writing
    try:
        os.setsid()
        os.close(writing)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if not os.read(reading, 1):
            end_session(session)
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
