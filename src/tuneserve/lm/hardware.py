"""Where a model computes, and in which type. Engine file: imports torch."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

log = logging.getLogger(__name__)

# CPU instructions that multiply bfloat16. Without them a bf16 product runs 10 to 30 times slower
# than the same product in float32 (measured on an AVX2 EPYC: 9 against 90 GFLOP/s a core).
_CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"})


def device() -> torch.device:
    """This process's GPU, or the CPU. Under a distributed launcher: the GPU of the local rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, else float32; float16 is never chosen silently."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = cpu_has_bf16(Path("/proc/cpuinfo"))
    return torch.bfloat16 if native else torch.float32


def cpu_has_bf16(cpuinfo: Path) -> bool:
    """Whether the processor that `cpuinfo` describes multiplies bfloat16 by itself."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return bool(_CPU_BF16_FLAGS & set(flags.partition(":")[2].split()))


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def release_memory() -> None:
    """Give back what dropped models held: Python's cycles, then the allocator's cache."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
