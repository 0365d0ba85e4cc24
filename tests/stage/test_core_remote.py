"""Artifacts in an object store, against a real S3 server process (moto's)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from shim import executed, run_file
from tuneserve.artifacts import Artifact, Store, artifact_id
from tuneserve.calls import StageCall
from tuneserve.errors import DataError, DiskFull, InputError, StoreError, StoreRefused
from tuneserve.gc import Sweep, needed_by, sweep_text
from tuneserve.places import home
from tuneserve.process import run_stage
from tuneserve.remote import RemoteStore
from tuneserve.remote_gc import remove_remote, survey_remote
from tuneserve.runs import RunRecord, Runs, now

FACTS = {
    "key": {"a": 1},
    "inputs": {},
    "sources": {},
    "base": "b",
    "run": "r",
    "config": {},
    "versions": {},
    "metrics": {"rows": 3},
    "started": "2026-01-01T00:00:00+00:00",
    "finished": "2026-01-01T00:00:01+00:00",
    "seconds": 1.0,
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=2).close()
            break
        except OSError:
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.1)
    yield url
    server.kill()
    server.wait()


@pytest.fixture
def remote(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> RemoteStore:
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.config.conf.clear()
    bucket = f"bucket-{abs(hash(request.node.name))}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return RemoteStore(f"s3://{bucket}/team/")


def make(store: Store, text: str = "hello") -> Artifact:
    id = "thing-0123456789abcdef"
    with store.lock(id), store.draft(id) as draft:
        (draft.path / "sub").mkdir()
        (draft.path / "sub" / "a.txt").write_text(text)
        (draft.path / "b.bin").write_bytes(bytes(range(256)) * 64)
        return store.commit(draft, "make", FACTS)


def listed(remote: RemoteStore) -> list[str]:
    system, root = remote.open()
    return [name.removeprefix(f"{root}/") for name in system.find(root)]


def test_another_machine_gets_the_same_bytes(remote: RemoteStore, tmp_path: Path) -> None:
    made = make(Store(tmp_path / "one"))
    assert remote.pull(Store(tmp_path / "two"), made.id) is None
    remote.push(made)
    remote.push(made)  # once is enough
    assert len([n for n in listed(remote) if n.endswith("a.txt")]) == 1
    got = remote.pull(Store(tmp_path / "two"), made.id)
    assert got is not None and got.metrics == {"rows": 3} and got.manifest["key"] == {"a": 1}
    for name in ("sub/a.txt", "b.bin"):
        assert (got.path / name).read_bytes() == (made.path / name).read_bytes()
    assert Store(tmp_path / "two").find(made.id, rehash=True) is not None


def test_a_broken_upload_is_no_artifact(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(Store(tmp_path / "one"))
    (made.path / "sub" / "a.txt").unlink()  # the second of two files cannot be read
    with pytest.raises(StoreError, match="did not take"):
        remote.push(made)
    assert listed(remote) and not [n for n in listed(remote) if n.endswith("manifest.json")]
    assert remote.pull(Store(tmp_path / "two"), made.id) is None
    (made.path / "sub" / "a.txt").write_text("hello")
    remote.push(made)
    assert remote.pull(Store(tmp_path / "two"), made.id) is not None


@pytest.mark.parametrize("damage", ["bytes", "gone", "manifest", "keys", "no object", "outside"])
def test_what_is_damaged_there_is_not_used_and_replaced(
    remote: RemoteStore, tmp_path: Path, damage: str
) -> None:
    made = make(Store(tmp_path / "one"))
    remote.push(made)
    system, root = remote.open()
    manifest = f"{root}/{made.id}/manifest.json"
    (file,) = [f"{root}/{n}" for n in listed(remote) if n.endswith("a.txt")]
    if damage == "bytes":
        system.pipe_file(file, b"hellO")
    elif damage == "gone":
        system.rm_file(file)
    elif damage == "manifest":
        system.pipe_file(manifest, b'{"files": [')
    elif damage == "keys":
        system.pipe_file(manifest, b'{"stage": "make", "files": [{"path": "b.bin"}]}')
    elif damage == "no object":
        system.pipe_file(manifest, b"[1]")
    else:
        data = json.loads(system.cat_file(manifest))
        data["files"][0]["path"] = "../../outside"
        system.pipe_file(manifest, json.dumps(data).encode())
    two = Store(tmp_path / "two")
    assert remote.pull(two, made.id) is None
    assert not (two.root / made.id).exists() and not list(tmp_path.glob("**/outside"))
    assert not list((two.root / ".drafts").glob("*"))
    remote.push(made)
    got = remote.pull(two, made.id)
    assert got is not None and (got.path / "sub" / "a.txt").read_text() == "hello"


def test_a_stage_made_on_one_machine_is_cached_on_another(
    remote: RemoteStore, tmp_path: Path
) -> None:
    def asked(machine: str, stage: str = "quantize", **inputs: str) -> StageCall:
        store: dict[str, Any] = {"root": str(tmp_path / machine), "remote": remote.url}
        return StageCall(stage, run_file(tmp_path, store=store), inputs=inputs)

    first = run_stage(asked("one"))
    assert first.artifact is not None and not first.cached
    second = run_stage(asked("two"))
    assert second.cached and second.artifact == first.artifact
    assert executed(tmp_path) == ["quantize"]
    # An input that only the object store has is brought before the stage starts.
    run_stage(asked("three", "release", quantized=first.artifact))
    assert (tmp_path / "three" / first.artifact / "result.txt").read_text() == "done"


def test_a_service_that_is_away_is_named(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(Store(tmp_path / "one"))
    with socket.socket() as nobody:  # bound, and never listening
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        fsspec.config.conf.clear()
        s3 = fsspec.get_filesystem_class("s3")
        s3.clear_instance_cache()
        monkeypatch.setattr(s3, "retries", 1)
        with pytest.raises(StoreError, match="team did not take") as caught:
            remote.push(made)
    s3.clear_instance_cache()
    assert type(caught.value) is StoreError and caught.value.retryable
    assert caught.value.exit_status == 5


@pytest.mark.parametrize("why", ["bucket", "credentials", "access"])
def test_a_service_that_says_no_is_not_asked_again(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    made = make(Store(tmp_path / "one"))
    s3 = fsspec.get_filesystem_class("s3")
    s3.clear_instance_cache()
    if why == "bucket":
        remote = RemoteStore("s3://no-such-bucket/x")
    elif why == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
    else:
        denied = {"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}

        def refuse(*_: object, **__: object) -> None:
            from botocore.exceptions import ClientError
            from s3fs.errors import translate_boto_error

            raise translate_boto_error(ClientError(denied, "PutObject"))

        monkeypatch.setattr(s3, "put_file", refuse)
    with pytest.raises(StoreRefused, match=f"{remote.url} did not take") as caught:
        remote.push(made)
    s3.clear_instance_cache()
    assert not caught.value.retryable and caught.value.exit_status == 5
    assert "testing" not in str(caught.value)


def test_a_full_disk_here_is_not_the_services_fault(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(Store(tmp_path / "one"))
    remote.push(made)

    def full(source: str, target: str) -> None:
        Path(target).write_text("half")
        with open("/dev/full", "w") as stream:
            stream.write("x" * 10_000)

    monkeypatch.setattr(remote.open()[0], "get_file", full)
    two = Store(tmp_path / "two")
    with pytest.raises(DiskFull, match="the disk is full") as caught:
        remote.pull(two, made.id)
    assert not caught.value.retryable
    assert not (two.root / made.id).exists() and not list((two.root / ".drafts").glob("*"))


class Team:
    """Two machines, an object store, and chains of artifacts that were uploaded long ago."""

    def __init__(self, remote: RemoteStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.remote, self.folder, self.monkeypatch = remote, folder, monkeypatch
        self.store = self.on("one")

    def on(self, machine: str) -> Store:
        """Be on a machine: its TUNESERVE_HOME, its store."""
        self.monkeypatch.setenv("TUNESERVE_HOME", str(self.folder / machine))
        self.store = Store(self.folder / machine / "store")
        return self.store

    def chain(self, tag: str) -> list[str]:
        """A dataset and an adapter made from it, here and in the object store."""
        ids = [f"dataset-{tag:0>16}", f"adapter-{tag:0>16}"]
        for id, inputs in zip(ids, ({}, {"dataset": ids[0]}), strict=True):
            with self.store.lock(id), self.store.draft(id) as draft:
                (draft.path / "weights").write_text(id)
                self.remote.push(self.store.commit(draft, "make", {**FACTS, "inputs": inputs}))
        return ids

    def run(self, *used: str) -> None:
        """Note a run of this machine, and say what it needs."""
        record = RunRecord(f"run-{used[-1]}", "r", "support", state="promoted", used=list(used))
        record.ended = now()
        Runs().root.mkdir(parents=True, exist_ok=True)
        Runs().save(record)
        self.remote.note_needs(needed_by(home(), self.store))

    def later(self, days: float) -> None:
        """Let time pass for the one who sweeps."""
        passed = time.time() + days * 86400
        self.monkeypatch.setattr("tuneserve.remote_gc.time", SimpleNamespace(time=lambda: passed))

    def sweep(self, **options: Any) -> Sweep:
        return survey_remote(self.remote, self.store, **{"keep_days": 14, **options})

    def there(self) -> set[str]:
        return {name.split("/")[0] for name in listed(self.remote)} - {".users"}


@pytest.fixture
def team(remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    return Team(remote, tmp_path, monkeypatch)


def test_what_any_machine_needs_stays_in_the_object_store(team: Team) -> None:
    mine, old = team.chain("a"), team.chain("b")
    team.run(mine[1])
    team.on("two")
    others = team.chain("c")
    team.run(others[1])
    team.on("three")
    assert team.sweep().artifacts == {}, "all of it was uploaded lately"
    team.later(20)
    before = listed(team.remote)
    sweep = team.sweep()
    assert set(sweep.artifacts) == set(old) and set(sweep.kept) == {*mine, *others}
    assert listed(team.remote) == before, "a survey removes nothing"
    assert f"{team.folder / 'two'} on" in sweep_text(sweep, removed=False)
    system, root = team.remote.open()
    sizes = sum(system.size(f"{root}/{name}") for name in before if name.split("/")[0] in old)
    assert sweep.bytes == sizes
    remove_remote(team.remote, sweep)
    assert team.there() == {*mine, *others}
    for id in team.there():
        assert team.remote.pull(Store(team.folder / "four"), id) is not None


def test_what_a_machine_took_up_after_the_survey_stays(team: Team) -> None:
    chain = team.chain("a")
    team.later(20)
    sweep = team.sweep()
    assert set(sweep.artifacts) == set(chain)
    team.on("two")
    team.remote.note_needs([chain[1]])
    remove_remote(team.remote, sweep)
    assert team.there() == set(chain) and set(sweep.busy) == set(chain)
    assert sweep.artifacts == {}


def test_broken_uploads_go_once_nobody_can_be_at_them(team: Team) -> None:
    chain = team.chain("a")
    team.run(chain[1])
    system, root = team.remote.open()
    for name in (f"{chain[1]}/0ther/weights", "merged-0123456789abcdef/half/weights"):
        system.pipe_file(f"{root}/{name}", b"half of it")
    assert team.sweep(keep_days=0).leftovers == {}
    team.later(2)
    sweep = team.sweep(keep_days=0)
    assert sweep.leftovers == {f"{chain[1]}/0ther": 10, "merged-0123456789abcdef/half": 10}
    remove_remote(team.remote, sweep)
    assert team.there() == set(chain)
    assert team.remote.pull(Store(team.folder / "two"), chain[1]) is not None


def test_a_note_that_cannot_be_read_removes_nothing(team: Team) -> None:
    team.chain("a")
    system, root = team.remote.open()
    system.pipe_file(f"{root}/.users/x.json", b"{")
    team.later(20)
    before = listed(team.remote)
    with pytest.raises(InputError, match="nobody knows what that machine needs"):
        team.sweep()
    assert {*before} <= {*listed(team.remote)}


def test_a_stage_says_what_it_needs_before_it_is_made(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    run = run_file(tmp_path, store={"root": str(tmp_path / "store"), "remote": remote.url})
    call = StageCall("quantize", run, None, {}, settings={"do": "data error"})
    with pytest.raises(DataError):
        run_stage(call, log_line=lambda line: None)
    (note,) = [name for name in listed(remote) if name.startswith(".users/")]
    system, root = remote.open()
    said = json.loads(system.cat_file(f"{root}/{note}"))
    assert said["needed"] == [artifact_id("quantized", call.key())]
    assert said["home"] == str(tmp_path / "home")
