"""The flow behind ``prefect deployment run finetune-to-serve/local``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.states import Completed

from tasks.alone import alone, mark_crashed
from tasks.embedded import server_ends_with_us
from tasks.evaluate import evaluate
from tasks.fetch import fetch
from tasks.logs import outlive_the_reader, say_errors_once, shown_in
from tasks.merge import merge
from tasks.pages import quietly, show_run
from tasks.plan import plan
from tasks.quantize import quantize
from tasks.release import release
from tasks.train import train
from tasks.validate import validate
from tuneserve.calls import StageCall, StageResult
from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.retrain import retrain
from tuneserve.runfile import load_run_file

_TASKS: dict[str, Callable[..., Any]] = {
    task.name: task for task in (fetch, validate, plan, train, merge, evaluate, quantize, release)
}


def _run_name() -> str:
    given = runtime.flow_run.parameters
    run = given.get("run")
    name = (run["name"] if isinstance(run, dict) else run.name) if run else None
    return f"{name or Path(given['run_file']).stem}-{runtime.flow_run.id[:8]}"


@flow(name="finetune-to-serve", flow_run_name=_run_name)
def finetune_to_serve(
    run_file: str | None = None, run: RunFile | None = None, force: bool = False
) -> dict[str, Any]:
    """Fine-tune, merge, quantize, prove and serve what the run file describes.

    Args:
        run_file: Path of the run file, as the worker sees it.
        run: The run itself, field by field, instead of a run file; relative paths are taken from
            the worker's folder. Secrets are named by their environment variable, never given.
        force: Run also when nothing changed since the last time.
    """
    say_errors_once()
    if run is None:
        if not run_file:
            raise RunFileError(
                "neither run_file nor run is given",
                expected="one of the two",
                hint="give one of them",
            )
        run = load_run_file(Path(run_file))
    id = str(runtime.flow_run.id)
    results: list[StageResult] = []

    def execute(call: StageCall) -> StageResult:
        state = _TASKS[call.stage](call.to_json(), return_state=True)
        results.append(StageResult(**state.result()))
        if call.stage == "validate":
            _rename(id, call, results[-1])
        return results[-1]

    outlive_the_reader()
    with server_ends_with_us(), shown_in(get_run_logger()):
        try:
            found = retrain(
                run,
                execute,
                run_id=id,
                force=force,
                link=runtime.flow_run.ui_url or "",
                within=alone(run, id),
                on_stale=mark_crashed,
            )
        finally:
            show_run(run.name, results)
    unchanged = found.outcome == "unchanged"
    # Prefect hands a state's data to the caller.
    return Completed(  # type: ignore[return-value]
        name="Nothing to do" if unchanged else "Completed",
        message=found.note or f"{found.model}: {found.release} serves at {found.endpoint}",
        data=found.to_json(),
    )


def _rename(flow_run_id: str, call: StageCall, dataset: StageResult) -> None:
    """Say which model and which data a run is about, as soon as it is known."""
    model = Path(call.run.model.base.rpartition(":")[2]).name
    with quietly("the run's name"), get_client(sync_client=True) as client:
        client.update_flow_run(
            flow_run_id=flow_run_id,  # type: ignore[arg-type]
            name=f"{call.run.name} {model} {dataset.artifact}",
        )
