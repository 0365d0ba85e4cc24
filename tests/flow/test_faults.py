"""Kills and cancels with a real server, a real worker and real children."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from flows.finetune_to_serve import finetune_to_serve
from prefect_worker import (
    ROOT,
    deploy,
    environment,
    finished,
    flow_run,
    prefect,
    server,
    start_run,
    until,
    worker,
)
from shim import executed, run_file
from tuneserve.errors import DeviceBusy
from tuneserve.runs import Runs

STAGES = ["fetch", "validate", "plan", "train", "merge", "evaluate", "quantize", "release"]


class Site:
    """A deployment with a worker, and a run file whose stages hang when told."""

    def __init__(self, api_url: str, folder: Path, base: Path) -> None:
        self.folder, self.base = folder, base
        self.env = environment(api_url, folder)
        self.runs = Runs(folder / "home" / "runs")
        self.hanging = folder / "hanging.json"

    def file(self, **changes: Any) -> str:
        run = run_file(
            self.folder, model={"base": str(self.base)}, merge={"base": "original"}, **changes
        )
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
        return str(path)

    def tell(self, **stages: str) -> None:
        (self.folder / "behave.json").write_text(json.dumps(stages))

    def hang_in(self, stage: str) -> tuple[str, list[int]]:
        """Start a run that hangs in a stage: its id, and the processes of that stage."""
        self.hanging.unlink(missing_ok=True)
        self.tell(**{stage: "hang with a child"})
        id = self.start_by_hand() if stage == "train" else start_run(run_file=self.file())
        pids = until(
            lambda: self.hanging.exists() and json.loads(self.hanging.read_text() or "null"),
            f"{stage} hangs",
        )
        self.tell()
        return id, pids

    def start_by_hand(self) -> str:
        """As README says."""
        asked = ["deployment", "run", "finetune-to-serve/local", "-p", f"run_file={self.file()}"]
        found = re.search(r"UUID: ([0-9a-f-]{36})", prefect(self.env, *asked))
        assert found is not None
        return found[1]

    def wait_in(self, stage: str) -> str:
        """Start a run that waits in a stage until `go`; its id."""
        for name in ("waiting", "go"):
            (self.folder / name).unlink(missing_ok=True)
        self.tell(**{stage: "wait"})
        id = start_run(run_file=self.file())
        until((self.folder / "waiting").exists, f"{stage} waits")
        self.tell()
        return id

    def go(self) -> None:
        (self.folder / "go").touch()

    def train_is_made(self) -> bool:
        return any((self.folder / "store").glob("adapter-*"))

    def flow_pid(self, id: str) -> int:
        (record,) = [r for r in self.runs.all() if r.id == id]
        return record.pid

    def kept(self) -> set[str]:
        return {p.name.split("-")[0] for p in (self.folder / "store").glob("[!.]*")}

    def runs_to_the_end(self) -> list[str]:
        """A new run completes; what it really did."""
        before = len(executed(self.folder))
        again = finished(start_run(run_file=self.file()))
        log = (self.folder / "worker.log").read_text()
        assert again.state is not None and again.state.is_completed(), log
        return executed(self.folder)[before:]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def all_gone(pids: list[int]) -> None:
    until(lambda: all(map(gone, pids)), f"{pids} are gone", 60)


@pytest.fixture(scope="module")
def site(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, pico_model: Path
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    site = Site(prefect_server, folder, pico_model)
    deploy(site.env)
    with worker(site.env, folder):
        yield site


def fresh(site: Site) -> None:
    """Other data: everything is to be made."""
    count = len(list(site.folder.glob("*.log"))) + len(site.runs.all())
    (site.folder / "data.jsonl").write_text(json.dumps({"messages": [count]}) + "\n")


def others_are_refused(site: Site, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand on this machine, and by a flow on another one: both name the run that holds."""
    path = site.file(overlap={"when_busy": "refuse"})
    command = [sys.executable, "-m", "tuneserve", "run", path]
    by_hand = subprocess.run(command, env=site.env, capture_output=True, text=True, timeout=60)
    assert by_hand.returncode == 3
    assert f"the served name 'default' is held by run {id} (shim, process" in by_hand.stderr
    assert " since 20" in by_hand.stderr
    monkeypatch.setattr("tasks.alone._LOOK_SECONDS", 1.0)
    with pytest.raises(DeviceBusy, match=f"is held by run {id} on .* since 20"):
        finetune_to_serve(path)  # TUNESERVE_HOME of the test: as on another machine


