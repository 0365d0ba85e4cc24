"""The job that a launcher leaves for its ranks: a stage's context as JSON, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuneserve.artifacts import Artifact
from tuneserve.config import RunFile
from tuneserve.stages import StageContext


def job_of(context: StageContext, **facts: Any) -> dict[str, Any]:
    """What `context_of` reads again, beside the facts of this launch."""
    return {
        "run": context.run.model_dump(mode="json"),
        "base": str(context.base),
        "inputs": {
            kind: [artifact.id, str(artifact.path)] for kind, artifact in context.inputs.items()
        },
        "out": str(context.out),
        "work": str(context.work),
        "settings": dict(context.settings),
        "hints": dict(context.hints),
        **facts,
    }


def context_of(job: dict[str, Any]) -> StageContext:
    """The context that `job_of` wrote down."""
    inputs = {kind: Artifact(id, Path(path), {}) for kind, (id, path) in job["inputs"].items()}
    return StageContext(
        RunFile.model_validate(job["run"]),
        Path(job["base"]),
        inputs,
        Path(job["out"]),
        Path(job["work"]),
        job["settings"],
        job["hints"],
    )
