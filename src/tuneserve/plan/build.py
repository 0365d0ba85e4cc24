"""The plan: every stage's peak memory and disk against what the machine has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.basecheck import read_config
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.places import store_root
from tuneserve.plan.advice import Advice, bottom_advice, later_advice, train_advice
from tuneserve.plan.arch import Arch, arch_from_config, with_headers
from tuneserve.plan.calibrate import machine_constants
from tuneserve.plan.checks import problems, warnings, whole_linears
from tuneserve.plan.constants import Constants, for_card
from tuneserve.plan.later import Serving
from tuneserve.plan.machine import Machine, look
from tuneserve.plan.rows import DataShape, data_shape_from_metrics
from tuneserve.plan.speed import step_seconds
from tuneserve.plan.stageplan import StagePlan
from tuneserve.plan.staging import plan_stages
from tuneserve.plan.times import Times, stage_times
from tuneserve.plan.trainstep import Step
from tuneserve.plan.ways import Ways, ways
from tuneserve.train.recipe import steps_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a run will take, and what was chosen for it.

    Attributes:
        advice: What to change where training does not fit.
        left_to_do: The same for a training of which not even the last rung fits after all.
    """

    arch: Arch
    machine: Machine
    step: Step
    stages: Mapping[str, StagePlan]
    serving: Serving
    blue_green_fits: bool
    trains_while_serving: bool
    download_bytes: int
    data: DataShape | None = None
    advice: tuple[Advice, ...] = ()
    left_to_do: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    several: Ways | None = None
    steps: int | None = None
    usual_tokens: int | None = None
    times: Times = Times({})

    @property
    def train_seconds(self) -> float | None:
        """All steps of the training, with rows of their mean length; None where it is not known."""
        return _steps_seconds(
            self.arch, self.step, self.machine.device, self.steps, self.usual_tokens
        )

    @property
    def disk_bytes(self) -> int:
        """All that the run leaves on disk, the base's download included."""
        return self.download_bytes + sum(stage.disk_bytes for stage in self.stages.values())

    @property
    def disk_fits(self) -> bool:
        """Whether it fits on the store's disk (not asked of a machine that is only supposed)."""
        return self.machine.supposed or self.disk_bytes <= self.machine.disk_free_bytes

    @property
    def fits(self) -> bool:
        """Whether everything fits."""
        return self.disk_fits and all(stage.fits for stage in self.stages.values())

    def to_json(self) -> dict[str, Any]:
        """The keys of `plan --json`; `table` is for people, `hints` for the stages' contexts."""
        from tuneserve.plan.table import table

        gpu = self.machine.gpu
        return {
            "fits": self.fits,
            "device": self.machine.device,
            "dataset": (self.data.dataset or None) if self.data else None,
            "parameters": self.arch.weights,
            "stages": {
                name: {**stage.to_json(), "seconds": _rough(self.times.stages.get(name))}
                for name, stage in self.stages.items()
            },
            "seconds": _rough(self.times.total),
            "disk_bytes": self.disk_bytes,
            "disk_free_bytes": self.machine.disk_free_bytes,
            "download_bytes": self.download_bytes,
            "train": {
                "micro_batch": self.step.micro_batch,
                "gradient_accumulation": self.step.accumulation,
                "longest_row_tokens": self.step.length,
                "gradient_checkpointing": self.step.checkpointing,
                "seconds_per_step": step_seconds(self.arch, self.step, self.machine.device),
                "steps": self.steps,
                "seconds": self.train_seconds,
                "while_serving": self.trains_while_serving,
                "gpus": self.step.gpus,
                "several_gpus": self.several.to_json() if self.several else None,
            },
            "serve": {
                "max_model_len": self.serving.max_model_len,
                "kv_cache_bytes": self.serving.kv_cache_bytes,
                "kv_bytes_per_token": self.arch.kv_bytes_per_token(),
                "concurrent_chats": self.serving.concurrent_chats,
                "blue_green_fits": self.blue_green_fits,
            },
            "hints": {
                "train": {
                    "micro_batch": self.step.micro_batch,
                    "gradient_checkpointing": self.step.checkpointing,
                    "planned_peak_bytes": self.stages["train"].peak.total_bytes,
                    "planned_components": dict(self.stages["train"].peak.components),
                    "advice": list(self.left_to_do),
                },
                "release": {
                    "max_model_len": self.serving.max_model_len,
                    "kv_cache_bytes": self.serving.kv_cache_bytes,
                },
            },
            "gpu_processes": [vars(process) for process in gpu.processes] if gpu else [],
            "advice": [{**vars(advice), "text": str(advice)} for advice in self.advice],
            "warnings": list(self.warnings),
            "table": table(self),
        }


