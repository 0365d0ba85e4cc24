"""MIG slices: parts of a card, each with a memory of its own, of which CUDA shows a process one.

`nvidia-smi --query-gpu` knows cards alone: it gives the whole card's memory, or inside containers
``[N/A]`` or ``[Insufficient Permissions]``. Names and UUIDs of the slices stand in
``nvidia-smi -L``, memory and processes in ``nvidia-smi -q -x``, which has no names (NVIDIA's
Multi-Instance GPU User Guide, "MIG Device Names" and "CUDA Device Enumeration").
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from os import environ
from xml.etree import ElementTree

from tuneserve.devices import run_smi

_CARD = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
_SLICE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")
_GIGABYTES = re.compile(r"\d+g\.(\d+)gb")
# What of the number in a profile's name is there at least: 1g.18gb of an H200 has 16.0 GiB, 1g.5gb
# of an A100 4.75, 3g.71gb of an H200 69.8.
_SHARE_OF_NAME = 0.95
_CUDA_SECONDS = 60
# The driver's own library: whatever torch is installed, and the same numbers as
# `torch.cuda.mem_get_info`. In a process of its own, since it stays on the card while that lives.
_ASK_CUDA = """
from ctypes import CDLL, byref, c_int, c_size_t, c_void_p
cuda = CDLL("libcuda.so.1")
device, context, free, total = c_int(), c_void_p(), c_size_t(), c_size_t()
assert not cuda.cuInit(0)
assert not cuda.cuDeviceGet(byref(device), 0)
assert not cuda.cuDevicePrimaryCtxRetain(byref(context), device)
assert not cuda.cuCtxSetCurrent(context)
assert not cuda.cuMemGetInfo_v2(byref(free), byref(total))
print(total.value // 2**20, free.value // 2**20)
"""


@dataclass(frozen=True)
class Slice:
    """One slice.

    Attributes:
        uuid: As CUDA_VISIBLE_DEVICES takes it.
        card: UUID of the card that it is of.
        profile: Such as ``1g.18gb``.
        place: What drivers before 470 call it: ``MIG-GPU-.../3/0``, by GPU and compute instance.
        memory: Total and free MiB as `nvidia-smi` writes them; empty where it does not.
        processes: Of each process that holds memory: pid, name, MiB.
    """

    uuid: str
    card: str
    profile: str
    place: str = ""
    memory: tuple[str, str] = ("", "")
    processes: tuple[tuple[str, str, str], ...] = ()


def slices() -> list[Slice]:
    """The slices of all cards that `nvidia-smi` shows, in its order and CUDA's."""
    details = _details()
    found, card = [], ""
    for line in run_smi("-L", silent=True).splitlines():
        if match := _CARD.match(line):
            card = match[1]
        elif match := _SLICE.match(line):
            profile, number, uuid = match.groups()
            found.append(Slice(uuid, card, profile, *details.get((card, number), ())))
    return found


def memory_by_name(profile: str) -> int:
    """MiB that a slice has at least, by its profile's name; 0 where the name does not say."""
    match = _GIGABYTES.search(profile)
    return int(int(match[1]) * 1e9 * _SHARE_OF_NAME) // 2**20 if match else 0


def ask_cuda(device: str) -> tuple[str, str]:
    """Total and free MiB of a card or slice, as CUDA itself has them; empty where it has none.

    Args:
        device: As CUDA_VISIBLE_DEVICES takes it.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _ASK_CUDA],
            capture_output=True,
            text=True,
            timeout=_CUDA_SECONDS,
            check=True,
            env={**environ, "CUDA_VISIBLE_DEVICES": device},
        )
    except (OSError, subprocess.SubprocessError):
        return "", ""
    total, free = done.stdout.split()
    return total, free


_Details = tuple[str, tuple[str, str], tuple[tuple[str, str, str], ...]]


def _details() -> dict[tuple[str, str], _Details]:
    """Place, memory and processes by the card's UUID and the slice's number on it."""
    try:
        root = ElementTree.fromstring(run_smi("-q", "-x", silent=True))
    except ElementTree.ParseError:
        return {}
    found = {}
    for card in root.iter("gpu"):
        uuid = card.findtext("uuid", "").strip()
        for part in card.iter("mig_device"):
            instance = part.findtext("gpu_instance_id", "").strip()
            compute = part.findtext("compute_instance_id", "").strip()
            memory = part.find("fb_memory_usage")
            found[uuid, part.findtext("index", "").strip()] = (
                f"MIG-{uuid}/{instance}/{compute}",
                (_mib(memory, "total"), _mib(memory, "free")),
                # Compute instances share the memory of their GPU instance.
                tuple(_processes(card, instance)),
            )
    return found


def _processes(card: ElementTree.Element, instance: str) -> Iterator[tuple[str, str, str]]:
    for process in card.iter("process_info"):
        if process.findtext("gpu_instance_id", "").strip() == instance:
            name = process.findtext("process_name", "").strip()
            yield process.findtext("pid", "").strip(), name, _mib(process, "used_memory")


def _mib(around: ElementTree.Element | None, name: str) -> str:
    text = around.findtext(name, "") if around is not None else ""
    return text.removesuffix("MiB").strip()
