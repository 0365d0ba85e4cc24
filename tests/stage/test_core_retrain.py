"""Runs that nobody watches: what is repeated, what it may cost, who hears."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shim import Webhook, executed, healthy_server, in_process, run_file
from tuneserve.calls import StageCall, StageResult
from tuneserve.config import RunFile
from tuneserve.errors import (
    BudgetSpent,
    DataError,
    DeviceBusy,
    DiskFull,
    GateRefused,
    RunFileError,
    ServiceError,
    StageTimeout,
)
from tuneserve.notify import notify
from tuneserve.pipeline import PipelineResult
from tuneserve.process import run_stage
from tuneserve.release import state
from tuneserve.release.layout import layout
from tuneserve.retrain import retrain
from tuneserve.runlock import hold
from tuneserve.runs import RunRecord, Runs

ORDER = ["fetch", "validate", "plan", "train", "merge", "evaluate", "quantize:gptq", "release"]


class House:
    """A run file with shim stages, a webhook, and what the stages are told."""

    def __init__(self, folder: Path, base: Path, hook: Webhook) -> None:
        self.folder, self.base, self.hook = folder, base, hook
        self.tell(release="promote")

    def tell(self, **stages: str) -> None:
        (self.folder / "behave.json").write_text(json.dumps(stages))

    def run_file(self, **changes: Any) -> RunFile:
        everything = ["promoted", "refused", "failed", "unchanged"]
        return run_file(
            self.folder,
            **{
                "model": {"base": str(self.base)},
                "merge": {"base": "original"},
                "notify": {"url_env": "TUNESERVE_TEST_HOOK", "events": everything},
                **changes,
            },
        )

    def run_in_children(self, **changes: Any) -> PipelineResult:
        return retrain(self.run_file(**changes), execute)

    def run(self, *, force: bool = False, **changes: Any) -> PipelineResult:
        return retrain(self.run_file(**changes), in_process, force=force)

    @property
    def events(self) -> list[str]:
        return [said["event"] for said in self.hook.heard]


def execute(call: StageCall) -> StageResult:
    return run_stage(call, log_line=lambda line: None)


@pytest.fixture
def house(tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    hook = Webhook()
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TUNESERVE_TEST_HOOK", hook.url)
    monkeypatch.setattr("tuneserve.notify._FIRST_PAUSE_SECONDS", 0.01)
    yield House(tmp_path, pico_model, hook)
    hook.close()


def test_nothing_new_is_nothing_to_do_in_seconds(house: House) -> None:
    first = house.run()
    assert executed(house.folder) == ORDER and first.outcome == "promoted"
    with healthy_server(first.release):
        started = time.monotonic()
        again = house.run()
        assert time.monotonic() - started < 10
        assert again.outcome == "unchanged" and again.release == first.release
        assert f"{first.release} serves" in again.note and again.endpoint == first.endpoint
        assert executed(house.folder)[len(ORDER) :] == ["fetch"]
        assert house.events == ["promoted", "unchanged"]
        forced = house.run(force=True)
        assert forced.outcome == "unchanged" and "serves this model already" in forced.note
        assert executed(house.folder)[len(ORDER) + 1 :] == ["fetch", "plan", "release"]
        other_rank = house.run(train={"lora": {"r": 4}})  # another setting is something to do
        assert other_rank.outcome == "promoted"
        assert executed(house.folder)[-6:] == ["plan", *ORDER[3:]]


def test_a_dead_server_is_something_to_do(house: House) -> None:
    house.run()
    house.run()
    assert executed(house.folder)[len(ORDER) :] == ["fetch", "plan", "release"]


def test_new_data_is_something_to_do_and_what_it_does_not_touch_is_not(house: House) -> None:
    first = house.run()
    (house.folder / "data.jsonl").write_text('{"messages": [1]}\n')
    with healthy_server(first.release):
        second = house.run()
    assert second.outcome == "promoted" and second.release != first.release
    assert executed(house.folder)[len(ORDER) :] == ORDER
    run = house.run_file(quantize={"methods": ["none"]})
    retrain(run, in_process)
    assert executed(house.folder)[2 * len(ORDER) :] == ["fetch", "plan", "release"]


def test_what_somebody_rolled_back_is_not_promoted_again(house: House) -> None:
    first = house.run()
    (house.folder / "data.jsonl").write_text('{"messages": [1]}\n')
    second = house.run()
    with state.change(layout()) as known:
        known.names["default"].active = first.release
    again = house.run()
    assert again.outcome == "unchanged"
    assert (again.release, again.serving) == (second.release, first.release)
    assert f"{first.release} was put in place of {second.release}" in again.note
    assert state.read(layout()).names["default"].active == first.release


def test_a_refused_model_is_told_once_and_not_judged_again(house: House) -> None:
    champion = house.run()
    (house.folder / "data.jsonl").write_text('{"messages": [1]}\n')
    house.tell(release="worse")
    with pytest.raises(GateRefused, match=r"served loss 2\.5"):
        house.run()
    said = house.hook.heard[-1]
    assert said["event"] == "refused" and said["losses"] == {"base": 3.0, "served": 2.5}
    assert "loss: REFUSED (found 2.5, wanted below 1.0)" in said["text"]
    assert state.read(layout()).names["default"].active == champion.release
    before = len(executed(house.folder))
    for _ in range(2):
        with pytest.raises(
            GateRefused, match=r"nothing to do: .* whose model was refused"
        ) as again:
            house.run()
        assert "refused because: served loss 2.5" in again.value.message
        assert f"{champion.release} serves" in again.value.message
    assert executed(house.folder)[before:] == ["fetch", "fetch"]
    assert [record.state for record in Runs().all()] == [
        "promoted", "refused", "still refused", "still refused",
    ]  # fmt: skip
    refusal = Runs().all()[1].id
    assert again.value.details["refused_by"] == refusal  # not the run that repeated it
    assert house.events == ["promoted", "refused", "unchanged", "unchanged"]
    assert "whose model was refused" in house.hook.heard[-1]["text"]
    # Another threshold is another judgement.
    house.tell(release="promote")
    assert house.run(gates={"eval_rows": 65}).outcome == "promoted"


def test_a_run_that_found_no_place_is_told(house: House) -> None:
    busy = house.run_file(overlap={"when_busy": "refuse"})
    with hold(busy, "the-other", "2026-01-02T03:04:05"), pytest.raises(DeviceBusy):
        retrain(busy, in_process)
    (said,) = house.hook.heard
    assert said["event"] == "failed" and "held by run the-other" in said["text"]
    assert executed(house.folder) == [] and Runs().all() == []


def test_what_shows_at_once_is_refused_before_others_are_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*_: Any) -> Any:
        raise AssertionError("somebody is waited for")

    monkeypatch.setattr("tuneserve.retrain.hold", wait)
    nowhere = str(house.folder / "no" / "chats.jsonl")
    remote = "memory://bucket/chats.jsonl"  # is left to the stage that reads it
    lost = house.run_file(data={"train": [remote, nowhere]})
    keyless = house.run_file(serve={"api_key_env": "TUNESERVE_TEST_NO_SUCH_KEY"})
    with pytest.raises(DataError) as caught:
        retrain(lost, in_process)
    with pytest.raises(RunFileError, match="TUNESERVE_TEST_NO_SUCH_KEY, which is not set"):
        retrain(keyless, in_process)
    with pytest.raises(AssertionError):
        retrain(house.run_file(), in_process)
    assert caught.value.message == (
        "a data path matches nothing:\n"
        f"    data.train.1: {nowhere}: there is no such file or folder"
    )
    assert executed(house.folder) == []
    records = Runs().all()
    assert [(r.state, r.stage, bool(r.ended)) for r in records] == [("failed", None, True)] * 2
    assert nowhere in records[0].error and "what to do" in records[0].error
    assert house.events == ["failed"] * 3 and nowhere in house.hook.heard[0]["text"]
    assert list((house.folder / "home" / "runs").glob("*.lock")) == []


@pytest.mark.parametrize("where", ["within", "locks", "runs"])
def test_a_failure_around_the_run_is_told(house: House, where: str) -> None:
    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        raise RuntimeError("the server forgot us")
        yield

    within, home = None, house.folder / "home"
    home.mkdir()
    if where == "within":
        within = broken()
    else:
        (home / where).write_text("a file")
    with pytest.raises(Exception) as caught:
        retrain(house.run_file(), in_process, within=within, link="https://prefect/runs/1")
    (said,) = house.hook.heard
    assert said["event"] == said["state"] == "failed" and "failed during start" in said["text"]
    assert str(caught.value).splitlines()[0] in said["error"]
    assert said["link"] == "https://prefect/runs/1"
    assert executed(house.folder) == []


def test_a_secret_that_is_not_there_is_missed_before_anything_is_made(house: House) -> None:
    with pytest.raises(RunFileError, match="api_key_env names NO_SUCH_KEY, which is not set"):
        house.run(serve={"api_key_env": "NO_SUCH_KEY"})
    assert house.events == ["failed"] and "NO_SUCH_KEY" in house.hook.heard[0]["text"]
    assert executed(house.folder) == []
    (record,) = Runs().all()
    assert record.state == "failed" and record.artifacts == {}


def test_a_record_that_cannot_be_ended_is_told(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Runs.save

    def full(runs: Runs, record: RunRecord) -> None:
        if record.ended:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(runs, record)

    monkeypatch.setattr(Runs, "save", full)
    with pytest.raises(OSError, match="No space left"):
        house.run()
    assert house.events == ["promoted", "failed"]
    assert "No space left on device" in house.hook.heard[-1]["text"]


def test_a_killed_run_is_told_with_its_own_link(house: House) -> None:
    runs = Runs()
    runs.root.mkdir(parents=True)
    runs.save(RunRecord("run-1", "shim", "default", stage="train", link="https://prefect/runs/1"))
    runs.save(RunRecord("run-0", "shim", "default", stage="train"))
    retrain(house.run_file(), in_process, link="https://prefect/runs/2")
    links = {said["id"]: said.get("link") for said in house.hook.heard}
    assert len(links) == 3 and links["run-1"] == "https://prefect/runs/1"
    assert links["run-0"] is None and house.hook.heard[-1]["link"] == "https://prefect/runs/2"


def test_a_failure_is_told_with_its_stage_and_leaves_nothing(house: House) -> None:
    house.tell(validate="data error")
    with pytest.raises(DataError):
        house.run()
    (said,) = house.hook.heard
    assert said["event"] == "failed" and said["stage"] == "validate"
    assert "data.jsonl:1:1: found x" in said["text"] and "failed during validate" in said["text"]
    (record,) = Runs().all()
    assert record.state == "failed" and record.ended
    assert [p for p in (house.folder / "store").iterdir() if not p.name.startswith(".")] == []


@pytest.mark.parametrize("stage", ["train", "merge", "quantize"])
def test_a_full_disk_in_any_stage_is_told_and_what_was_finished_stays(
    house: House, stage: str
) -> None:
    house.tell(**{stage: "disk full", "release": "promote"})
    with pytest.raises(DiskFull, match="the disk is full") as caught:
        house.run_in_children()
    assert not caught.value.retryable
    store = house.folder / "store"
    before = sorted(p.name for p in store.iterdir() if not p.name.startswith("."))
    kinds = {"train": ["dataset"], "merge": ["adapter", "dataset"]}
    assert [p.partition("-")[0] for p in before] == kinds.get(
        stage, ["adapter", "dataset", "evaluation", "merged"]
    )
    assert not list((store / ".drafts").glob("*"))
    (said,) = house.hook.heard
    assert said["event"] == "failed" and said["stage"] == stage and "disk is full" in said["text"]
    house.tell(release="promote")
    done = len(executed(house.folder))
    house.run()
    assert executed(house.folder)[done:] == ["fetch", "plan", *ORDER[ORDER.index(
        "quantize:gptq" if stage == "quantize" else stage):]]  # fmt: skip


def test_the_notification_says_what_the_gates_found(house: House) -> None:
    result = house.run()
    (said,) = house.hook.heard
    assert said["event"] == "promoted" and said["release"] == result.release
    assert (
        said["gates"][0]["passed"] and "held-out loss: base 3.0000, served 0.5000" in said["text"]
    )
    assert said["artifacts"]["dataset"].startswith("dataset-")
    assert "loss: passed (found 0.5, wanted below 1.0)" in said["text"]


def test_a_command_hears_of_the_model_that_was_promoted(house: House) -> None:
    note = house.folder / "note"
    script = f'echo "$TUNESERVE_RELEASE $TUNESERVE_SERVED_NAME $TUNESERVE_MODEL_DIR" > {note}'
    result = house.run(notify={"promoted_command": ["/bin/sh", "-c", script]})
    model = house.folder / "store" / result.artifacts["quantized"]
    assert note.read_text() == f"{result.release} default {model}\n" and model.is_dir()


def test_a_command_that_fails_fails_the_run_and_is_tried_again(house: House) -> None:
    failing = {"promoted_command": ["/bin/sh", "-c", "echo no cluster; exit 3"]}
    with pytest.raises(ServiceError, match="serves, but .* ended with status 3: no cluster"):
        house.run(notify=failing)
    (record,) = Runs().all()
    serving = state.read(layout()).names["default"].active
    assert record.state == "failed" and record.release == serving
    made = len(executed(house.folder))
    events = ["promoted", "failed", "unchanged"]
    again = {"url_env": "TUNESERVE_TEST_HOOK", "events": events, "promoted_command": ["/bin/true"]}
    assert house.run(notify=again).outcome == "promoted"
    assert executed(house.folder)[made:] == ["fetch", "plan", "release"]
    (said,) = house.hook.heard  # the first run had no webhook to tell
    assert said["event"] == "promoted" and said["release"] == serving
    house.run(notify={**again, "promoted_command": ["/bin/false"]}, force=True)
    assert house.events == ["promoted", "unchanged"], "once is enough, for the command too"


def test_a_promotion_whose_run_was_killed_is_told_by_the_next(house: House) -> None:
    def killed(call: StageCall) -> StageResult:
        done = in_process(call)
        if call.stage == "release":
            raise SystemExit(128 + signal.SIGTERM)
        return done

    with pytest.raises(SystemExit):
        retrain(house.run_file(), killed)
    assert house.events == [] and [r.state for r in Runs().all()] == ["cancelled"]
    told = house.run()
    assert told.outcome == "promoted" and house.events == ["promoted"]
    assert house.hook.heard[0]["release"] == told.release
    assert house.run().outcome == "unchanged"
    assert [r.state for r in Runs().all()] == ["cancelled", "promoted", "confirmed"]


def test_what_a_failed_run_left_serving_is_not_taken_for_a_persons_choice(house: House) -> None:
    first = house.run()
    (house.folder / "data.jsonl").write_text('{"messages": [1]}\n')
    failing = {"promoted_command": ["/bin/false"]}
    with pytest.raises(ServiceError):
        house.run(notify=failing)
    second = state.read(layout()).names["default"].active
    assert second != first.release
    (house.folder / "data.jsonl").write_text('{"messages": []}\n')  # the delivery is withdrawn
    again = house.run()
    assert again.outcome == "promoted" and again.release == first.release
    assert state.read(layout()).names["default"].active == first.release
    with state.change(layout()) as known:  # a person chooses it, later
        known.names["default"].active = second
        known.names["default"].since = "2099-01-01T00:00:00+00:00"
    assert f"{second} was put in place of {first.release}" in house.run().note
    assert state.read(layout()).names["default"].active == second


@pytest.mark.parametrize(("status", "tries"), [(500, 3), (404, 1)])
def test_a_webhook_that_refuses_changes_nothing_and_its_address_stays_secret(
    house: House, status: int, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    house.hook.status = status
    with caplog.at_level(logging.INFO):
        assert house.run().outcome == "promoted"
    assert len(house.hook.heard) == tries
    assert f"did not take the notification: status {status}" in caplog.text
    assert "s3cret" not in caplog.text
    manifests = "".join(p.read_text() for p in house.folder.rglob("manifest.json"))
    assert "s3cret" not in manifests and "TUNESERVE_TEST_HOOK" in manifests


@pytest.mark.parametrize("status", [408, 425, 429, 503])
@pytest.mark.parametrize(
    ("asked", "paused"),
    [
        ("7", [7.0, 7.0]),
        ("Mon, 30 Nov 2026 06:00:09 GMT", [9.0, 9.0]),
        ("86400", [60.0, 60.0]),  # a run does not wait for a day
        ("Mon, 30 Nov 2026 05:00:00 GMT", [0.0, 0.0]),
        ("soon", [0.01, 0.02]),
    ],
)
def test_a_webhook_that_is_busy_is_asked_again_when_it_says(
    house: House, monkeypatch: pytest.MonkeyPatch, status: int, asked: str, paused: list[float]
) -> None:
    slept: list[float] = []
    at_six = 1796018400.0  # 2026-11-30 06:00:00 UTC
    clock = SimpleNamespace(time=lambda: at_six, sleep=slept.append)
    monkeypatch.setattr("tuneserve.notify.time", clock)
    house.hook.status, house.hook.headers = status, {"Retry-After": asked}
    section = house.run_file().notify
    assert notify(section, "unchanged", {"name": "a", "served": "b"}) is False
    assert slept == [0.0, *paused] and len(house.hook.heard) == 3


def test_a_budget_ends_the_stage_that_exceeds_it(house: House) -> None:
    house.tell(train="hang alone")
    with pytest.raises(BudgetSpent, match="used up in stage train") as caught:
        house.run_in_children(budget={"max_seconds": 5})
    assert "resumes at its last checkpoint" in caught.value.hint
    made = executed(house.folder)
    assert made in (ORDER[:3], ORDER[:4])  # on a busy machine the child had not begun
    (record,) = Runs().all()
    assert record.state == "failed" and record.stage == "train"
    house.tell(release="promote")  # what was finished is not done again
    house.run(budget={"max_seconds": 600})
    assert executed(house.folder)[len(made) :] == ["fetch", *ORDER[2:]]


def test_gpu_hours_count_every_card(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8")
    seen: list[float | None] = []

    def noting(call: StageCall) -> StageResult:
        seen.append(call.deadline)
        return in_process(call)

    before = time.time()
    retrain(house.run_file(budget={"max_gpu_hours": 0.5}), noting)
    assert seen[0] is not None and abs(seen[0] - before - 900) < 5  # half an hour over two cards
    assert set(seen) == {seen[0]}
    (record,) = Runs().all()
    assert record.gpus == 2 and record.seconds["train"] > 0


def test_the_limit_of_one_stage_is_not_the_budget(house: House) -> None:
    house.tell(train="hang alone")
    run = house.run_file(budget={"max_seconds": 600})
    engine = run.engines.train.model_copy(update={"max_seconds": 2})
    run = run.model_copy(update={"engines": run.engines.model_copy(update={"train": engine})})
    with pytest.raises(StageTimeout, match="longer than 2 s"):
        retrain(run, execute)


def test_the_limit_of_a_stage_begins_when_it_is_asked_for(house: House) -> None:
    """So an orchestrator that tries a call again gives it what is left."""
    house.tell(release="promote")
    seen: dict[str, float | None] = {}

    def noting(call: StageCall) -> StageResult:
        seen[call.stage] = call.ends
        return in_process(call)

    before = time.time()
    retrain(house.run_file(engines={"train": {"max_seconds": 900}}), noting)
    train = seen.pop("train")
    assert train is not None and before + 900 <= train <= time.time() + 900
    assert set(seen.values()) == {None}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_a_run_by_hand_is_told_how_it_goes_on(
    house: House, number: signal.Signals
) -> None:
    house.tell(plan="hang with a child")
    path = house.folder / "run.yaml"
    path.write_text(yaml.safe_dump(house.run_file().model_dump(mode="json")))
    command = [sys.executable, "-m", "tuneserve", "run", str(path)]
    asked = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert asked.stderr is not None
    hanging = house.folder / "hanging.json"
    while not hanging.exists():
        assert asked.poll() is None
        time.sleep(0.05)
    asked.send_signal(number)
    said = asked.stderr.read()
    assert asked.wait(30) == 128 + number
    assert said.endswith("plan | stopped; the same command goes on where it was\n")
    (record,) = Runs().all()
    assert record.state == "cancelled" and record.stage == "plan"
    assert house.hook.heard == []  # whoever stopped it knows
    for pid in json.loads(hanging.read_text()):  # killed; init may not have buried it yet
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            assert stat.rpartition(")")[2].split()[0] in "ZX"
