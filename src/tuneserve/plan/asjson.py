"""The plan as `plan --json` prints it and the stages read it."""

from __future__ import annotations

from typing import Any

from tuneserve.plan.plan import Plan
from tuneserve.plan.speed import step_seconds
from tuneserve.plan.table import table


def as_json(plan: Plan) -> dict[str, Any]:
    """The keys of `plan --json`; `table` is for people, `hints` for the stages' contexts."""
    gpu = plan.machine.gpu
    return {
        "fits": plan.fits,
        "device": plan.machine.device,
        "dataset": (plan.data.dataset or None) if plan.data else None,
        "parameters": plan.arch.weights,
        "stages": {
            name: {**stage.to_json(), "seconds": _rough(plan.times.stages.get(name))}
            for name, stage in plan.stages.items()
        },
        "seconds": _rough(plan.times.total),
        "disk_bytes": plan.disk_bytes,
        "disk_free_bytes": plan.machine.disk_free_bytes,
        "download_bytes": plan.download_bytes,
        "train": {
            "micro_batch": plan.step.micro_batch,
            "gradient_accumulation": plan.step.accumulation,
            "longest_row_tokens": plan.step.length,
            "gradient_checkpointing": plan.step.checkpointing,
            "seconds_per_step": step_seconds(plan.arch, plan.step, plan.machine.device),
            "steps": plan.steps,
            "seconds": plan.train_seconds,
            "while_serving": plan.trains_while_serving,
            "gpus": plan.step.gpus,
            "several_gpus": plan.several.to_json() if plan.several else None,
        },
        "serve": {
            "max_model_len": plan.serving.max_model_len,
            "kv_cache_bytes": plan.serving.kv_cache_bytes,
            "kv_bytes_per_token": plan.arch.kv_bytes_per_token(),
            "concurrent_chats": plan.serving.concurrent_chats,
            "blue_green_fits": plan.blue_green_fits,
        },
        "hints": {
            "train": {
                "micro_batch": plan.step.micro_batch,
                "gradient_checkpointing": plan.step.checkpointing,
                "planned_peak_bytes": plan.stages["train"].peak.total_bytes,
                "planned_components": dict(plan.stages["train"].peak.components),
                "advice": list(plan.left_to_do),
            },
            "release": {
                "max_model_len": plan.serving.max_model_len,
                "kv_cache_bytes": plan.serving.kv_cache_bytes,
            },
        },
        "gpu_processes": [vars(process) for process in gpu.processes] if gpu else [],
        "advice": [{**vars(advice), "text": str(advice)} for advice in plan.advice],
        "warnings": list(plan.warnings),
        "table": table(plan),
    }


def _rough(seconds: float | None) -> int | None:
    """To two digits: more would be false."""
    return None if seconds is None else int(float(f"{seconds:.1e}"))
