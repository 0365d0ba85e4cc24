"""The address of the endpoint is looked at before anything is trained, not after."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model_shapes import QWEN2_7B
from tuneserve import doctor
from tuneserve.config import RunFile
from tuneserve.errors import PortTaken, RunFileError
from tuneserve.plan import plan_run
from tuneserve.plan.machine import Gpu, Machine, look
from tuneserve.plan.stage import run as run_stage
from tuneserve.release import entrance, state
from tuneserve.release.address import Listen
from tuneserve.release.layout import Layout, layout
from tuneserve.release.supervisor import Keeper
from tuneserve.runfile import parse_run
from tuneserve.stages import StageContext

GIB = 2**30


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = Machine(Gpu("card", 80 * GIB, 80 * GIB), 64 * GIB, 60 * GIB, 500 * GIB, "/store")
    monkeypatch.setattr("tuneserve.plan.build.look", lambda *_, **__: place)
    monkeypatch.setattr("tuneserve.doctor._installed", {"torch": "2.13.0"}.get)
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN2_7B))
    return folder


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def run(base: Path, **serve: Any) -> RunFile:
    data = {"train": [str(base / "config.json")], "max_length": 2048}
    return parse_run({"name": "t", "model": {"base": str(base)}, "data": data, "serve": serve})


def start(run_file: RunFile, base: Path, **hints: Any) -> dict[str, Any]:
    return run_stage(StageContext(run_file, base, {}, base / "out", base / "work", hints=hints))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def files(base: Path) -> list[str]:
    return sorted(str(path) for path in base.parent.rglob("*") if path.is_file())


def test_a_port_of_somebody_else_stops_the_run_before_it_trains(
    base: Path, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = files(base)
    with pytest.raises(PortTaken) as caught:
        start(run(base, port=taken), base)
    assert caught.value.message.startswith(f"127.0.0.1:{taken} is taken by process {os.getpid()} (")
    assert caught.value.hint == "end that process, or set serve.port to another port"
    assert not caught.value.retryable and files(base) == before
    assert not (base.parent / "home").exists()

    with caplog.at_level(logging.WARNING):
        shown = plan_run(run(base, port=taken))  # a plan spends nothing: it says so and goes on
    assert shown["fits"]
    assert f"the run would be refused: 127.0.0.1:{taken} is taken by process" in caplog.text


def test_neither_another_card_nor_a_training_alone_asks_for_the_port(
    base: Path, taken: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert start(run(base, port=taken), base, serves=False)["fits"]
    monkeypatch.setattr("tuneserve.plan.build.look", look)
    with caplog.at_level(logging.WARNING):
        plan_run(run(base, port=taken), gpu_memory_bytes=80 * GIB)
    assert "taken" not in caplog.text


def gateway_on(port: int, name: str, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """This process stands for a gateway of ours that serves `name`."""
    places = layout()
    with state.change(places) as changed:
        changed.gateway = Listen("127.0.0.1", port).to_json()
        changed.names[name] = state.Name(active="r1")
    monkeypatch.setattr(Keeper, "members", lambda self, _: [os.getpid()])
    return places


def test_our_own_gateway_may_have_the_port(
    base: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_on(taken, "t", monkeypatch)
    assert start(run(base, port=taken), base)["fits"]
    assert doctor._port(taken).found == f"our own gateway listens on {taken}"


def test_another_port_than_that_of_the_gateway_is_refused_before_training(
    base: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = gateway_on(taken, "moss", monkeypatch)
    before, other = state.read(places), free_port()
    with pytest.raises(RunFileError) as caught:
        start(run(base, name="fern", port=other), base)
    assert caught.value.message == (
        f"this run file asks for http://127.0.0.1:{other}, and the gateway serves moss at "
        f"http://127.0.0.1:{taken}"
    )
    assert state.read(places) == before
    # The only name takes the gateway along.
    assert start(run(base, name="moss", port=other), base)["fits"]
    assert state.read(places) == before


def test_an_address_that_needs_a_key_is_refused_without_one(base: Path) -> None:
    with pytest.raises(RunFileError, match=r"0\.0\.0\.0, which other machines can reach"):
        entrance.check_early(run(base, host="0.0.0.0", port=free_port()).serve)
    entrance.check_early(run(base, host="0.0.0.0", port=free_port(), api_key_env="K").serve)
    assert not (base.parent / "home").exists()
