"""Several GPUs in a training step: what each of them holds beside what one GPU would.

DDP copies everything to every GPU and exchanges gradients; ZeRO-2 (Rajbhandari et al., 2020) cuts
gradients and optimizer state into equal shares, but adds a float32 copy of what is trained, shared
as well, and DeepSpeed's buffers. So ZeRO-2 pays where much is trained and the GPUs are many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tuneserve.progress import human_bytes

if TYPE_CHECKING:
    from tuneserve.plan.arch import Arch
    from tuneserve.plan.constants import Constants
    from tuneserve.plan.memory import Step

# Communicators and their channels, outside of torch's allocator: measured between two H200s.
NCCL_BYTES = 840 * 2**20
# As `tuneserve.train.zero` sets DeepSpeed's buckets: elements, and there are two.
_ZERO_BUCKET_ELEMENTS = 50_000_000
# ZeRO-2 has to save this much of a GPU's peak to be worth another library and a slower step.
_WORTH_SHARE, _WORTH_BYTES = 0.05, 2**30


def exchange_bytes(step: Step, trained: int) -> dict[str, float]:
    """Buffers that several GPUs need to talk; empty for one."""
    if step.gpus == 1 and not step.zero:
        return {}
    found: dict[str, float] = {"NCCL": NCCL_BYTES if step.gpu else 0}
    if step.zero:
        bucket = min(trained, _ZERO_BUCKET_ELEMENTS)
        found["ZeRO-2 buckets"] = 2 * bucket * step.adapter_element_bytes
    return found


def gradient_bytes(step: Step, whole: float) -> float:
    """Gradients: under DDP they live in its buckets from the start, under ZeRO-2 in shares.

    At its step DeepSpeed makes a float32 copy of its share.
    """
    if not step.zero:
        return whole
    return whole / step.gpus * (1 + 4 / step.adapter_element_bytes)


def zero_bytes(step: Step) -> float:
    """Bytes per trained parameter of DeepSpeed's float32 weights and the state beside them."""
    if step.optimizer == "adamw_torch":
        return 4.0 + 2 * 4
    return 4.0 + 2 * (1 + 4 / 256)  # 8-bit moments, each with a float32 scale per 256


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
    from tuneserve.plan.memory import train_peak

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
