"""supervisord as the keeper of the servers: its configuration, its start, and control by XML-RPC.

The XML-RPC methods are those of supervisor's API documentation; the transport over a unix socket is
supervisor's own (`supervisor.xmlrpc.SupervisorTransport`).
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import ServerError
from tuneserve.release.keys import without_keys
from tuneserve.release.layout import Layout
from tuneserve.release.sessions import (
    end_session,
    namespaces,
    process_start,
    pss_bytes,
    recorded_session,
    runs_with,
    session_members,
)

log = logging.getLogger(__name__)

_START_SECONDS = 20.0
_KILL_SECONDS = 10.0
LOG_ROTATE_BYTES = 10 * 2**20
START_TRIES = 20
RUN_VARIABLE = "TUNESERVE_RUN_ROOT"
GATEWAY = "gateway"
# What a model server has no use for and what must not show in any process's environment.
_SECRET = re.compile(r"(API_?KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)", re.IGNORECASE)
_UP_STATES = ("STARTING", "RUNNING", "BACKOFF")


@dataclass(frozen=True)
class Program:
    """One process to keep.

    Attributes:
        name: supervisord's name of it.
        command: Argument list of the server itself; the wrapper is put around it.
        environment: Variables beside those of supervisord.
        socket: Unix socket whose /health is watched; None watches the process alone.
        log: Where its output goes.
        drain_seconds: How long it may take to end after SIGTERM.
        prover: For a candidate: who proves it, and where it is written when it is promoted.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    socket: Path | None = None
    drain_seconds: float = 10.0
    prover: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessInfo:
    """What supervisord knows: `state` is its word (RUNNING, STOPPED, BACKOFF, ...), `pid` the
    wrapper's."""

    name: str
    state: str
    pid: int
    start: int
    exit_status: int

    @property
    def up(self) -> bool:
        """Whether it runs or is being started again."""
        return self.state in _UP_STATES


def server_program(release: str) -> str:
    """supervisord's name for the server of a release."""
    return f"server-{release}"


