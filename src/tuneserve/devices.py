"""Which GPUs this process sees, without loading torch."""

from __future__ import annotations

import os
from pathlib import Path

_DRIVER_CARDS = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """Names of the GPUs: what CUDA_VISIBLE_DEVICES lists, else a number for every card that the
    driver knows; empty on a machine without.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(n) for n in range(len(list(_DRIVER_CARDS.glob("*"))))]
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if "-1" in names:  # CUDA stops at the first number that is no card
        names = names[: names.index("-1")]
    return names
