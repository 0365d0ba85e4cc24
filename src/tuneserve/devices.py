"""Which GPUs this process sees, without loading torch."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

# The first compute capability whose matrix units multiply bfloat16 (Ampere). Cards before it, such
# as T4, V100 and RTX 20, compute in float16.
BF16_CAPABILITY = (8, 0)
# Families whose activations outgrow float16; such cards compute them in float32, and so does vLLM
# there (0.32, `vllm/config/model.py`).
FLOAT32_FAMILIES = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
_SMI_SECONDS = 20
_DRIVER_CARDS = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", re.MULTILINE)


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
    return names[:1] if names and names[0].startswith("MIG-") else names  # it shows one slice


def has_driver() -> bool:
    """Whether NVIDIA's driver knows a card here, hidden or not."""
    return any(_DRIVER_CARDS.glob("*"))


def card_ids() -> list[str]:
    """The same GPUs by UUID, so that ``0`` and ``GPU-8a56`` are one card where they are.

    Numbers count the cards by bus address, as `nvidia-smi` does and CUDA among like cards. What the
    driver does not tell, such as a MIG slice, keeps its name.
    """
    uuids = []
    for card in sorted(_DRIVER_CARDS.glob("*")):
        try:
            found = _UUID.search((card / "information").read_text())
        except OSError:
            found = None
        uuids.append(found[1] if found else "")

    def id_of(name: str) -> str:
        if name.isdigit():
            known = uuids[int(name)] if int(name) < len(uuids) else ""
            return known or name
        return next((uuid for uuid in uuids if uuid.startswith(name)), name)

    return [id_of(name) for name in visible_gpus()]


def ask_driver(query: str, *, silent: bool = False) -> list[list[str]]:
    """Rows of `nvidia-smi`, cell by cell; none without a GPU, or where the driver does not answer.

    Args:
        query: Such as ``--query-gpu=name,memory.total``.
        silent: Whether no answer needs no word.
    """
    text = run_smi(query, "--format=csv,noheader,nounits", silent=silent)
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]


def run_smi(*arguments: str, silent: bool = False) -> str:
    """What `nvidia-smi` prints; empty as for `ask_driver`."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",  # other users' processes are called as they like
            timeout=_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        if not silent:
            log.warning("nvidia-smi did not answer (%s); going on as without a GPU", error)
        return ""
    return done.stdout
