"""What a stage on a GPU takes of the host's memory beside it."""

from __future__ import annotations

from tuneserve.config import RunFile
from tuneserve.plan.arch import Arch
from tuneserve.plan.constants import DEFAULT, Constants
from tuneserve.plan.fusedstep import held_inputs
from tuneserve.plan.later import compares
from tuneserve.plan.memory import Peak
from tuneserve.plan.trainstep import Step


def train_host(arch: Arch, step: Step, constants: Constants = DEFAULT) -> Peak:
    """One process for each GPU, and with `offload` block inputs in pinned memory.

    Each of these lies in a piece of its own, and torch's pinned allocator makes pieces of powers of
    two (`CachingHostAllocator`, torch 2.13).
    """
    if not step.gpu:
        return Peak({})
    parts = {"processes": step.gpus * constants.gpu_process_bytes}
    away = arch.layers - held_inputs(arch, step)
    if away:
        size = step.tokens * arch.hidden * step.element_bytes
        parts["pinned: checkpoints"] = step.gpus * away * power_of_two(size)
    return Peak(parts)


def export_host(
    arch: Arch, run: RunFile, *, gpu_room_bytes: int, free_bytes: int, constants: Constants
) -> Peak:
    """The process of an export on a GPU, and the model in float32 where losses are compared here.

    They are where a card has no room for the 16-bit model and half of the memory would do
    (`tuneserve.quantize.smoke`).
    """
    if run.quantize.methods == ["none"]:
        return Peak({})
    parts = {"processes": constants.gpu_process_bytes}
    on_gpu = compares(arch, gpu_room_bytes, gpu=True, constants=constants)
    if not on_gpu and compares(arch, free_bytes, gpu=False, constants=constants):
        parts["model to compare with, in float32"] = 4 * arch.weights
    return Peak(parts)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()
