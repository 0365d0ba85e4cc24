"""The plan as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuneserve.progress import human_bytes, human_seconds, many

if TYPE_CHECKING:
    from tuneserve.plan.build import Plan, StagePlan

_COMPONENTS_SHOWN = 2


def table(plan: Plan) -> str:
    """Stages, their peaks and disk, the choices made, and what to do where one does not fit."""
    arch, machine = plan.arch, plan.machine
    lines = [
        f"{arch.architecture or arch.model_type}: {arch.weights / 1e9:.2f} billion parameters; "
        f"{machine.device}",
        "",
        f"{'stage':<10}{'on':<5}{'peak':>11}{'available':>12}{'disk':>11}  most of it",
    ]
    lines += [_row(stage) for stage in plan.stages.values()]
    lines += [
        f"{'all':<10}{'':<5}{'':>11}{'':>12}{human_bytes(plan.disk_bytes):>11}  "
        f"{human_bytes(machine.disk_free_bytes)} free"
        + (f"; download {human_bytes(plan.download_bytes)}" if plan.download_bytes else ""),
        "",
        f"train: {many(plan.step.micro_batch, 'row')} of up to {plan.step.length} tokens a pass, "
        f"{many(plan.step.accumulation, 'pass')} a step"
        + (f" on each of {plan.step.gpus} GPUs" if plan.step.gpus > 1 else "")
        + (
            f"; {plan.steps} steps in about {human_seconds(plan.train_seconds)}"
            if plan.train_seconds
            else ""
        ),
        *(plan.several.lines() if plan.several else []),
        f"serve: {plan.serving.concurrent_chats} chats of {plan.serving.max_model_len} tokens, "
        f"KV cache {human_bytes(plan.serving.kv_cache_bytes)}; two servers at once "
        + ("fit" if plan.blue_green_fits else "do not fit (serve.rollout: hold stops one first)"),
    ]
    if machine.gpu:
        lines += [f"on the GPU now: {process}" for process in machine.gpu.processes]
    lines += [f"note: {text}" for text in plan.warnings]
    lines += [f"{stage.name} does not fit" for stage in plan.stages.values() if not stage.fits]
    if not plan.disk_fits:
        lines.append(f"the disk of {machine.disk_path} is too small")
    lines += [f"  {number}. {advice}" for number, advice in enumerate(plan.advice, 1)]
    return "\n".join(lines)


def _row(stage: StagePlan) -> str:
    largest = sorted(stage.peak.components.items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {human_bytes(size)}" for name, size in largest[:_COMPONENTS_SHOWN])
    available = "?" if stage.available_bytes is None else human_bytes(stage.available_bytes)
    mark = " " if stage.fits else "!"
    return (
        f"{stage.name:<10}{stage.device:<5}{human_bytes(stage.peak.total_bytes):>11}{mark}"
        f"{available:>11}{human_bytes(stage.disk_bytes):>11}  {most}"
    )