def plan_for(
    run: RunFile,
    *,
    base_dir: Path,
    dataset_metrics: Mapping[str, Any] | None = None,
    gpu_memory_bytes: int | None = None,
    data: DataShape | None = None,
    machine: Machine | None = None,
    constants: Constants | None = None,
) -> Plan:
    """Plan a run for this machine, or for a card of another size.

    Args:
        run: The run file.
        base_dir: Folder with at least the base's `config.json`.
        dataset_metrics: `lengths` (tokens of each row) and `has_tool_calls`, where known.
        gpu_memory_bytes: Suppose an empty card of this size instead of looking.
        data: The data set's shape, instead of `dataset_metrics`.
        machine: What there is, instead of looking.
        constants: Measured numbers of the machine, instead of what was calibrated here.

    Raises:
        RunFileError: The run would fail later for reasons that show already; all of them are
            listed.
        ModelError: The base's config or weights cannot be read.
    """
    constants = constants or machine_constants()
    arch = _read_arch(base_dir)
    data = data or data_shape_from_metrics(dataset_metrics)
    machine = machine or look(
        store_root(run.store.root),
        gpu_memory_bytes=gpu_memory_bytes,
        gpus=max(run.train.gpus, run.serve.tensor_parallel),
    )
    on_gpu = machine.gpu is not None
    constants = for_card(constants, machine.gpu.total_bytes if machine.gpu else None)
    bf16 = machine.gpu is None or machine.gpu.has_bf16
    found = problems(run, arch, data, gpu=on_gpu, gpus=machine.gpus, bf16=bf16)
    if found:
        raise RunFileError(
            f"run {run.name} cannot work as it is:\n  " + "\n  ".join(found),
            expected="a run that could end well",
            hint="mend the fields named",
            details={"problems": found},
        )
    staged = plan_stages(run, arch, data, machine, constants)
    step, peak = staged.step, staged.stages["train"].peak
    steps = _steps(run, data)
    usual = round(sum(data.lengths) / data.rows) if data and data.rows else None
    may_quantize = not whole_linears(run, arch)
    advice: list[Advice] = []
    if peak.needed_bytes > staged.train_bytes:
        advice = train_advice(
            arch,
            step,
            machine,
            staged.train_bytes,
            sharing=run.serve.while_training == "share",
            may_quantize=may_quantize,
            constants=constants,
        )

    def replan(changed: RunFile) -> Mapping[str, StagePlan] | None:
        if problems(changed, arch, data, gpu=on_gpu, gpus=machine.gpus, bf16=bf16):
            return None
        return plan_stages(changed, arch, data, machine, constants).stages

    advice += later_advice(run, staged.stages, machine, staged.serving.max_model_len, replan)
    has_weights = any(base_dir.glob("*.safetensors"))
    total = machine.gpu.total_bytes if machine.gpu else machine.ram_free_bytes
    return Plan(
        arch=arch,
        machine=machine,
        step=step,
        stages=staged.stages,
        serving=staged.serving,
        blue_green_fits=staged.two_servers_fit,
        trains_while_serving=peak.needed_bytes + staged.serving.peak.needed_bytes <= total,
        download_bytes=0 if has_weights else 2 * arch.weights,
        data=data,
        advice=tuple(advice),
        left_to_do=tuple(
            bottom_advice(arch, step, machine, may_quantize=may_quantize, constants=constants)
        ),
        warnings=tuple(warnings(run, arch, data, gpu=on_gpu)),
        several=ways(arch, step, staged.train_bytes, constants),
        steps=steps,
        usual_tokens=usual,
        times=stage_times(
            run,
            arch,
            step,
            machine.device,
            steps_seconds=_steps_seconds(arch, step, machine.device, steps, usual),
            row_tokens=usual or step.length,
            held_out=_held_out(run, data),
        ),
    )


def _steps_seconds(
    arch: Arch, step: Step, device: str, steps: int | None, usual_tokens: int | None
) -> float | None:
    if steps is None or usual_tokens is None:
        return None
    one = step_seconds(arch, replace(step, length=usual_tokens), device)
    return None if one is None else one * steps


def _held_out(run: RunFile, data: DataShape | None) -> int | None:
    """Rows held out of the same data; None where they come from elsewhere."""
    if data is None or run.data.eval:
        return None
    share = run.data.eval_fraction
    return round(data.rows * share / (1 - share)) if share < 1 else None


def _rough(seconds: float | None) -> int | None:
    """To two digits: more would be false."""
    return None if seconds is None else int(float(f"{seconds:.1e}"))


def _steps(run: RunFile, data: DataShape | None) -> int | None:
    """Optimizer steps, as the training will count them."""
    if run.train.max_steps:
        return run.train.max_steps
    if data is None or not data.rows:
        return None
    return steps_of(run.train.epochs, data.rows, min(run.train.effective_batch, data.rows))


def _read_arch(base_dir: Path) -> Arch:
    arch = arch_from_config(read_config(base_dir))
    if any(base_dir.glob("*.safetensors")):
        arch = with_headers(arch, Checkpoint.open(base_dir).tensors)
    return arch
