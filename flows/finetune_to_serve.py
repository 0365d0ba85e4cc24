"""The flow behind ``prefect deployment run finetune-to-serve/local``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, runtime

from tasks.evaluate import evaluate
from tasks.fetch import fetch
from tasks.merge import merge
from tasks.plan import plan
from tasks.quantize import quantize
from tasks.release import release
from tasks.train import train
from tasks.validate import validate
from tuneserve.pipeline import finetune_to_serve as run_pipeline
from tuneserve.process import StageCall, StageResult
from tuneserve.runfile import load_run_file

_TASKS: dict[str, Callable[..., Any]] = {
    task.name: task for task in (fetch, validate, plan, train, merge, evaluate, quantize, release)
}


def _run_name() -> str:
    return f"{Path(runtime.flow_run.parameters['run_file']).stem}-{runtime.flow_run.id[:8]}"


def _execute(call: StageCall) -> StageResult:
    state = _TASKS[call.stage](call.to_json(), return_state=True)
    return StageResult(**state.result())


@flow(name="finetune-to-serve", flow_run_name=_run_name)
def finetune_to_serve(run_file: str) -> dict[str, Any]:
    """Fine-tune, merge, quantize, prove and serve what the run file describes.

    Args:
        run_file: Path of the run file, as the worker sees it.
    """
    return run_pipeline(load_run_file(Path(run_file)), _execute).to_json()
