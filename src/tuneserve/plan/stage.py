"""The `plan` stage: refuse what cannot fit before anything is spent."""

from __future__ import annotations

import logging
from typing import Any

from tuneserve.checkpoint.base import peek_base
from tuneserve.config import RunFile
from tuneserve.doctor import torch_finding
from tuneserve.errors import DiskFull, OutOfMemory, ResourceError
from tuneserve.plan.asjson import as_json
from tuneserve.plan.build import plan_for
from tuneserve.plan.machine import Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.rows import data_shape
from tuneserve.plan.stageplan import StagePlan
from tuneserve.progress import human_bytes
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)


def run(context: StageContext) -> dict[str, Any]:
    """Plan the run; the metrics are what `plan --json` prints.

    Raises:
        RunFileError: The run would fail later for reasons that show already.
        PortTaken: Somebody else listens where the gateway should.
        ResourceError: There is a card, and a torch that cannot use it.
        OutOfMemory: A stage cannot fit into memory; the hint says what to change.
        DiskFull: The artifacts would not fit on the store's disk.
    """
    dataset = context.inputs.get("dataset")
    plan = plan_for(
        context.run,
        base_dir=context.base or peek_base(context.run.model),
        data=data_shape(dataset.path, dataset.id) if dataset else None,
    )
    for warning in plan.warnings:
        log.warning("%s", warning)
    if found := card_left_idle(context.run, plan.machine):
        raise found
    refuse(plan)
    if context.hints.get("serves", True):
        from tuneserve.release.entrance import check_early

        check_early(context.run.serve)
    return as_json(plan)


def card_left_idle(run: RunFile, machine: Machine) -> ResourceError | None:
    """What is wrong where a card is there and a CPU build of torch would train beside it.

    Whoever wants the CPU hides the card (an empty CUDA_VISIBLE_DEVICES); whoever names another
    interpreter for a stage knows what is in it.
    """
    elsewhere = any(getattr(run.engines, name).python for name in type(run.engines).model_fields)
    if machine.gpu is None or machine.supposed or elsewhere:
        return None
    finding = torch_finding(machine.gpu)
    if finding.state != "fail":
        return None
    return ResourceError(
        f"torch {finding.found}: the run would train and serve on the CPU",
        expected="a torch that is built for CUDA",
        hint=f"{finding.what_to_do}; to stay on the CPU: `export CUDA_VISIBLE_DEVICES=` "
        "(before `prefect worker start`, for scheduled runs)",
    )


def refuse(plan: Plan) -> None:
    """Raise when something does not fit; the message names every stage, needed and available."""
    small = [stage for stage in plan.stages.values() if not stage.fits]
    lines = [
        f"{stage.name} needs {human_bytes(needed)} of "
        f"{'GPU memory' if where == 'GPU' else 'memory'}, {human_bytes(room)} can be had"
        for stage in small
        for where, needed, room in stage.short
    ]
    kind: type[ResourceError] = OutOfMemory
    if not plan.disk_fits:
        kind = OutOfMemory if small else DiskFull
        lines.append(
            f"the artifacts need {human_bytes(plan.disk_bytes)} in {plan.machine.disk_path}, "
            f"{human_bytes(plan.machine.disk_free_bytes)} are free"
        )
    if not lines:
        return
    raise kind(
        f"this run does not fit on {plan.machine.device}:\n  " + "\n  ".join(lines),
        hint=_hint(plan, [stage.name for stage in small]),
        details={
            "stages": {stage.name: stage.to_json() for stage in small},
            "disk_bytes": plan.disk_bytes,
            "disk_free_bytes": plan.machine.disk_free_bytes,
            "advice": [{**vars(advice), "text": str(advice)} for advice in plan.advice],
        },
    )


def _hint(plan: Plan, stages: list[str]) -> str:
    several = len({advice.stage for advice in plan.advice}) > 1
    hints = [
        f"{number}. {f'for {advice.stage}, ' if several else ''}{advice}"
        for number, advice in enumerate(plan.advice, 1)
    ]
    beside = _short_of_memory(plan)
    if any("pinned: checkpoints" in stage.host.components for stage in beside):
        hints.append("lower train.micro_batch, or set train.gradient_checkpointing: true")
    elif beside:
        hints.append("free memory of the host, beside the GPU's")
    if "merge" in stages:
        hints.append("free memory for the merge")
    if not plan.disk_fits:
        hints.append("free some space, or set store.root to another disk")
    return "one of these, mildest first:\n    " + "\n    ".join(hints)


def _short_of_memory(plan: Plan) -> list[StagePlan]:
    """Stages beside a GPU for which the host's memory does not do."""
    return [
        stage
        for stage in plan.stages.values()
        if stage.host.components and any(where == "RAM" for where, *_ in stage.short)
    ]
