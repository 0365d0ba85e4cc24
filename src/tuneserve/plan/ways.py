"""DDP or ZeRO-2 for a training step on several GPUs: what each needs, and which is worth it.

What is shared and what is added is in `tuneserve.plan.several`: ZeRO-2 pays where much is trained
and the GPUs are many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tuneserve.plan.arch import Arch
from tuneserve.plan.constants import Constants
from tuneserve.plan.memory import train_peak
from tuneserve.plan.trainstep import Step
from tuneserve.progress import human_bytes

# ZeRO-2 has to save this much of a GPU's peak to be worth another library and a slower step.
_WORTH_SHARE, _WORTH_BYTES = 0.05, 2**30


@dataclass(frozen=True)
class Way:
    """One way to train on several GPUs. `fits` compares with what a GPU has for training."""

    name: str
    gpus: int
    zero: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Ways:
    """The ways there are, and which is worth it: `zero` is what `train.zero` should be."""

    ways: tuple[Way, ...]
    zero: int
    why: str

    def to_json(self) -> dict[str, object]:
        """As `plan --json` carries it."""
        return {"ways": [vars(way) for way in self.ways], "zero": self.zero, "why": self.why}

    def lines(self) -> list[str]:
        """For the table."""
        each = ", ".join(
            f"{way.name} {human_bytes(way.peak_bytes)}" + ("" if way.fits else " (does not fit)")
            for way in self.ways
        )
        gpus = self.ways[0].gpus
        return [f"on {gpus} GPUs, memory a GPU: {each}; {self.why}"]


def ways(arch: Arch, step: Step, available_bytes: int, constants: Constants) -> Ways | None:
    """DDP and ZeRO-2 for as many GPUs as the step has; None for one.

    Args:
        arch: The model.
        step: With the micro-batch that was chosen; every GPU has that many rows a pass.
        available_bytes: What a step may take of the fullest GPU.
        constants: Of this machine.
    """
    if step.gpus == 1:
        return None

    def way(name: str, zero: int) -> Way:
        needed = train_peak(arch, replace(step, zero=zero), constants)
        return Way(
            name, step.gpus, zero, needed.total_bytes, needed.needed_bytes <= available_bytes
        )

    ddp = way("DDP", 0)
    kinds = {"a 4-bit base": step.quantized, "DoRA": step.dora, "GPUs without bfloat16": step.half}
    if kind := next((kind for kind, is_so in kinds.items() if is_so), None):
        return Ways((ddp,), 0, f"ZeRO-2 is not for {kind}")
    shared = way("ZeRO-2", 2)
    saves = ddp.peak_bytes - shared.peak_bytes
    if shared.fits and not ddp.fits:
        return Ways((ddp, shared), 2, "only ZeRO-2 fits: train.zero: 2")
    if saves >= max(_WORTH_BYTES, _WORTH_SHARE * ddp.peak_bytes):
        why = f"ZeRO-2 saves {human_bytes(saves)} a GPU and is worth it: train.zero: 2"
        return Ways((ddp, shared), 2, why)
    if saves <= 0:
        why = "ZeRO-2 saves nothing here: train.zero: 0"
    else:
        why = f"ZeRO-2 saves {human_bytes(saves)} a GPU, not worth it: train.zero: 0"
    return Ways((ddp, shared), 0, why)
