"""Downloads from a real HTTP server that answers as the hub does: tokens, revisions, cuts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from model_shapes import QWEN2_7B

COMMIT, OLD = "c0ffee" + "0" * 34, "0ddba11" + "0" * 33
LARGE = 24 * 2**20
CARD = b"""---
license: other
license_name: lamp-licence
license_link: https://lamp.invalid/l
---
# Lamp
"""


def content(name: str, commit: str) -> bytes:
    """What a file holds at a commit; large ones are the same at both."""
    if name.endswith(".safetensors"):
        block = hashlib.sha256(name.encode()).digest()
        return block * (LARGE // len(block))
    if name == "config.json":
        return json.dumps({**QWEN2_7B, "revision": commit}).encode()
    return CARD if name == "README.md" else b"{}"


FILES = (
    "README.md",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "tokenizer.json",
)


class Hub(ThreadingHTTPServer):
    """One repository `org/lamp`, a gated one `org/gated` and a private one `org/private`.

    Attributes:
        cut_after: Bytes after which the next GETs of weights lose their connection.
        hang_after: Bytes after which the GETs of weights send nothing more.
        damage: Whether weights arrive with a wrong byte.
        gets: (file, first byte, token) of every GET of weights.
        broken: Status that everything is answered with.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.cut_after: dict[str, int] = {}
        self.hang_after = 0
        self.damage = False
        self.broken = 0
        self.gets: list[tuple[str, int, str]] = []
        self.hanging = threading.Event()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    """Repository listing, tree and files, with the hub's headers."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        return None

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.broken:
            return self.refuse(self.server.broken, "", "no")
        if token == "expired":
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        listing = re.fullmatch(
            r"/api/models/(org/\w+)(?:/revision/([^/?]+))?(?:/tree/([^/?]+))?(?:\?.*)?", self.path
        )
        file = re.fullmatch(r"/(org/\w+)/resolve/([^/]+)/([^?]+)", self.path)
        found = listing or file
        if not found:
            return self.refuse(404, "RepoNotFound", "no such path")
        if found[1] == "org/gated" and token != "accepted":
            return self.refuse(403, "GatedRepo", "Access to model org/gated is restricted")
        if found[1] not in ("org/lamp", "org/gated"):
            return self.refuse(401, "RepoNotFound", "Repository not found")
        wanted = found[2] or (listing and listing[3]) or "main"
        commit = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD, OLD: OLD}.get(wanted)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        if file:
            return self.send_file(file[3], commit, token, body=body)
        if listing and listing[3]:
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(content(name, commit)),
                    "oid": hashlib.sha1(content(name, commit)).hexdigest(),
                    **(
                        {
                            "lfs": {
                                "oid": hashlib.sha256(content(name, commit)).hexdigest(),
                                "size": LARGE,
                                "pointerSize": 134,
                            }
                        }
                        if name.endswith(".safetensors")
                        else {}
                    ),
                }
                for name in FILES
            ]
            return self.send_bytes(json.dumps(entries).encode())
        described = {
            "id": found[1],
            "modelId": found[1],
            "sha": commit,
            "private": False,
            "siblings": [{"rfilename": name} for name in FILES],
        }
        return self.send_bytes(json.dumps(described).encode())

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_bytes(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def send_file(self, name: str, commit: str, token: str, *, body: bool) -> None:
        data = content(name, commit)
        large = name.endswith(".safetensors")
        first = int(re.findall(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[0])
        self.send_response(206 if first else 200)
        digest = hashlib.sha256 if large else hashlib.sha1
        self.send_header("ETag", f'"{digest(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        hub = self.server
        if large:
            hub.gets.append((name, first, token))
            if hub.damage:
                data = b"!" + data[1:]
            if (limit := hub.cut_after.pop(name, 0)) > first:
                self.wfile.write(data[first:limit])
                self.close_connection = True
                self.connection.close()
                return
            if hub.hang_after:
                self.wfile.write(data[first : hub.hang_after])
                self.wfile.flush()
                hub.hanging.set()
                hub.over.wait()
                return
        self.wfile.write(data[first:])


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import json, logging, sys
from tuneserve.checkpoint.hub import download
from tuneserve.checkpoint.licence import base_licence
from tuneserve.errors import TuneserveError
from tuneserve.config import ModelSection
logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("httpx2").setLevel(logging.WARNING)
base, revision, weights = sys.argv[1:]
try:
    folder = download(ModelSection(base=base, revision=revision or None), weights=weights == "yes")
except TuneserveError as error:
    print(json.dumps({**error.to_json(), "class": type(error).__name__}))
else:
    found = {p.name: p.stat().st_size for p in folder.iterdir()}
    licence = base_licence(folder).to_json()
    print(json.dumps({"folder": folder.name, "files": found, "licence": licence}))
"""


