"""The plan: every stage's peak memory and disk against what the machine has."""

from __future__ import annotations

from collections.abc import Mapping
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
from tuneserve.plan.machine import Machine, look
from tuneserve.plan.plan import Plan
from tuneserve.plan.rows import DataShape, data_shape_from_metrics
from tuneserve.plan.speed import steps_seconds
from tuneserve.plan.stageplan import StagePlan
from tuneserve.plan.staging import plan_stages
from tuneserve.plan.times import stage_times
from tuneserve.plan.ways import ways
from tuneserve.train.recipe import steps_of


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
            steps_seconds=steps_seconds(arch, step, machine.device, steps, usual),
            row_tokens=usual or step.length,
            held_out=_held_out(run, data),
        ),
    )


def _held_out(run: RunFile, data: DataShape | None) -> int | None:
    """Rows held out of the same data; None where they come from elsewhere."""
    if data is None or run.data.eval:
        return None
    share = run.data.eval_fraction
    return round(data.rows * share / (1 - share)) if share < 1 else None


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
