"""The plan as text for a terminal."""

from __future__ import annotations

from tuneserve.plan.advice import Advice
from tuneserve.plan.plan import Plan
from tuneserve.plan.stageplan import StagePlan
from tuneserve.plan.times import about
from tuneserve.progress import human_bytes, many

_COMPONENTS_SHOWN = 2


def table(plan: Plan) -> str:
    """Stages, their peaks and disk, the choices made, and what to do where one does not fit."""
    arch, machine = plan.arch, plan.machine
    lines = [
        f"{arch.architecture or arch.model_type}: {arch.weights / 1e9:.2f} billion parameters; "
        f"{machine.device}",
        "",
        f"{'stage':<10}{'on':<5}{'peak':>11}{'available':>12}{'disk':>11}{'about':>11}  most of it",
    ]
    lines += [_row(stage, plan.times.stages.get(stage.name)) for stage in plan.stages.values()]
    lines += [
        f"{'all':<10}{'':<5}{'':>11}{'':>12}{human_bytes(plan.disk_bytes):>11}"
        f"{_about(plan.times.total):>11}  "
        f"{human_bytes(machine.disk_free_bytes)} free"
        + (f"; download {human_bytes(plan.download_bytes)}" if plan.download_bytes else ""),
        "",
        _data_line(plan),
        f"train: {many(plan.step.micro_batch, 'row')} of up to {plan.step.length} tokens a pass, "
        f"{many(plan.step.accumulation, 'pass')} a step"
        + (f" on each of {plan.step.gpus} GPUs" if plan.step.gpus > 1 else "")
        + (
            f"; {plan.steps} steps in about {about(plan.train_seconds)}"
            if plan.train_seconds
            else ""
        ),
        *_host_lines(plan),
        *(plan.several.lines() if plan.several else []),
        f"serve: {plan.serving.concurrent_chats} chats of {plan.serving.max_model_len} tokens, "
        f"KV cache {human_bytes(plan.serving.kv_cache_bytes)}; two servers at once "
        + ("fit" if plan.blue_green_fits else "do not fit (serve.rollout: hold stops one first)"),
        *_time_lines(plan),
    ]
    if machine.gpu:
        lines += [f"on the GPU now: {process}" for process in machine.gpu.processes]
    lines += [f"note: {text}" for text in plan.warnings]
    for stage in (stage for stage in plan.stages.values() if not stage.fits):
        lines.append(f"{stage.name} does not fit" + (":" if _advice(plan, stage) else ""))
        lines += [f"  {number}. {advice}" for number, advice in enumerate(_advice(plan, stage), 1)]
    if not plan.disk_fits:
        lines.append(f"the disk of {machine.disk_path} is too small")
    return "\n".join(lines)


def _advice(plan: Plan, stage: StagePlan) -> list[Advice]:
    return [advice for advice in plan.advice if advice.stage == stage.name]


def _data_line(plan: Plan) -> str:
    """Which rows were planned with."""
    data = plan.data
    if data is None:
        return (
            f"data: not validated yet, so every row counts as long as data.max_length "
            f"({plan.step.length} tokens)"
        )
    whose = f" of {data.dataset}" if data.dataset else ""
    return f"data: {many(data.rows, 'row')}{whose}, the longest of {data.longest} tokens"


def _host_lines(plan: Plan) -> list[str]:
    """What training keeps in the host's memory, where that is much."""
    pinned = plan.stages["train"].host.components.get("pinned: checkpoints")
    if not pinned:
        return []
    needed = plan.stages["train"].host.needed_bytes
    return [
        f"train: {human_bytes(needed)} of the host's memory, {human_bytes(pinned)} of it for "
        "checkpoints"
    ]


def _time_lines(plan: Plan) -> list[str]:
    """The whole run, and what is not in it; nothing where nothing is known."""
    if not (line := plan.times.line()):
        return []
    left_out = ["validation", "proofs of the candidate"]
    if plan.download_bytes:
        left_out.insert(0, "the download")
    more = ""
    if plan.machine.gpu is None:
        more = "; as on two cores"
    return [f"time: {line} (without {', '.join(left_out)}{more})"]


def _about(seconds: float | None) -> str:
    return "" if seconds is None else about(seconds)


def _row(stage: StagePlan, seconds: float | None) -> str:
    largest = sorted(stage.peak.components.items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {human_bytes(size)}" for name, size in largest[:_COMPONENTS_SHOWN])
    available = "?" if stage.available_bytes is None else human_bytes(stage.available_bytes)
    mark = " " if stage.fits else "!"
    said = "?" if seconds is None else about(seconds) if seconds else "-"
    return (
        f"{stage.name:<10}{stage.device:<5}{human_bytes(stage.peak.total_bytes):>11}{mark}"
        f"{available:>11}{human_bytes(stage.disk_bytes):>11}{said:>11}  {most}"
    )