class Keeper:
    """The supervisord of one run root."""

    def __init__(self, places: Layout) -> None:
        self.places = places

    def running(self) -> bool:
        """Whether supervisord answers."""
        try:
            return bool(self._rpc().supervisor.getState())
        except (OSError, http.client.HTTPException, xmlrpc.client.Error):
            return False

    def ensure_running(self) -> bool:
        """Start supervisord unless it runs; True when it was started now.

        Raises:
            ServerError: It does not come up.
        """
        if self.running():
            return False
        self.end_leftovers()  # of a supervisord that was killed: nobody may hold memory or the port
        config = self.places.conf / "supervisord.conf"
        config.write_text(_daemon_config(self.places), encoding="utf-8")
        self._namespaces_file().write_text(namespaces(), encoding="ascii")
        started = subprocess.run(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=clean_environment(os.environ, self.places),
            cwd=self.places.root,
            start_new_session=True,
            text=True,
            check=False,
        )
        deadline = time.monotonic() + _START_SECONDS
        while started.returncode == 0 and time.monotonic() < deadline:
            if self.running():
                return True
            time.sleep(0.05)
        log_file = self.places.logs / "supervisord.log"
        raise ServerError(
            f"supervisord does not start: {started.stdout.strip() or tail(log_file, 3)}",
            hint=f"read {log_file}",
        )

    def put(self, program: Program) -> None:
        """Make a program known, or replace it; it is not running afterwards.

        Raises:
            ServerError: supervisord refused.
        """
        folder = self.places.conf / "programs"
        launch = folder / f"{program.name}.json"
        write_json_atomic(
            launch,
            {
                "command": program.command,
                "environment": dict(program.environment),
                "cwd": str(self.places.root),
                "socket": str(program.socket) if program.socket else None,
                "group_file": str(self._group_file(program.name)),
                "drain_seconds": program.drain_seconds,
                **program.prover,
            },
        )
        (folder / f"{program.name}.ini").write_text(_program_config(program, launch), "utf-8")
        if self.info(program.name):
            self.stop(program.name)
            self._call("removeProcessGroup", program.name)
        self._call("reloadConfig")
        self._call("addProcessGroup", program.name)

    def start(self, name: str) -> None:
        """Start a known program; returns at once."""
        with contextlib.suppress(_AlreadyStarted):
            self._call("startProcess", name, False)

    def stop(self, name: str, *, at_once: bool = False) -> None:
        """Stop a program (SIGTERM, then what the wrapper does) and wait until nothing of it is
        left.

        Args:
            name: The program.
            at_once: Do not wait for answers under way.

        Raises:
            ServerError: Some of its processes cannot be ended.
        """
        session = self._stop(name, at_once)
        while (info := self.info(name)) and (info.up or info.state == "STOPPING"):
            if info.up:  # somebody started it again meanwhile
                session = self._stop(name, at_once) or session
            time.sleep(0.1)
        if session:
            end_session(session, patience_seconds=_KILL_SECONDS)
            if left := session_members(session):
                raise ServerError(
                    f"processes {left} of {name} cannot be ended",
                    hint="they hang in the kernel: look at the driver, or restart the machine",
                )

    def _stop(self, name: str, at_once: bool) -> int | None:
        """Ask for a program's end; returns its session."""
        session = self._session(name)
        with contextlib.suppress(_NotRunning):
            self._call("stopProcess", name, False)
        if session and at_once:
            end_session(session, patience_seconds=_KILL_SECONDS)
        return session

    def remove(self, name: str) -> None:
        """End a program at once and forget it."""
        if self.info(name):
            self.stop(name, at_once=True)
            self._call("removeProcessGroup", name)
        for suffix in ("ini", "json", "group"):
            (self.places.conf / "programs" / f"{name}.{suffix}").unlink(missing_ok=True)
        self._call("reloadConfig")

    def info(self, name: str) -> ProcessInfo | None:
        """What is known of a program; None when it is not known."""
        return self.all().get(name)

    def all(self) -> dict[str, ProcessInfo]:
        """Every known program by name; none when supervisord does not run."""
        if not self.places.keeper_socket.exists():
            return {}
        try:
            rows = self._rpc().supervisor.getAllProcessInfo()
        except (ConnectionError, FileNotFoundError, http.client.HTTPException):
            return {}
        except xmlrpc.client.Fault as error:  # it is just ending
            raise ServerError(f"supervisord does not answer: {error.faultString}") from error
        assert isinstance(rows, list)
        return {
            row["name"]: ProcessInfo(
                row["name"], row["statename"], row["pid"], row["start"], row["exitstatus"]
            )
            for row in rows
        }

    def members(self, name: str) -> list[int]:
        """Processes of a program's server."""
        session = self._session(name)
        return session_members(session) if session else []

    def memory_bytes(self, name: str) -> int:
        """Proportional resident memory of a program's server: shared pages are counted once."""
        return sum(pss_bytes(pid) for pid in self.members(name))

    def shutdown(self) -> None:
        """End supervisord and everything it keeps, and whatever it left behind."""
        if self.running():
            programs = sorted(self.all(), key=lambda name: name == GATEWAY)  # the gateway last
            for name in programs:
                if name != GATEWAY:  # they finish their answers side by side
                    with contextlib.suppress(_NotRunning):
                        self._call("stopProcess", name, False)
            for name in programs:
                self.stop(name)
            pid = int(self._rpc().supervisor.getPID())
            with contextlib.suppress(ServerError):
                self._call("shutdown")
            deadline = time.monotonic() + _START_SECONDS
            while process_start(pid) is not None and time.monotonic() < deadline:
                time.sleep(0.05)
        self.end_leftovers()

    def end_leftovers(self) -> list[int]:
        """Kill what runs for this run root without a keeper; returns the processes found."""
        found: list[int] = []
        for record in (self.places.conf / "programs").glob("*.group"):
            if session := recorded_session(record, self.places.root):
                found += session_members(session)
                end_session(session)
            record.unlink(missing_ok=True)
        for entry in os.listdir("/proc"):
            if entry.isdigit() and runs_with(int(entry), f"{RUN_VARIABLE}={self.places.root}"):
                found.append(int(entry))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(entry), signal.SIGKILL)
        if found:
            log.warning("ended %d processes that no keeper looked after: %s", len(found), found)
        self.places.keeper_socket.unlink(missing_ok=True)
        return found

    def is_elsewhere(self) -> bool:
        """Whether the processes live in other PID or network namespaces than ours: we see neither
        them nor what they listen on."""
        try:
            return self._namespaces_file().read_text("ascii") != namespaces()
        except FileNotFoundError:  # started by an earlier version
            return process_start(int(self._call("getPID"))) is None

    def _namespaces_file(self) -> Path:
        return self.places.conf / "namespaces"

    def _group_file(self, name: str) -> Path:
        return self.places.conf / "programs" / f"{name}.group"

    def _session(self, name: str) -> int | None:
        return recorded_session(self._group_file(name), self.places.root)

    def _rpc(self) -> Any:
        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(None, None, f"unix://{self.places.keeper_socket}")
        return xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._rpc().supervisor, method)(*arguments)
        except xmlrpc.client.Fault as error:
            kind = {60: _AlreadyStarted, 70: _NotRunning}.get(error.faultCode, ServerError)
            raise kind(
                f"supervisord refused {method} {' '.join(map(str, arguments))}: "
                f"{error.faultString}",
                hint=f"read {self.places.logs / 'supervisord.log'}",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"supervisord does not answer ({error})",
                hint="`tuneserve up` starts it again with everything it kept",
            ) from error


