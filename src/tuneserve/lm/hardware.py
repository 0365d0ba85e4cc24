"""Where a model computes, and in which type. Engine file: imports torch."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from tuneserve.checkpoint.basecheck import read_config
from tuneserve.cpu import has_bf16
from tuneserve.devices import BF16_CAPABILITY, FLOAT32_FAMILIES

log = logging.getLogger(__name__)


def device() -> torch.device:
    """This process's GPU, or the CPU. Under a distributed launcher: the GPU of the local rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it; else float16 on a GPU, and float32 on a CPU."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if has_bf16() else torch.float32


def model_dtype(device: torch.device, folder: Path) -> torch.dtype:
    """`compute_dtype`, and float32 for the model in `folder` where float16 does not hold it."""
    dtype = compute_dtype(device)
    if dtype == torch.float16 and read_config(folder).get("model_type") in FLOAT32_FAMILIES:
        return torch.float32
    return dtype


def adapter_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of what is trained on a base that computes in `dtype`.

    Updates are smaller than float16's steps, and a gradient scaler takes no float16 parameters.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def release_memory() -> None:
    """Give back what dropped models held: scratch, Python's cycles, the allocator's cache."""
    import gc

    from tuneserve.lm.scratch import borrowed

    borrowed.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def drop_workspaces() -> None:
    """Give back what cuBLAS holds for this thread: 32 MiB, beside as many for the way back's."""
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None and torch.cuda.is_initialized():
        drop()


def peak_reserved_bytes() -> int | None:
    """The most that torch's allocator has held on the GPU; None without one."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
