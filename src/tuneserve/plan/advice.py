"""What to change when a stage does not fit, each with the memory that it saves, mildest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuneserve.config import RunFile
from tuneserve.plan.arch import Arch
from tuneserve.plan.constants import Constants
from tuneserve.plan.machine import Machine
from tuneserve.plan.memory import train_peak
from tuneserve.plan.stageplan import StagePlan
from tuneserve.plan.trainstep import Step, with_micro_batch
from tuneserve.progress import human_bytes

# Fewest tokens of a calibration row or a chat that the run file takes.
_SHORTEST = 16
# A saving below this is not worth a line.
_WORTH_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Advice:
    """One change. `fits` says whether it is enough by itself.

    Attributes:
        field: Field of the run file; empty when the change is outside it.
        value: What to set it to.
        stage: What it makes fit.
    """

    field: str
    value: str
    saves_bytes: int
    fits: bool
    why: str
    stage: str = "train"

    def __str__(self) -> str:
        what = f"{self.field}: {self.value}" if self.field else self.value
        enough = ", enough by itself" if self.fits else ""
        return f"{what} saves {human_bytes(self.saves_bytes)}{enough} ({self.why})"


def train_advice(
    arch: Arch,
    step: Step,
    machine: Machine,
    available_bytes: int,
    *,
    sharing: bool,
    may_quantize: bool,
    constants: Constants,
) -> list[Advice]:
    """Changes that make a training step smaller or its place larger, the mildest first.

    Args:
        arch: The model.
        step: The step that does not fit.
        machine: Where; names processes that hold the card.
        available_bytes: What the step may take now.
        sharing: Whether the serving model stays on the card while training.
        may_quantize: Whether the base could be in 4 bits: no linear layer is trained whole.
        constants: Of this machine.
    """
    now = train_peak(arch, step, constants).needed_bytes
    found: list[Advice] = []
    for field, value, smaller, why in _smaller_steps(step, may_quantize=may_quantize):
        then = train_peak(arch, smaller, constants).needed_bytes
        if now - then >= _WORTH_BYTES:
            found.append(Advice(field, value, now - then, then <= available_bytes, why))
    found += _held(machine, now - available_bytes, sharing=sharing)
    if now > available_bytes:
        found.append(_smaller_model(now - available_bytes))
    return found


def _held(machine: Machine, short_bytes: int, *, sharing: bool) -> Iterator[Advice]:
    """Who else holds the card."""
    if machine.gpu is None:
        return
    ours = machine.gpu.held_by_us_bytes
    if sharing and ours:
        why = "the endpoint is away while training"
        yield Advice("serve.while_training", "stop", ours, short_bytes <= ours, why)
    for process in machine.gpu.foreign:
        frees = process.used_bytes
        if frees >= _WORTH_BYTES:
            fits, why = short_bytes <= frees, "it holds the same card"
            yield Advice("", f"ending {process}", frees, fits, why)


def _smaller_model(short_bytes: int) -> Advice:
    return Advice("model.base", "a smaller model", short_bytes, True, "the last way")


def later_advice(
    run: RunFile,
    stages: Mapping[str, StagePlan],
    machine: Machine,
    served_tokens: int,
    replan: Callable[[RunFile], Mapping[str, StagePlan] | None],
) -> list[Advice]:
    """The same for the stages after training, each change planned like a run file that has it.

    Args:
        run: The run file.
        stages: As planned.
        machine: Where.
        served_tokens: Longest chat of the server that was planned.
        replan: The stages of another run file; None where that would be refused.
    """
    found: list[Advice] = []
    for stage in (stage for stage in stages.values() if stage.name != "train" and not stage.fits):
        here: list[Advice] = []
        for field, values, why in _changes(run, stage.name, machine, served_tokens):
            if best := _first_that_fits(run, stage, field, values, why, replan):
                here.append(best)
        room = stage.available_bytes
        short = 0 if room is None else stage.peak.needed_bytes - room
        if short > 0 and stage.device == "GPU":
            sharing = run.serve.while_training == "share" and stage.name != "serve"
            here += _held(machine, short, sharing=sharing)
        if short > 0 and stage.name != "merge":
            here.append(_smaller_model(short))
        found += [replace(advice, stage=stage.name) for advice in here]
    return found


def _first_that_fits(
    run: RunFile,
    stage: StagePlan,
    field: str,
    values: list[Any],
    why: str,
    replan: Callable[[RunFile], Mapping[str, StagePlan] | None],
) -> Advice | None:
    """The mildest value that is enough, else the strongest; None where none saves anything."""
    best = None
    section, _, name = field.partition(".")
    for value in values:
        changed = getattr(run, section).model_copy(update={name: value})
        stages = replan(run.model_copy(update={section: changed}))
        if stages is None:
            continue
        then = stages[stage.name]
        room = (then.available_bytes or 0) - (stage.available_bytes or 0)  # that is won
        saves = stage.peak.needed_bytes - then.peak.needed_bytes + room
        if saves >= _WORTH_BYTES:
            best = Advice(field, _said(name, value), saves, then.fits, why)
        if then.fits:
            break
    return best


def _said(name: str, value: Any) -> str:
    if name == "max_memory":
        return f"{value // 2**20}MiB"
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)


def _changes(
    run: RunFile, stage: str, machine: Machine, served_tokens: int
) -> Iterator[tuple[str, list[Any], str]]:
    """Fields, their values from mild to strong, and what these mean."""
    if stage == "merge":
        yield "merge.max_memory", [500 * 2**20, 400 * 2**20], "smaller pieces"
    if stage == "quantize":
        rows, tokens = run.quantize.calibration_rows, run.quantize.calibration_max_tokens
        why = "less to calibrate on"
        yield "quantize.calibration_rows", _least(1, rows // 2, rows // 4), why
        yield "quantize.calibration_max_tokens", _least(_SHORTEST, tokens // 2), why
    if stage == "serve":
        chats = run.serve.max_concurrent_chats
        fewer = [chats // part for part in (2, 4, 8, 16) if chats >= part]
        yield "serve.max_concurrent_chats", fewer, "others wait for their turn"
        shorter = _least(_SHORTEST, *(served_tokens // part for part in (2, 4, 8, 16)))
        yield "serve.max_model_len", shorter, "shorter chats"
        if run.serve.rollout == "blue_green":
            yield "serve.rollout", ["hold"], "requests wait while servers change"
        four_bit = [method for method in run.quantize.methods if method != "none"]
        if four_bit and len(four_bit) < len(run.quantize.methods):
            yield "quantize.methods", [four_bit], "never served in 16 bits"
        if machine.gpus and machine.gpus > run.serve.tensor_parallel:
            yield "serve.tensor_parallel", [machine.gpus], "one server on several GPUs"


def _least(least: int, *values: int) -> list[int]:
    """Those that the run file takes."""
    return [value for value in values if value >= least]


def bottom_advice(
    arch: Arch, step: Step, machine: Machine, *, may_quantize: bool, constants: Constants
) -> list[str]:
    """What is left where not even the last rung of the memory ladder fits, though it should have.

    Args:
        arch: The model.
        step: The step that was planned.
        machine: Where.
        may_quantize: As in `train_advice`.
        constants: Of this machine.
    """
    last = with_micro_batch(step, 1, step.micro_batch * step.accumulation)
    last = replace(last, checkpointing="offload" if step.gpu else True)
    room = train_peak(arch, last, constants).needed_bytes  # measured, it was not enough
    left = train_advice(
        arch, last, machine, room, sharing=True, may_quantize=may_quantize, constants=constants
    )
    return [str(replace(advice, fits=False)) for advice in left]


def _smaller_steps(step: Step, *, may_quantize: bool) -> Iterator[tuple[str, str, Step, str]]:
    """Steps with one change each, in the order in which one would try them."""
    batch = step.micro_batch * step.accumulation
    if step.micro_batch > 1:
        yield "train.micro_batch", "1", with_micro_batch(step, 1, batch), "more passes a step"
    if step.attention == "eager":
        yield "train.attention", "sdpa", replace(step, attention="sdpa"), "the same result"
    if not step.checkpointing:
        smaller = replace(step, checkpointing=True)
        yield "train.gradient_checkpointing", "true", smaller, "a third more time"
    elif step.gpu and step.checkpointing is True:
        smaller = replace(step, checkpointing="offload")
        yield "train.gradient_checkpointing", "offload", smaller, "slower where the bus is slow"
    if step.gpu and step.optimizer != "paged_adamw_8bit":
        smaller = replace(step, optimizer="paged_adamw_8bit")
        yield "train.optimizer", "paged_adamw_8bit", smaller, "the same result"
    if step.gpus > 1 and not (step.quantized or step.zero or step.dora or step.half):
        smaller = replace(step, zero=2)
        yield "train.zero", "2", smaller, "optimizer state and gradients in shares"
    if not step.quantized and may_quantize:
        smaller = replace(step, quantized=True, zero=0)
        why = "a base in 4 bits" + (", with train.zero: 0" if step.zero else "")
        yield "train.method", "qlora", smaller, why
    if step.whole_weights:
        smaller = replace(step, whole_weights=0)
        yield "train.lora.modules_to_save", "[]", smaller, "what it names stays as it is"
    if step.rank > 8:
        smaller = replace(step, rank=step.rank // 2)
        yield "train.lora.r", str(step.rank // 2), smaller, "a smaller adapter"
    if step.length > 256:
        smaller = replace(step, length=step.length // 2)
        yield "data.max_length", str(step.length // 2), smaller, "longer rows are left out or cut"