class _AlreadyStarted(ServerError):
    """supervisor.xmlrpc.Faults.ALREADY_STARTED."""


class _NotRunning(ServerError):
    """supervisor.xmlrpc.Faults.NOT_RUNNING."""


def clean_environment(environment: Mapping[str, str], places: Layout) -> dict[str, str]:
    """An environment for daemons: ours without anything that looks like a secret or holds an API
    key of ours, and marked as of this run root."""
    ours = without_keys(places.keys, environment)
    kept = {name: value for name, value in ours.items() if not _SECRET.search(name)}
    return {**kept, RUN_VARIABLE: str(places.root)}


def tail(path: Path, lines: int) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 64 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _daemon_config(places: Layout) -> str:
    user = "user=root\n" if os.geteuid() == 0 else ""  # silences a warning about not dropping it
    return f"""[supervisord]
{user}logfile={_escaped(places.logs / "supervisord.log")}
logfile_maxbytes=5MB
logfile_backups=2
pidfile={_escaped(places.root / "supervisord.pid")}
directory={_escaped(places.root)}
nocleanup=true
umask=077

[unix_http_server]
file={_escaped(places.keeper_socket)}
chmod=0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[include]
files=programs/*.ini
"""


def _program_config(program: Program, launch: Path) -> str:
    arguments = [sys.executable, "-m", "tuneserve.release.wrapper", str(launch)]
    command = _escaped(shlex.join(arguments))
    # stopasgroup=false: SIGTERM goes to the wrapper alone, which passes it to the API process.
    # killasgroup=true: what ignores it is killed with its group. startsecs: a server that dies
    # sooner is started again after a growing pause, and given up after startretries.
    return f"""[program:{program.name}]
command={command}
autostart=false
autorestart=unexpected
startsecs=60
startretries={START_TRIES}
stopsignal=TERM
stopasgroup=false
killasgroup=true
stopwaitsecs={int(program.drain_seconds) + 30}
redirect_stderr=true
stdout_logfile={_escaped(program.log)}
stdout_logfile_maxbytes={LOG_ROTATE_BYTES}
stdout_logfile_backups=3
"""


def _escaped(path: Path | str) -> str:
    """A value in supervisord's configuration, where % begins an expansion."""
    return str(path).replace("%", "%%")
