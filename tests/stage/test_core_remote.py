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
from typing import Any

import fsspec
import pytest

from shim import executed, run_file
from tuneserve.artifacts import Artifact, Store
from tuneserve.calls import StageCall
from tuneserve.errors import StoreError
from tuneserve.process import run_stage
from tuneserve.remote import RemoteStore

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
    system, root = remote._open()
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


@pytest.mark.parametrize("damage", ["bytes", "gone", "manifest", "outside"])
def test_what_is_damaged_there_is_not_used_and_replaced(
    remote: RemoteStore, tmp_path: Path, damage: str
) -> None:
    made = make(Store(tmp_path / "one"))
    remote.push(made)
    system, root = remote._open()
    manifest = f"{root}/{made.id}/manifest.json"
    (file,) = [f"{root}/{n}" for n in listed(remote) if n.endswith("a.txt")]
    if damage == "bytes":
        system.pipe_file(file, b"hellO")
    elif damage == "gone":
        system.rm_file(file)
    elif damage == "manifest":
        system.pipe_file(manifest, b'{"files": [')
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
    gone = RemoteStore("s3://no-such-bucket/x")
    with pytest.raises(StoreError, match="no-such-bucket/x did not take") as caught:
        gone.push(made)
    assert caught.value.retryable and caught.value.exit_status == 5
    assert "testing" not in str(caught.value)
