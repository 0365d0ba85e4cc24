"""What this machine's CPU can do for a 4-bit model."""

from __future__ import annotations

from pathlib import Path


def has_int4_kernel(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether vLLM's CPU build has a kernel for 4-bit weights here: it needs AVX-512 on x86.

    Without it `tuneserve.quantize.vllm_cpu` unpacks the weights while loading, and the server
    needs the memory of the 16-bit model.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((line.split() for line in lines if line.startswith("flags")), None)
    return flags is None or "avx512f" in flags
