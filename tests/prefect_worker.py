"""Prefect as its users run it: the command line, a worker process, runs of a deployment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

ROOT = Path(__file__).resolve().parents[1]
WAIT_SECONDS = 180


def environment(api_url: str, folder: Path) -> dict[str, str]:
    """What a shell has in which somebody works with Prefect."""
    return {
        **os.environ,
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "TUNESERVE_ROOT": str(ROOT),
        "TUNESERVE_HOME": str(folder / "home"),
        "COLUMNS": "200",
    }


def prefect(env: dict[str, str], *arguments: str) -> str:
    """Run one command of Prefect's command line; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def worker(env: dict[str, str], folder: Path, pool: str = "local") -> Iterator[subprocess.Popen]:
    """A process worker; it and what it started are gone afterwards."""
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(ready: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """The first true answer of `ready`; looks again every quarter second."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.25)
    return found


def flow_run(id: str) -> FlowRun:
    """A flow run as the server knows it."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(id))


def finished(id: str) -> FlowRun:
    """Wait until a flow run has ended."""

    def look() -> FlowRun | None:
        found = flow_run(id)
        return found if found.state and found.state.is_final() else None

    return until(look, f"flow run {id} ends")


def start_run(**parameters: Any) -> str:
    """Start a run of finetune-to-serve/local; its id."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("finetune-to-serve/local")
        made = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        return str(made.id)


def deploy(env: dict[str, str], name: str = "local") -> None:
    """The pool and a deployment of this machine, as README says."""
    prefect(env, "work-pool", "create", "--type", "process", "--overwrite", "local")
    prefect(env, "--no-prompt", "deploy", "--prefect-file", "deploy/prefect.yaml", "--name", name)


@contextlib.contextmanager
def server(env: dict[str, str], folder: Path, port: int) -> Iterator[subprocess.Popen]:
    """A server of its own, for tests that kill it; its database is in PREFECT_HOME."""
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
            cwd=ROOT,
            env={**env, "PREFECT_API_URL": ""},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{env['PREFECT_API_URL']}/health", timeout=2):
                return True
        except OSError:
            return False

    try:
        until(answers, "the server answers")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
