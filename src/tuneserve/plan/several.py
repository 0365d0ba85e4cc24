"""Several GPUs in a training step: what each of them holds beside what one GPU would.

DDP copies everything to every GPU and exchanges gradients; ZeRO-2 (Rajbhandari et al., 2020) cuts
gradients and optimizer state into equal shares, but adds a float32 copy of what is trained, shared
as well, and DeepSpeed's buffers.
"""

from __future__ import annotations

from tuneserve.plan.trainstep import Step

# Communicators and their channels, outside of torch's allocator: measured between two H200s.
NCCL_BYTES = 840 * 2**20
# As `tuneserve.train.zero` sets DeepSpeed's buckets: elements, and there are two.
_ZERO_BUCKET_ELEMENTS = 50_000_000


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