def cancel(id: str) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run(id).id, Cancelling())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "stage",
    [pytest.param(s, marks=() if s == "train" else pytest.mark.full) for s in STAGES],
)
def test_a_cancelled_run_leaves_no_process_and_nothing_half_made(
    site: Site, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(site)
    id, pids = site.hang_in(stage)
    before = site.kept()
    if stage == "train":
        others_are_refused(site, id, monkeypatch)
    cancel(id)
    ended = finished(id)
    assert ended.state is not None and ended.state.is_cancelled()
    all_gone([*pids, site.flow_pid(id)])
    assert site.kept() == before
    assert not list((site.folder / "store" / ".drafts").glob("*"))
    (record,) = [r for r in site.runs.all() if r.id == id]
    assert record.state == "cancelled" and record.stage == stage
    done = site.runs_to_the_end()
    made = [s.partition(":")[0] for s in done]
    assert stage in made and made[0] == "fetch"
    if stage in ("merge", "evaluate", "quantize", "release"):
        assert "train" not in made and "validate" not in made  # finished stages are not redone


@pytest.mark.full
def test_a_killed_flow_is_marked_and_the_next_run_resumes(site: Site) -> None:
    fresh(site)
    id, pids = site.hang_in("merge")
    os.kill(site.flow_pid(id), signal.SIGKILL)
    all_gone(pids)
    assert [s.partition(":")[0] for s in site.runs_to_the_end()] == [
        "fetch", "plan", "merge", "evaluate", "quantize", "release",
    ]  # fmt: skip
    (record,) = [r for r in site.runs.all() if r.id == id]
    assert record.state == "stale" and "during merge" in record.error
    state = flow_run(id).state
    assert state is not None and state.is_crashed()


@pytest.mark.full
def test_a_killed_child_is_started_again(site: Site) -> None:
    fresh(site)
    id, pids = site.hang_in("validate")  # its first delay is the shortest
    os.kill(pids[0], signal.SIGKILL)
    all_gone(pids)
    ended = finished(id)
    assert ended.state is not None and ended.state.is_completed()
    assert executed(site.folder).count("validate") >= 2


class OwnServer:
    """A site whose server can be killed."""

    def __init__(self, folder: Path, base: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.site = Site(f"http://127.0.0.1:{self.port}/api", folder, base)
        self.site.env["PREFECT_CLIENT_MAX_RETRIES"] = "10"  # as deploy/prefect.yaml has it
        self.folder = folder

    @contextlib.contextmanager
    def server(self) -> Iterator[subprocess.Popen[bytes]]:
        address = {PREFECT_API_URL: self.site.env["PREFECT_API_URL"]}
        with server(self.site.env, self.folder, self.port) as process:
            with temporary_settings(updates=address):
                yield process


@pytest.fixture
def own(tmp_path: Path, pico_model: Path) -> OwnServer:
    return OwnServer(tmp_path, pico_model)


@pytest.mark.full
def test_a_server_that_is_killed_and_comes_back_does_not_end_the_run(own: OwnServer) -> None:
    with contextlib.ExitStack() as stack:
        with own.server() as process:
            deploy(own.site.env)
            stack.enter_context(worker(own.site.env, own.folder))
            id = own.site.wait_in("train")
            os.killpg(process.pid, signal.SIGKILL)
        own.site.go()
        with own.server():
            ended = finished(id)
            assert ended.state is not None and ended.state.is_completed()
            assert executed(own.folder).count("train") == 1
            (own.folder / "data.jsonl").write_text('{"messages": [2]}\n')
            assert own.site.runs_to_the_end()[-1] == "release"  # nothing is held by a lost lease


@pytest.mark.full
def test_after_everything_was_killed_together_the_next_run_completes(own: OwnServer) -> None:
    """As a machine that loses its power: nobody could give anything back."""
    with own.server() as process, worker(own.site.env, own.folder) as of_before:
        deploy(own.site.env)
        id = own.site.wait_in("train")
        os.killpg(process.pid, signal.SIGKILL)
        os.kill(of_before.pid, signal.SIGKILL)
        flow = own.site.flow_pid(id)
        os.kill(flow, signal.SIGKILL)
        all_gone([process.pid, of_before.pid, flow])
    before = len(executed(own.folder))
    with own.server(), worker(own.site.env, own.folder):
        ids = [start_run(run_file=own.site.file()) for _ in range(2)]  # within a second
        states = [finished(other).state for other in ids]
        assert all(state is not None and state.is_completed() for state in states), states
        state = flow_run(id).state
    assert state is not None and state.is_crashed()
    made = executed(own.folder)[before:]
    assert made.count("train") == 1 and made.count("validate") == 0  # one waited for the other
    assert [r.state for r in own.site.runs.all()] == ["stale", "promoted", "promoted"]


@pytest.mark.full
def test_a_run_goes_on_without_its_worker(own: OwnServer) -> None:
    with own.server():
        deploy(own.site.env)
        with worker(own.site.env, own.folder) as process:
            id = own.site.wait_in("train")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            own.site.go()
            state = finished(id).state
    assert state is not None and state.is_completed(), state
    assert executed(own.folder).count("train") == 1
    (record,) = own.site.runs.all()
    assert record.state == "promoted"


@pytest.mark.full
def test_a_locked_database_does_not_end_the_run(own: OwnServer) -> None:
    with own.server():
        deploy(own.site.env)
        with worker(own.site.env, own.folder):
            id = own.site.wait_in("train")
            database = sqlite3.connect(own.folder / "prefect" / "prefect.db", timeout=30)
            database.execute("BEGIN EXCLUSIVE")
            own.site.go()
            until(lambda: "merge" in executed(own.folder) or own.site.train_is_made(), "train ends")
            with contextlib.suppress(TimeoutError):
                select.select([], [], [], 15)  # the lock outlasts the server's own patience
            database.rollback()
            database.close()
            ended = finished(id)
    assert ended.state is not None and ended.state.is_completed()


_RUN = "import sys; from flows.finetune_to_serve import finetune_to_serve as f; f(sys.argv[1])"


@pytest.mark.full
@pytest.mark.parametrize(
    "code", [_RUN, f"from tasks.embedded import own_server; own_server()(); {_RUN}"]
)
def test_the_embedded_server_ends_with_a_killed_run(
    tmp_path: Path, pico_model: Path, code: str
) -> None:
    site = Site("", tmp_path, pico_model)
    site.tell(train="wait")
    env = {**site.env, "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
    del env["PREFECT_API_URL"]
    (tmp_path / "prefect").mkdir()
    run = subprocess.Popen([sys.executable, "-c", code, site.file()], cwd=ROOT, env=env)
    until((tmp_path / "waiting").exists, "train waits")
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    everybody = [int(pid) for pid in children]
    assert len(everybody) >= 2  # the server and its watcher; stages belong to other threads
    run.kill()
    run.wait()
    all_gone(everybody)
