"""Every deployment loads, refuses wrong run files, and one of them runs by a real worker."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.deployments.steps.core import StepExecutionError, run_steps
from prefect.flows import load_flow_from_entrypoint

from prefect_worker import ROOT, deploy, environment, finished, prefect, worker
from shim import executed, run_file
from tuneserve.errors import RunFileError
from tuneserve.runfile import load_run_file

FILE = yaml.safe_load((ROOT / "deploy" / "prefect.yaml").read_text())
DEPLOYMENTS = {entry["name"]: entry for entry in FILE["deployments"]}


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_deployments_are_those_that_the_docs_name() -> None:
    assert list(DEPLOYMENTS) == ["local", "nightly", "docker", "kubernetes"]
    PrefectYamlModel.model_validate(FILE)
    for entry in DEPLOYMENTS.values():
        assert set(entry) <= set(DeploymentConfig.model_fields), "a key that Prefect ignores"


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_loads_strictly(name: str, at_root: None) -> None:
    entry = DEPLOYMENTS[name]
    flow = load_flow_from_entrypoint(entry["entrypoint"], use_placeholder_flow=False)
    assert flow.name == "finetune-to-serve"
    given = flow.validate_parameters(entry["parameters"])
    run = load_run_file(ROOT / given["run_file"])
    assert all(Path(path).is_file() for path in run.data.train + run.data.eval)
    (step,) = entry["build"]
    assert step["tuneserve.runfile.check_run_file"] == {"run_file": given["run_file"]}
    assert entry["enforce_parameter_schema"] is True
    # Prefect ends a run whose lease a restarted server forgot, and keeps the slot: nothing starts
    # any more. tasks/alone.py has one run per served name, and frees what nobody holds.
    assert "concurrency_limit" not in entry


def test_the_nightly_schedule_has_a_time_zone() -> None:
    from zoneinfo import ZoneInfo

    from prefect.client.schemas.schedules import construct_schedule

    (schedule,) = DEPLOYMENTS["nightly"]["schedules"]
    made = construct_schedule(cron=schedule["cron"], timezone=schedule["timezone"])
    assert str(ZoneInfo(made.timezone)) == "Europe/Berlin"


def test_the_nightly_schedule_makes_runs(prefect_server: str, tmp_path: Path) -> None:
    """Prefect's scheduler writes them in bulk, which not every SQLAlchemy does that it takes: with
    2.1 it failed every minute, and no night had its run."""
    env = environment(prefect_server, tmp_path)
    deploy(env, "nightly")
    with get_client(sync_client=True) as client:
        made = client.read_deployment_by_name("finetune-to-serve/nightly")
        span = {"start_time": "2027-01-15T12:00:00Z", "min_runs": 2, "max_runs": 2}
        asked = client._client.post(f"/deployments/{made.id}/schedule", json=span)
        assert asked.status_code == 200
        runs = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[made.id])),
            flow_run_filter=FlowRunFilter(
                expected_start_time=FlowRunFilterExpectedStartTime(
                    after_=datetime(2027, 1, 15, 12, tzinfo=UTC),
                    before_=datetime(2027, 1, 18, tzinfo=UTC),
                )
            ),
        )
    times = sorted(str(run.expected_start_time)[:16] for run in runs)
    assert times == ["2027-01-16 01:00", "2027-01-17 01:00"]  # UTC; in Berlin it is two o'clock
    assert all(run.state is not None and run.state.is_scheduled() for run in runs)


def test_a_wrong_run_file_is_refused_when_it_is_deployed(tmp_path: Path, at_root: None) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: Nightly!\nmodel: {base: org/name}\ndata: {train: d, epochs: 3}\n")
    steps = [{"tuneserve.runfile.check_run_file": {"run_file": str(wrong)}}]
    with pytest.raises(StepExecutionError) as caught:
        asyncio.run(run_steps(steps))
    assert isinstance(caught.value.__cause__, RunFileError)
    assert "name: " in str(caught.value.__cause__)
    assert "data.epochs: there is no such field" in str(caught.value.__cause__)


def test_the_run_is_a_form_with_every_field_described(at_root: None) -> None:
    flow = load_flow_from_entrypoint(DEPLOYMENTS["local"]["entrypoint"], use_placeholder_flow=False)
    schema = flow.parameters.model_dump()
    assert set(schema["properties"]) == {"run_file", "run", "force"}
    assert all(field.get("description") for field in schema["properties"].values())
    sections = schema["definitions"]
    assert {"RunFile", "DataSection", "BudgetSection", "NotifySection"} <= set(sections)
    undescribed = [
        f"{name}.{field}"
        for name, section in sections.items()
        for field, about in section.get("properties", {}).items()
        if not about.get("description")
    ]
    assert undescribed == []


def test_no_secret_has_a_place_in_parameters(at_root: None) -> None:
    flow = load_flow_from_entrypoint(DEPLOYMENTS["local"]["entrypoint"], use_placeholder_flow=False)
    fields = re.findall(r'"(\w*(?:key|token|secret|password|url)\w*)"', json.dumps(
        [list(s.get("properties", {})) for s in flow.parameters.definitions.values()]
    ))  # fmt: skip
    named = {"tls_key"}  # the path of a file: what it holds never gets here
    assert [n for n in fields if not n.endswith(("_env", "tokens")) and n not in named] == []


def shim_run(folder: Path, base: Path, **changes: Any) -> str:
    run = run_file(folder, model={"base": str(base)}, merge={"base": "original"}, **changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    return str(path)


@pytest.mark.full  # test_faults.py has a run by hand in the shorter tier
def test_a_worker_runs_the_deployment(
    prefect_server: str, tmp_path: Path, pico_model: Path
) -> None:
    path = shim_run(tmp_path, pico_model, name="by-worker")
    env = environment(prefect_server, tmp_path)
    deploy(env)
    with worker(env, tmp_path):
        said = prefect(
            env, "deployment", "run", "finetune-to-serve/local", "-p", f"run_file={path}"
        )
        found = re.search(r"UUID: ([0-9a-f-]{36})", said)
        assert found is not None, said
        run = finished(found[1])
    assert run.state is not None and run.state.is_completed(), (tmp_path / "worker.log").read_text()
    assert executed(tmp_path)[-1] == "release"
    dataset = next(p.name for p in (tmp_path / "store").glob("dataset-*"))
    assert run.name == f"by-worker {pico_model.name} {dataset}"
    assert run.parameters == {"run_file": path}


@pytest.mark.full
def test_pools_of_containers_and_clusters_take_their_deployments(
    prefect_server: str, tmp_path: Path
) -> None:
    env = environment(prefect_server, tmp_path)
    template = ["--base-job-template", "deploy/k8s/base-job-template.json"]
    prefect(env, "work-pool", "create", "--type", "docker", "docker")
    prefect(env, "work-pool", "create", "--type", "kubernetes", *template, "kubernetes")
    names = ["--name", "docker", "--name", "kubernetes"]
    prefect(env, "--no-prompt", "deploy", "--prefect-file", "deploy/prefect.yaml", *names)
    with get_client(sync_client=True) as client:
        made = client.read_deployment_by_name("finetune-to-serve/kubernetes")
        assert made.enforce_parameter_schema and made.pull_steps
        assert made.parameters == {"run_file": "deploy/runs/demo.yaml"}
        pool = client.read_work_pool("kubernetes")
    job = pool.base_job_template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert job["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
