"""A run root with stubs in vLLM's place, for tests of releases; its processes are real."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import release_stub as stub
from tuneserve.config import GatesSection, ServeSection
from tuneserve.release import control
from tuneserve.release.layout import layout
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.supervisor import Keeper


class House:
    """A run root of its own, models and requests for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port: int = stub.free_port()
        self.python = stub.stub_python(folder / "bin")
        self.dataset = stub.make_dataset(folder / "dataset")

    def request(self, model: str = "a", **changes: Any) -> ReleaseRequest:
        behaviour = changes.pop("behaviour", {})
        gates = changes.pop("gates", GatesSection())
        dataset = changes.pop("dataset", self.dataset)
        losses = changes.pop("losses", None)
        hints = changes.pop("hints", {})
        fields = {
            "port": self.port,
            "drain_timeout_seconds": 20,
            "ready_timeout_seconds": 30,
            "max_model_len": 512,
            **changes,
        }
        evaluation = None
        if losses:
            evaluation = stub.make_evaluation(self.folder / "evaluation", dataset, **losses)
        return ReleaseRequest(
            model=stub.make_model(self.folder / model, **behaviour),
            serve=ServeSection.model_validate(fields),
            gates=gates,
            python=self.python,
            dataset=dataset,
            evaluation=evaluation,
            artifact=f"merged-{model}",
            hints=hints,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def chat(self, tokens: int = 2, path: str = "/v1", **options: Any) -> httpx.Response:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        return httpx.post(
            f"{self.url}{path}/chat/completions",
            json={**body, "max_tokens": tokens},
            timeout=60,
            **options,
        )


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    monkeypatch.setenv("TUNESERVE_HOME", str(folder / "home"))
    try:
        yield House(folder)
    finally:
        control.down()
        left = processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, left


def processes_of(folder: Path) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and int(entry) != os.getpid():
                line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if str(folder) in line:
                    found.append(f"{entry} {line}")
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def keeper() -> Keeper:
    return Keeper(layout())
