"""The flow on a real Prefect server: order, retries, the cache, what the UI shows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter
from prefect.client.schemas.objects import State, TaskRun

from flows.finetune_to_serve import finetune_to_serve
from shim import executed, healthy_server, in_process, interpreter, requests, run_file
from tasks import stage as stage_tasks
from tuneserve.calls import StageCall, StageResult
from tuneserve.config import EnginesSection
from tuneserve.errors import (
    DataError,
    DiskFull,
    GateRefused,
    HubError,
    OutOfMemory,
    RunFileError,
    StageKilled,
)
from tuneserve.retrain import retrain
from tuneserve.runfile import load_run_file

ORDER = ["fetch", "validate", "plan", "train", "merge", "evaluate", "quantize:gptq", "release"]


def written(folder: Path, base: Path, **changes: Any) -> str:
    """A run file on disk whose stages behave as told."""
    run = run_file(folder, model={"base": str(base)}, merge={"base": "original"}, **changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    return str(path)


def flow_state(path: str) -> State[Any]:
    return finetune_to_serve(path, return_state=True)


def task_runs(state: State[Any]) -> list[TaskRun]:
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(
            flow_run_filter=FlowRunFilter.model_validate(
                {"id": {"any_": [state.state_details.flow_run_id]}}
            )
        )
    return sorted(found, key=lambda run: run.expected_start_time or run.created)


def test_the_stages_run_in_order_and_a_second_run_finds_everything(
    tmp_path: Path, pico_model: Path
) -> None:
    path = written(tmp_path, pico_model)
    first = finetune_to_serve(path)
    assert executed(tmp_path) == ORDER
    assert first["endpoint"].endswith("/v1") and first["release"] == "r1"
    assert sorted(first["artifacts"]) == [
        "adapter", "dataset", "evaluation", "merged", "quantized",
    ]  # fmt: skip
    state = flow_state(path)
    assert state.result()["artifacts"] == first["artifacts"]
    # Only the stages without an artifact ran again.
    assert executed(tmp_path)[len(ORDER) :] == ["fetch", "plan", "release"]
    names = {run.task_key.split("-")[0]: run.state_name for run in task_runs(state)}
    assert len(task_runs(state)) == len(ORDER)
    assert [run.state_name for run in task_runs(state)].count("Cached") == 5, names


def test_changed_data_is_seen_though_the_path_is_the_same(tmp_path: Path, pico_model: Path) -> None:
    path = written(tmp_path, pico_model)
    first = finetune_to_serve(path)
    (tmp_path / "data.jsonl").write_text('{"messages": [1]}\n')
    second = finetune_to_serve(path)
    assert executed(tmp_path)[len(ORDER) :] == ORDER
    assert all(first["artifacts"][k] != second["artifacts"][k] for k in first["artifacts"])


def test_a_data_error_is_never_tried_again(tmp_path: Path, pico_model: Path) -> None:
    path = written(tmp_path, pico_model)
    (tmp_path / "behave.json").write_text(json.dumps({"validate": "data error"}))
    with pytest.raises(DataError, match="data.jsonl:1:1"):
        finetune_to_serve(path)
    assert executed(tmp_path) == ["fetch", "validate"]
    assert [p for p in (tmp_path / "store").iterdir() if not p.name.startswith(".")] == []


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What Prefect logs as errors of tasks and flows, with tracebacks, as its handlers get it."""
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    loggers = [logging.getLogger(f"prefect.{name}") for name in ("task_runs", "flow_runs")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lines
    for logger in loggers:
        logger.removeHandler(handler)


def test_a_wrong_field_is_told_in_words_without_a_traceback(
    tmp_path: Path, logged: list[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: x\nmodel: {base: y}\ndata: {train: z}\ntrain: {epochs: many}\n")
    with pytest.raises(RunFileError) as caught:
        finetune_to_serve(str(path))
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None
    (line,) = logged
    assert line.startswith(
        f"Encountered exception during execution: {path}: 1 field is wrong\n"
        f"  {path}:4:9: train.epochs: "
    )
    assert "what to do: " in line and "Traceback" not in line and "ValidationError" not in line


def test_an_error_of_a_stage_is_logged_once(
    tmp_path: Path, pico_model: Path, logged: list[str]
) -> None:
    path = written(tmp_path, pico_model)
    (tmp_path / "behave.json").write_text(json.dumps({"validate": "data error"}))
    for _ in range(2):  # what was told of one run is not kept back in the next
        logged.clear()
        with pytest.raises(DataError):
            finetune_to_serve(path)
        (line,) = [line for line in logged if not line.startswith("Finished in state ")]
        assert line.endswith(": data.jsonl:1:1: found x\n  expected: y\n  what to do: mend it")


def test_what_can_pass_by_itself_is_tried_again(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    from flows import finetune_to_serve as module

    quick = stage_tasks.stage_task("fetch", retries=2, description="").with_options(
        retry_delay_seconds=0
    )
    monkeypatch.setitem(module._TASKS, "fetch", quick)
    path = written(tmp_path, pico_model)
    (tmp_path / "behave.json").write_text(json.dumps({"fetch": "hub error"}))
    with pytest.raises(HubError, match="did not answer"):
        finetune_to_serve(path)
    assert executed(tmp_path) == ["fetch"] * 3
    told = [line for line in logged if "\n  what to do: wait" in line]
    assert [line.partition(": ")[0] for line in told] == ["Task run failed with exception"]
    assert not any("Traceback" in line for line in logged)


@pytest.mark.parametrize("counted", [False, True])
def test_a_training_that_is_killed_twice_without_coming_further_is_not_tried_again(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Whoever killed it. Its limit in time is one of all attempts, Prefect's as well."""
    from flows import finetune_to_serve as module

    (tmp_path / "vmstat").write_text("oom_kill 3\n")
    monkeypatch.setattr("tuneserve.stops._PROC", tmp_path)
    quick = stage_tasks.stage_task("train", retries=2, description="").with_options(
        retry_delay_seconds=0
    )
    monkeypatch.setitem(module._TASKS, "train", quick)
    python = {"python": interpreter(tmp_path)}
    engines = {name: python for name in EnginesSection.model_fields}
    path = written(
        tmp_path, pico_model, engines={**engines, "train": {**python, "max_seconds": 600}}
    )
    does = "killed and counted" if counted else "killed"
    (tmp_path / "behave.json").write_text(json.dumps({"train": does}))
    with pytest.raises(OutOfMemory if counted else StageKilled) as caught:
        finetune_to_serve(path)
    assert caught.value.exit_status == (3 if counted else 1)
    assert executed(tmp_path)[3:] == ["train"] * 2
    first, second = requests(tmp_path)[3:]
    assert first["ends"] is not None and first["ends"] == second["ends"]
    assert not list((tmp_path / "store").glob("adapter-*"))


def test_a_refused_export_goes_down_the_ladder(tmp_path: Path, pico_model: Path) -> None:
    path = written(tmp_path, pico_model, quantize={"methods": ["gptq", "awq", "none"]})
    (tmp_path / "behave.json").write_text(json.dumps({"release": "refuse gptq"}))
    result = finetune_to_serve(path)
    assert executed(tmp_path)[6:] == ["quantize:gptq", "release", "quantize:awq", "release"]
    assert result["release"] == "r1"


def test_when_all_are_refused_the_run_and_the_ui_say_so(tmp_path: Path, pico_model: Path) -> None:
    path = written(tmp_path, pico_model, name="ui-refused", quantize={"methods": ["gptq", "none"]})
    (tmp_path / "behave.json").write_text(json.dumps({"release": "worse"}))
    with pytest.raises(GateRefused, match="every export of quantize.methods was refused") as caught:
        finetune_to_serve(path)
    assert caught.value.exit_status == 4
    assert caught.value.details["refused"] == ["served loss 2.5", "served loss 2.5"]
    assert executed(tmp_path)[6:] == ["quantize:gptq", "release", "release"]
    assert "# Release r9 is refused" in shown("ui-refused-release")
    (gate,) = json.loads(shown("ui-refused-release-gates"))
    assert (gate["gate"], gate["decision"], gate["found"]) == ("loss", "REFUSED", "2.5")
    assert shown("ui-refused-release-kl").startswith("data:image/png;base64,iVBORw0KGgo")


def shown(key: str) -> str:
    """What the UI has under a key."""
    with get_client(sync_client=True) as client:
        pages = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        )
    assert pages, key
    return str(pages[0].data)


def test_the_ui_shows_pages_tables_plots_progress_and_links(
    tmp_path: Path, pico_model: Path
) -> None:
    told = dict.fromkeys(("validate", "plan", "train", "release"), "show")
    (tmp_path / "behave.json").write_text(json.dumps(told))
    finetune_to_serve(written(tmp_path, pico_model, name="ui-pages"))

    def data(key: str) -> str:
        return shown(f"ui-pages-{key}")

    for stage in ("fetch", "validate", "train", "merge", "evaluate", "quantize", "release"):
        assert f"# {stage}" in data(stage)
    rejections = json.loads(data("validate-rejections"))
    assert rejections == [{"reason": "EMPTY", "rows": 1}, {"reason": "ROLE", "rows": 2}]
    (gate,) = json.loads(data("release-gates"))
    assert (gate["gate"], gate["found"], gate["wanted"]) == ("loss", "0.5", "below 1.0")
    assert json.loads(data("plan-planned"))[0]["planned peak"] == "1.0 GiB"
    rows = {row["stage"]: row for row in json.loads(data("planned-and-measured"))}
    assert rows["train"]["planned peak"] == "1.0 GiB" and rows["train"]["measured peak"]
    assert data("train-loss").startswith("data:image/png;base64,iVBORw0KGgo")
    assert float(data("train-progress")) == 100.0
    assert "http://127.0.0.1:1/v1/models" in data("endpoint")


def test_nothing_to_do_is_a_green_run_that_says_why(
    tmp_path: Path, pico_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, pico_model)
    (tmp_path / "behave.json").write_text(json.dumps({"release": "promote"}))
    first = finetune_to_serve(path)
    with healthy_server(first["release"]):
        state = flow_state(path)
    assert state.is_completed() and state.name == "Nothing to do"
    assert f"{first['release']} serves" in str(state.message)
    assert "nothing to do: nothing changed since run" in caplog.text
    assert state.result()["endpoint"] == first["endpoint"]
    assert executed(tmp_path)[len(ORDER) :] == ["fetch"]


def test_tasks_carry_small_values_and_prefect_caches_nothing(
    tmp_path: Path, pico_model: Path
) -> None:
    from flows.finetune_to_serve import _TASKS

    assert all(task.cache_policy == NO_CACHE for task in _TASKS.values())
    assert not any(task.persist_result for task in _TASKS.values())
    sizes: list[int] = []
    run = load_run_file(Path(written(tmp_path, pico_model)))

    def weighed(call: StageCall) -> StageResult:
        result = in_process(call)
        sizes.extend(len(json.dumps(part.to_json())) for part in (call, result))
        return result

    retrain(run, weighed)
    assert len(sizes) == 2 * len(ORDER) and max(sizes) < 16_000


def test_a_full_disk_is_named_and_not_tried_again(tmp_path: Path, pico_model: Path) -> None:
    path = written(tmp_path, pico_model)
    (tmp_path / "behave.json").write_text(json.dumps({"validate": "disk full"}))
    with pytest.raises(DiskFull, match="the disk is full"):
        finetune_to_serve(path)
    assert executed(tmp_path) == ["fetch", "validate"]
    assert [p for p in (tmp_path / "store").iterdir() if not p.name.startswith(".")] == []


def test_every_task_belongs_to_a_stage() -> None:
    from flows.finetune_to_serve import _TASKS
    from tuneserve.stages import STAGES

    assert set(_TASKS) == set(STAGES)
