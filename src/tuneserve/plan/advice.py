"""What to change when training does not fit, each with the memory that it saves, mildest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tuneserve.plan.arch import Arch
from tuneserve.plan.constants import Constants
from tuneserve.plan.machine import Machine
from tuneserve.plan.memory import Step, train_peak, with_micro_batch
from tuneserve.progress import human_bytes

# A saving below this is not worth a line.
_WORTH_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Advice:
    """One change. `fits` says whether it is enough by itself.

    Attributes:
        field: Field of the run file; empty when the change is outside it.
        value: What to set it to.
    """

    field: str
    value: str
    saves_bytes: int
    fits: bool
    why: str

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
    constants: Constants,
) -> list[Advice]:
    """Changes that make a training step smaller or its place larger, the mildest first.

    Args:
        arch: The model.
        step: The step that does not fit.
        machine: Where; names processes that hold the card.
        available_bytes: What the step may take now.
        sharing: Whether the serving model stays on the card while training.
        constants: Of this machine.
    """
    now = train_peak(arch, step, constants).needed_bytes
    found = []
    for field, value, smaller, why in _smaller_steps(step):
        then = train_peak(arch, smaller, constants).needed_bytes
        if now - then >= _WORTH_BYTES:
            found.append(Advice(field, value, now - then, then <= available_bytes, why))
    if machine.gpu:
        ours = machine.gpu.held_by_us_bytes
        if sharing and ours:
            found.append(
                Advice(
                    "serve.while_training",
                    "stop",
                    ours,
                    now <= available_bytes + ours,
                    "the endpoint is away while training",
                )
            )
        for process in machine.gpu.foreign:
            frees = process.used_bytes
            if frees >= _WORTH_BYTES:
                fits = now <= available_bytes + frees
                found.append(Advice("", f"ending {process}", frees, fits, "it holds the same card"))
    found.append(
        Advice("model.base", "a smaller model", max(now - available_bytes, 0), True, "the last way")
    )
    return found


def _smaller_steps(step: Step) -> Iterator[tuple[str, str, Step, str]]:
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
    if not step.quantized:
        smaller = replace(step, quantized=True, zero=0)
        yield "train.method", "qlora", smaller, "a base in 4 bits"
    if step.whole_weights:
        smaller = replace(step, whole_weights=0)
        yield "train.lora.modules_to_save", "[]", smaller, "embedding and head stay as they are"
    if step.rank > 8:
        smaller = replace(step, rank=step.rank // 2)
        yield "train.lora.r", str(step.rank // 2), smaller, "a smaller adapter"
    if step.length > 256:
        smaller = replace(step, length=step.length // 2)
        yield "data.max_length", str(step.length // 2), smaller, "longer rows are left out or cut"
