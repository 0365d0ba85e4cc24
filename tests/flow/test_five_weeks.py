"""Five weeks of a schedule, by the deployed flow: real data checks, store, records and release
state; the stages in between are stand-ins that say how good the model is.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun

from pico import COLOURS, THINGS
from prefect_worker import deploy, environment, finished, start_run, worker
from shim import Webhook, executed, healthy_server, interpreter
from tuneserve.artifacts import Store
from tuneserve.compare import difference
from tuneserve.release import state
from tuneserve.release.layout import layout
from tuneserve.runs import Runs

pytestmark = pytest.mark.full


def chats(first: int, count: int) -> list[dict[str, Any]]:
    pairs = [(thing, colour) for thing in THINGS for colour in COLOURS]
    return [
        {
            "messages": [
                {"role": "user", "content": f"What colour is the {thing} number {number}?"},
                {"role": "assistant", "content": f"The {thing} is {colour}."},
            ]
        }
        for number, (thing, colour) in enumerate(
            (pairs * 3)[first : first + count], start=first
        )
    ]  # fmt: skip


class House:
    def __init__(self, folder: Path, base: Path, env: dict[str, str], hook: Webhook) -> None:
        self.folder, self.env, self.hook = folder, env, hook
        self.inbox = folder / "inbox"
        self.inbox.mkdir()
        self.deliver("eval", chats(150, 40), to=folder)
        python = {"python": interpreter(folder)}
        stages = ("train", "evaluate", "merge", "quantize", "serve")
        self.run: dict[str, Any] = {
            "name": "weekly",
            "model": {"base": str(base)},
            "data": {"train": str(self.inbox), "eval": str(folder / "eval.jsonl")},
            "merge": {"base": "original"},
            "serve": {"name": "support"},
            "engines": dict.fromkeys(stages, python),
            "store": {"root": str(folder / "store")},
            "budget": {"max_seconds": 600, "price_per_gpu_hour": 2.0},
            "notify": {"url_env": "TUNESERVE_TEST_HOOK"},
        }
        self.run_file = folder / "run.yaml"

    def deliver(self, name: str, rows: list[Any], to: Path | None = None) -> Path:
        path = (to or self.inbox) / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def week(
        self, model: str, *, max_seconds: float = 600, **stages: str
    ) -> tuple[FlowRun, list[str]]:
        """Run the deployment; how it ended, and the stages that a model was made with."""
        (self.folder / "behave.json").write_text(json.dumps({"release": model, **stages}))
        self.run["budget"]["max_seconds"] = max_seconds
        self.run_file.write_text(yaml.safe_dump(self.run))
        before = len(executed(self.folder))
        ended = finished(start_run(run_file=str(self.run_file)))
        return ended, executed(self.folder)[before:]

    def state(self, run: FlowRun) -> str:
        assert run.state is not None
        log = (self.folder / "worker.log").read_text()[-3000:]
        return f"{run.state.type.value} {run.state.name}" + (log if run.state.is_crashed() else "")

    @property
    def champion(self) -> str | None:
        return state.read(layout()).names["support"].active


@pytest.fixture
def house(
    prefect_server: str, tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[House]:
    hook = Webhook()
    env = {**environment(prefect_server, tmp_path), "TUNESERVE_TEST_HOOK": hook.url}
    monkeypatch.setenv("TUNESERVE_HOME", env["TUNESERVE_HOME"])
    deploy(env)
    with worker(env, tmp_path):
        yield House(tmp_path, pico_model, env, hook)
    hook.close()


MAKING = ["train", "merge", "evaluate", "quantize:gptq", "release"]


def test_five_weeks_without_a_person(house: House) -> None:
    # Week 1: the first delivery.
    house.deliver("week1", chats(0, 60))
    run, made = house.week("promote")
    assert house.state(run) == "COMPLETED Completed" and made == MAKING
    first = house.champion
    assert first is not None
    with healthy_server(first):
        # Week 2: a delivery of which half is broken. It is set aside, nothing is trained.
        half = [*chats(60, 10), *({"messages": [{"role": "oracle", "content": "?"}]},) * 10]
        broken = house.deliver("week2", half)
        run, made = house.week("promote")
        assert house.state(run).startswith("FAILED") and made == []
        assert house.champion == first
        said = house.hook.heard[-1]
        assert said["event"] == "failed" and said["stage"] == "validate"
        # Every rejected row is kept where the message says, with its line and why.
        saved = re.search(r"all rejected rows: (\S+)", said["error"])
        assert saved is not None
        rows = [json.loads(line) for line in Path(saved[1]).read_text().splitlines()]
        lines = [row["source"].rpartition(":")[0] for row in rows]
        assert lines == [f"inbox/week2.jsonl:{number}" for number in range(11, 21)]
        assert {row["code"] for row in rows} == {"unknown_role"}

        # Week 3: the delivery was withdrawn, and nothing else came.
        broken.unlink()
        run, made = house.week("promote")
        assert house.state(run) == "COMPLETED Nothing to do" and made == []
        assert run.total_run_time.total_seconds() < 20
        assert house.champion == first

        # A budget that the next delivery exceeds: the stage is ended, what serves goes on.
        late = house.deliver("late", chats(100, 5))
        run, made = house.week("promote", train="hang alone", max_seconds=25)
        assert house.state(run).startswith("FAILED") and made[:1] == ["train"][: len(made)]
        assert house.champion == first
        said = house.hook.heard[-1]
        assert said["event"] == "failed" and "the run's budget was used up" in said["error"]
        late.unlink()

        # Week 4: more data, and a model that is worse.
        house.deliver("week4", chats(60, 20))
        run, made = house.week("worse")
        assert house.state(run).startswith("FAILED") and made == MAKING
        assert house.champion == first
        said = house.hook.heard[-1]
        assert said["event"] == "refused" and said["gates"][0]["passed"] is False

        # The next night nothing is new: the refusal stands, and is not told a second time.
        run, made = house.week("promote")
        assert house.state(run).startswith("FAILED") and made == []
        assert run.state is not None and "whose model was refused" in str(run.state.message)
        assert f"{first} serves" in str(run.state.message) and house.champion == first

        # Week 5: more data, and a model that is better.
        house.deliver("week5", chats(80, 20))
        run, made = house.week("promote")
    assert house.state(run) == "COMPLETED Completed" and made == MAKING
    second = house.champion
    assert second != first

    assert [said["event"] for said in house.hook.heard] == [
        "promoted", "failed", "failed", "refused", "promoted",
    ]  # fmt: skip
    assert [record.state for record in Runs().all()] == [
        "promoted", "failed", "unchanged", "failed", "refused", "still refused", "promoted",
    ]  # fmt: skip
    changed = difference(Store(house.folder / "store"), first, str(second))
    assert changed["data"]["train"] == {
        **changed["data"]["train"], "before": 60, "after": 100, "added": 40, "removed": 0,
    }  # fmt: skip
    assert set(changed["files"]) == {
        str(house.inbox / "week4.jsonl"), str(house.inbox / "week5.jsonl"),
    }  # fmt: skip
    known = state.read(layout())
    shutil.rmtree(layout().sockets, ignore_errors=True)
    assert [item["release"] for item in known.names["support"].history] == [first]
