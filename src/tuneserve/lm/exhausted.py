"""Whether an error says that memory ran out, of whatever device and whoever asked for it."""

from __future__ import annotations

from tuneserve.errors import OutOfMemory

# What else than `torch.OutOfMemoryError` says so: CUDA's own calls, NCCL's buffers, cuBLAS's
# workspace and torch's allocator on a CPU raise a RuntimeError.
_SIGNS = ("out of memory", "cublas_status_alloc_failed", "defaultcpuallocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def said(error: BaseException) -> str:
    """The line of an error that tells of memory, else its first one."""
    lines = str(error).splitlines() or ["out of memory"]
    return next((n for n in lines if any(sign in n.lower() for sign in _SIGNS)), lines[0])
