"""What every stage's task shares: run the child, show it in Prefect's UI, know what to retry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed
from prefect.tasks import Task

from tuneserve.errors import TuneserveError
from tuneserve.process import StageCall, StageResult, run_stage
from tuneserve.progress import human_bytes, human_seconds

# What passes by itself (a hub that does not answer, a killed process) passes within minutes.
_RETRY_DELAYS_SECONDS: list[float] = [10, 60, 300]


async def can_pass_by_itself(_: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether the same call may succeed later: never for data, config, model or gate errors."""
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, TuneserveError) and error.retryable


def stage_task(name: str, *, retries: int, description: str) -> Task[..., Any]:
    """The task of one stage; `retries` counts only failures that can pass by themselves."""
    return task(
        name=name,
        description=description,
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
    result = run_stage(asked, log_line=logger.info)
    if result.metrics.get("table"):
        logger.info("\n%s", result.metrics["table"])
    how = "re-used" if result.cached else f"made in {human_seconds(result.seconds)}"
    logger.info("%s: %s", result.artifact or asked.stage, how if result.artifact else "done")
    create_markdown_artifact(
        key=re.sub(r"[^a-z0-9-]+", "-", f"{asked.run.name}-{asked.stage}".lower()),
        markdown=summary(result),
        description=f"{asked.stage} of {asked.run.name}",
    )
    return Completed(name="Cached" if result.cached else "Completed", data=result.to_json())


def summary(result: StageResult) -> str:
    """A stage's result as Markdown: its report when it wrote one, and its numbers."""
    lines = [f"# {result.stage}", ""]
    if result.artifact:
        lines += [f"`{result.artifact}` ({'re-used' if result.cached else 'made now'})", ""]
    for name in ("report", "table"):
        text = result.metrics.get(name)
        if text:
            lines += [text if name == "report" else f"```\n{text}\n```", ""]
    numbers = {k: v for k, v in result.metrics.items() if isinstance(v, int | float | str)}
    rows = [
        f"| {name.replace('_', ' ')} | {_value(name, value)} |"
        for name, value in numbers.items()
        if name not in ("report", "table")
    ]
    if rows:
        lines += ["| measured | |", "|---|---|", *rows]
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return human_bytes(value)
    if name.endswith("seconds") and isinstance(value, int | float):
        return human_seconds(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