def environment(hub: Hub | None, home: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    # Port 9 (discard) is one where nobody listens.
    url = hub.url if hub else "http://127.0.0.1:9"
    return {
        **kept,
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **more,
    }


def start(hub: Hub | None, home: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=environment(hub, home, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetch(
    hub: Hub | None,
    home: Path,
    base: str = "org/lamp",
    revision: str = "",
    weights: str = "yes",
    **more: str,
) -> tuple[dict[str, Any], str]:
    child = start(hub, home, base, revision, weights, **more)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found, err


def blobs(home: Path) -> list[str]:
    return sorted(p.name for p in home.rglob("blobs/*"))


def test_downloads_what_is_needed_and_says_the_commit(hub: Hub, tmp_path: Path) -> None:
    found, log = fetch(hub, tmp_path, HF_TOKEN="mine")
    assert found["folder"] == COMMIT
    assert found["files"].keys() == {name for name in FILES if name != "pytorch_model.bin"}
    assert found["files"]["model-00001-of-00002.safetensors"] == LARGE
    assert found["licence"] == {
        "id": "other",
        "name": "lamp-licence",
        "link": "https://lamp.invalid/l",
        "source": "README.md of the base",
    }
    assert f"org/lamp is {COMMIT} today; model.revision would pin it" in log
    assert re.search(r"download: \d+/48 MiB", log)
    assert {token for _, _, token in hub.gets} == {"mine"} and "mine" not in log
    assert not [name for name in blobs(tmp_path) if "partial" in name or "incomplete" in name]
    hub.gets.clear()
    again, log = fetch(hub, tmp_path)
    assert again == found and not hub.gets and "downloading" not in log


def test_a_revision_is_pinned(hub: Hub, tmp_path: Path) -> None:
    for wanted in ("v1", OLD):
        found, log = fetch(hub, tmp_path, revision=wanted, weights="")
        assert found["folder"] == OLD and "would pin" not in log
    assert json.loads(next(tmp_path.rglob(f"{OLD}/config.json")).read_text())["revision"] == OLD
    assert not hub.gets
    missing, _ = fetch(hub, tmp_path, revision="v9", weights="")
    assert missing["class"] == "HubRefused" and "no such revision" in missing["message"]


def test_a_killed_download_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.hang_after = 17 * 2**20
    child = start(hub, tmp_path, "org/lamp", "", "yes")
    assert hub.hanging.wait(60)
    blob = hashlib.sha256(content("model-00001-of-00002.safetensors", COMMIT)).hexdigest()
    while not any(p.stat().st_size >= 2**20 for p in tmp_path.rglob("*.tuneserve-partial")):
        assert child.poll() is None
    child.kill()
    child.communicate()
    left = {p.name.split(".")[0]: p.stat().st_size for p in tmp_path.rglob("*.tuneserve-partial")}
    hub.hang_after = 0
    hub.gets.clear()
    found, log = fetch(hub, tmp_path)
    assert found["files"]["model-00001-of-00002.safetensors"] == LARGE
    assert "going on from there" in log
    asked = {hashlib.sha256(content(n, COMMIT)).hexdigest(): first for n, first, _ in hub.gets}
    assert blob in asked
    assert {name: size for name, size in left.items() if size} == {
        name: first for name, first in asked.items() if first
    }
    assert not list(tmp_path.rglob("*.tuneserve-partial"))


def test_a_lost_connection_is_taken_up_again(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after["model-00002-of-00002.safetensors"] = 15 * 2**20
    found, _ = fetch(hub, tmp_path)
    assert found["files"]["model-00002-of-00002.safetensors"] == LARGE
    starts = [first for name, first, _ in hub.gets if name.startswith("model-00002")]
    assert len(starts) == 2 and starts[1] > 0


def test_damage_is_seen_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.damage = True
    found, _ = fetch(hub, tmp_path)
    assert found["class"] == "HubError" and "arrived damaged" in found["message"]
    assert found["expected"] in {
        hashlib.sha256(content(name, COMMIT)).hexdigest() for name in FILES
    }
    assert not [name for name in blobs(tmp_path) if len(name) == 64]
    hub.damage = False
    assert fetch(hub, tmp_path)[0]["folder"] == COMMIT


@pytest.mark.parametrize(
    ("base", "token", "kind", "message", "hint"),
    [
        ("org/gated", "", "HubRefused", "accepted its terms", "HF_TOKEN"),
        ("org/private", "", "HubRefused", "not found on the hub, or private", "HF_TOKEN"),
        ("org/lamp", "expired", "HubRefused", "refuses the token", "new read token"),
    ],
)
def test_no_access(
    hub: Hub, tmp_path: Path, base: str, token: str, kind: str, message: str, hint: str
) -> None:
    more = {"HF_TOKEN": token} if token else {}
    found, _ = fetch(hub, tmp_path, base=base, **more)
    assert (found["class"], message in found["message"]) == (kind, True), found
    assert hint in found["hint"] and token not in found["message"].split()
    assert not blobs(tmp_path) and not hub.gets


def test_a_gated_model_with_the_right_token(hub: Hub, tmp_path: Path) -> None:
    found, _ = fetch(hub, tmp_path, base="org/gated", weights="", HF_TOKEN="accepted")
    assert found["folder"] == COMMIT


def test_a_broken_hub_is_not_a_no(hub: Hub, tmp_path: Path) -> None:
    hub.broken = 503
    found, _ = fetch(hub, tmp_path, weights="")
    assert found["class"] == "HubError" and "HTTP 503" in found["message"]


def test_the_cache_serves_when_the_hub_is_silent(hub: Hub, tmp_path: Path) -> None:
    whole, _ = fetch(hub, tmp_path)
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        found, log = fetch(None, tmp_path, **more)
        assert found == whole and "the hub does not answer" in log
    pinned, _ = fetch(None, tmp_path, revision=COMMIT)
    assert pinned == whole


def test_half_a_model_in_the_cache_is_none(hub: Hub, tmp_path: Path) -> None:
    """A plan fetched the small files; training offline must not begin without the weights."""
    fetch(hub, tmp_path, weights="")
    found, _ = fetch(None, tmp_path, weights="")
    assert found["folder"] == COMMIT
    refused, _ = fetch(None, tmp_path, weights="yes")
    assert refused["class"] == "HubError" and "does not hold the model" in refused["message"]


def test_the_command_says_no_access_and_exits_5(hub: Hub, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        yaml.safe_dump({"name": "a", "model": {"base": "org/gated"}, "data": {"train": "a.jsonl"}})
    )
    command = [sys.executable, "-m", "tuneserve", "plan", "run.yaml", "--gpu-memory", "24GiB"]
    done = subprocess.run(
        command,
        env=environment(hub, tmp_path / "hf"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 5 and "Traceback" not in done.stderr
    assert "what to do: accept them on the model's page, then set HF_TOKEN" in done.stderr
    done = subprocess.run(
        command,
        env=environment(hub, tmp_path / "hf", HF_TOKEN="accepted"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "7.62 billion parameters" in done.stdout
