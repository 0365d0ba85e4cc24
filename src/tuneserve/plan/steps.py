"""Which training step is planned: how much is recomputed, and how many rows go at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tuneserve.config import RunFile
from tuneserve.devices import FLOAT32_FAMILIES
from tuneserve.plan.arch import EMBEDDINGS, HEADS, Arch
from tuneserve.plan.checks import target_linears, whole_linears
from tuneserve.plan.constants import Constants
from tuneserve.plan.fusedstep import can_fuse
from tuneserve.plan.host import train_host
from tuneserve.plan.machine import Gpu, Machine
from tuneserve.plan.memory import train_peak
from tuneserve.plan.rows import DataShape
from tuneserve.plan.trainstep import Step, with_micro_batch

# Without a GPU a longer batch is no faster, and its padding costs as much as its tokens.
_CPU_BATCH_TOKENS = 2048
# A pass of fewer tokens leaves a card idle; then recomputing, which makes room for more rows, is
# the faster way.
_BUSY_TOKENS = 2048
Checkpointing = bool | Literal["offload"]


def choose_step(
    run: RunFile,
    arch: Arch,
    data: DataShape | None,
    machine: Machine,
    room_bytes: int,
    constants: Constants,
) -> Step:
    """The fastest step that fits, or the smallest one.

    Nothing recomputed is faster than gradient checkpointing, and that is faster than holding the
    checkpoints in host memory; within each, the largest micro-batch that divides the effective
    batch. What the run file fixes stays fixed, whether it fits or not.
    """
    step = _whole_step(run, arch, data, machine)
    batch = step.accumulation
    wanted = run.train.micro_batch
    limit = batch if wanted == "auto" else min(wanted, batch)
    if wanted == "auto" and not step.gpu:
        limit = min(limit, max(1, _CPU_BATCH_TOKENS // step.length))
    ways = _ways(run, gpu=step.gpu)
    best: Step | None = None
    for way in ways:
        found = _largest(
            replace(step, checkpointing=way),
            arch,
            limit,
            room_bytes,
            constants,
            fixed=wanted != "auto",
        )
        if found is None or (len(ways) > 1 and not _host_fits(arch, found, machine, constants)):
            continue
        if found.tokens >= min(_BUSY_TOKENS, limit * step.length):
            return found
        if best is None or found.tokens > best.tokens:
            best = found
    if best is not None:
        return best
    size = _divisors(batch, limit)[0] if wanted != "auto" else 1
    return with_micro_batch(replace(step, checkpointing=ways[-1]), size, batch)


def _host_fits(arch: Arch, step: Step, machine: Machine, constants: Constants) -> bool:
    """Whether what `offload` keeps in the host's memory fits there, as far as is known."""
    needed = train_host(arch, step, constants).needed_bytes
    return step.checkpointing != "offload" or machine.supposed or needed <= machine.ram_free_bytes


def trained_step(
    run: RunFile,
    arch: Arch,
    *,
    longest: int,
    micro_batch: int,
    accumulation: int,
    checkpointing: Checkpointing,
    capability: tuple[int, int] | None = None,
) -> Step:
    """A step that a GPU has made, as the plan would have it.

    Args:
        run: The run file.
        arch: The base.
        longest: Tokens of the longest row.
        micro_batch: Rows a pass.
        accumulation: Passes a step.
        checkpointing: What was recomputed.
        capability: The GPU's compute capability; None: one with bfloat16.
    """
    place = Machine(Gpu("", 0, 0, capability=capability), 0, 0, 0, "")
    step = _whole_step(run, arch, DataShape((longest,) * micro_batch), place)
    return replace(
        step,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=checkpointing,
    )


def _ways(run: RunFile, *, gpu: bool) -> list[Checkpointing]:
    wanted = run.train.gradient_checkpointing
    if wanted != "auto":
        return [wanted]
    return [False, True, "offload"] if gpu else [False, True]


def _divisors(batch: int, limit: int) -> list[int]:
    return [size for size in range(limit, 0, -1) if batch % size == 0]


def _largest(
    step: Step, arch: Arch, limit: int, room_bytes: int, constants: Constants, *, fixed: bool
) -> Step | None:
    """The step with the most rows a pass that fits; None when none does."""
    batch = step.accumulation
    sizes = _divisors(batch, limit)
    for size in sizes[:1] if fixed else sizes:
        larger = with_micro_batch(step, size, batch)
        if train_peak(arch, larger, constants).needed_bytes <= room_bytes:
            return larger
    return None


def _element_bytes(arch: Arch, machine: Machine) -> tuple[int, int]:
    """Of weights and activations, and of what is trained; as `tuneserve.lm.hardware` decides."""
    if machine.gpu is None:
        wide = 2 if machine.cpu_bf16 else 4
        return wide, wide
    if machine.gpu.has_bf16:
        return 2, 2
    return (4, 4) if arch.model_type in FLOAT32_FAMILIES else (2, 4)


def _whole_step(run: RunFile, arch: Arch, data: DataShape | None, machine: Machine) -> Step:
    """What the run file and the machine decide; one row a pass."""
    train = run.train
    on_gpu = machine.gpu is not None
    element, trained = _element_bytes(arch, machine)
    batch = min(train.effective_batch, data.rows) if data else train.effective_batch
    batch = max(batch // train.gpus, 1)  # of each GPU
    whole = sum(linear.weights for linear in whole_linears(run, arch))
    whole += sum(
        arch.vocab * arch.hidden
        for name in train.lora.modules_to_save
        if name.rsplit(".", 1)[-1] in EMBEDDINGS + HEADS
    )
    fused = can_fuse(arch, dropout=train.lora.dropout > 0, dora=train.lora.use_dora)
    return Step(
        micro_batch=1,
        length=data.longest if data else run.data.max_length,
        targets=target_linears(run, arch),
        rank=train.lora.r,
        quantized=train.method == "qlora",
        accumulation=batch,
        optimizer=train.optimizer if on_gpu else "adamw_torch",  # the 8-bit ones are for GPUs
        attention=train.attention,
        dropout=train.lora.dropout > 0,
        dora=train.lora.use_dora,
        whole_weights=whole,
        kernels="fused" if fused and not whole else "plain",
        element_bytes=element,
        adapter_element_bytes=trained,
        half=trained > element,
        gpu=on_gpu,
        gpus=train.gpus,
        zero=train.zero,
    )
