"""The order of the stages and the ladder of exports: from a run file to a promoted release.

Each stage is asked for through `execute`, so that the same order runs as plain child processes
(`tuneserve run`) and as retryable Prefect tasks (`flows/finetune_to_serve.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.calls import StageCall, StageResult
from tuneserve.config import RunFile
from tuneserve.ladder import Execute, check_held_out, release_best

log = logging.getLogger(__name__)


@dataclass
class PipelineResult:
    """What a run gave: the endpoint, and the artifact of every stage.

    `outcome` is ``promoted``, or ``unchanged`` where there was nothing to do; `note` says why. Then
    `release` is what the last run led to, and `serving` what answers, which a person may have
    chosen since.
    """

    endpoint: str
    model: str
    release: str
    artifacts: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    outcome: str = "promoted"
    note: str = ""
    serving: str = ""

    def __post_init__(self) -> None:
        self.serving = self.serving or self.release

    def to_json(self) -> dict[str, Any]:
        """As the `--json` output and Prefect carry it."""
        return dict(vars(self))


def finetune_to_serve(
    run: RunFile, execute: Execute, unchanged: Callable[[Path], PipelineResult | None]
) -> PipelineResult:
    """Validate, plan, train, merge, evaluate, then quantize and release down the ladder.

    Args:
        run: The run file.
        execute: Runs one stage.
        unchanged: Given the base's folder: the result at once, where nothing has to be done.

    Raises:
        TuneserveError: A stage failed; `GateRefused` when every rung of `quantize.methods` was
        refused, in which case what was serving goes on serving.
    """
    from tuneserve.release.rest import AtRest  # and with it all of serving

    with AtRest(run, execute) as at_rest:
        return _stages(run, at_rest.execute, unchanged)


def _stages(
    run: RunFile, execute: Execute, unchanged: Callable[[Path], PipelineResult | None]
) -> PipelineResult:
    base = Path(execute(StageCall("fetch", run)).metrics["path"])
    if (known := unchanged(base)) is not None:
        return known
    validated = execute(StageCall("validate", run, base))
    held_out = validated.metrics.get("eval_conversations", validated.metrics.get("eval_rows"))
    check_held_out(run, held_out)
    dataset = _id(validated)
    hints = execute(StageCall("plan", run, base, {"dataset": dataset})).metrics["hints"]
    adapter = _id(
        execute(StageCall("train", run, base, {"dataset": dataset}, hints=hints["train"]))
    )
    merged, evaluation = _merge_and_evaluate(run, base, dataset, adapter, execute)
    artifacts = {"dataset": dataset, "adapter": adapter, "merged": merged, "evaluation": evaluation}
    metrics = release_best(run, base, artifacts, execute, hints["release"])
    return PipelineResult(
        metrics["endpoint"], metrics["model"], metrics["release"], artifacts, metrics
    )


def _merge_and_evaluate(
    run: RunFile, base: Path, dataset: str, adapter: str, execute: Execute
) -> tuple[str, str]:
    """Merge as `merge.base` says; `auto` merges both ways and keeps the lower held-out loss."""
    ways: list[str] = ["original", "nf4"] if run.merge.base == "auto" else [run.merge.base]
    if run.train.method != "qlora":
        ways = ["original"]  # there is no second base to choose: training saw the 16-bit weights
    found: list[tuple[float, str, str]] = []
    for way in ways:
        inputs = {"adapter": adapter}
        merged = _id(execute(StageCall("merge", run, base, inputs, settings={"base_weights": way})))
        inputs = {"dataset": dataset, "adapter": adapter, "merged": merged}
        evaluation = execute(StageCall("evaluate", run, base, inputs))
        loss = evaluation.metrics["merged_loss"]
        said = "not measured" if loss is None else f"{loss:.4f}"
        log.info("merged onto the %s weights: held-out loss %s", way, said)
        # Without held-out rows there is nothing to choose by: the first way stays.
        found.append((math.inf if loss is None else loss, merged, _id(evaluation)))
    _, merged, evaluation_id = min(found, key=lambda entry: entry[0])
    return merged, evaluation_id


def _id(result: StageResult) -> str:
    assert result.artifact is not None
    return result.artifact
