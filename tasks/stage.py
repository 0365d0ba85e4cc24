"""What every stage's task shares: run the child, show it in Prefect's UI, know what to retry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed
from prefect.tasks import Task

from tasks.pages import show_refusal, show_stage, watch_progress
from tuneserve.calls import StageCall
from tuneserve.errors import GateRefused, TuneserveError
from tuneserve.process import run_stage
from tuneserve.progress import human_seconds

# What passes by itself (a hub that does not answer, a killed process) passes within minutes.
_RETRY_DELAYS_SECONDS: list[float] = [10, 60, 300]


async def can_pass_by_itself(_: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether the same call may succeed later: never for data, config, model or gate errors, nor
    for a training that is killed again and again without coming further.
    """
    error = await state.aresult(raise_on_failure=False)
    if not isinstance(error, TuneserveError) or not error.retryable:
        return False
    return bool(error.details.get("may_pass", True))


def _task_run_name() -> str:
    call = runtime.task_run.parameters["call"]
    return " ".join([call["stage"], *map(str, call["settings"].values())])


def stage_task(name: str, *, retries: int, description: str) -> Task[..., Any]:
    """The task of one stage; `retries` counts only failures that can pass by themselves."""
    return task(
        name=name,
        description=description,
        task_run_name=_task_run_name,
        retries=retries,
        retry_delay_seconds=_RETRY_DELAYS_SECONDS[:retries],
        retry_condition_fn=can_pass_by_itself,
        cache_policy=NO_CACHE,
    )(perform)


def perform(call: Mapping[str, Any]) -> State[dict[str, Any]]:
    """Run one stage; the state is named Cached when the artifact store had it already.

    The store is the only cache: it re-checks an artifact's files on a hit; Prefect's does not.
    """
    logger = get_run_logger()
    asked = StageCall.from_json(call)
    try:
        result = run_stage(asked, log_line=watch_progress(asked, logger.info))
    except GateRefused as error:  # of all reports this is the one that people come to read
        show_refusal(asked, error)
        raise
    if result.metrics.get("table"):
        logger.info("\n%s", result.metrics["table"])
    how = "re-used" if result.cached else f"made in {human_seconds(result.seconds)}"
    logger.info("%s: %s", result.artifact or asked.stage, how if result.artifact else "done")
    show_stage(asked, result)
    return Completed(name="Cached" if result.cached else "Completed", data=result.to_json())
