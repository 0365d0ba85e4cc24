"""What this machine's CPU can do, from `/proc/cpuinfo` alone."""

from __future__ import annotations

from pathlib import Path

# Instructions that multiply bfloat16. Without them a bf16 product runs 10 to 30 times slower than
# the same product in float32 (measured on an AVX2 EPYC: 9 against 90 GFLOP/s a core).
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"})


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 by itself."""
    return bool(_BF16_FLAGS & (_flags(cpuinfo) or frozenset()))


def has_int4_kernel(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether vLLM's CPU build has a kernel for 4-bit weights here: it needs AVX-512 on x86.

    Without it `tuneserve.quantize.vllm_cpu` unpacks the weights while loading, and the server
    needs the memory of the 16-bit model.
    """
    flags = _flags(cpuinfo)
    return flags is None or "avx512f" in flags or "asimd" in flags


def _flags(cpuinfo: Path) -> frozenset[str] | None:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), None)
    return None if found is None else frozenset(found.partition(":")[2].split())
