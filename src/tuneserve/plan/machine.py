"""What this machine has, without torch: GPU memory and who holds it, RAM, disk."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuneserve.cpu import has_bf16
from tuneserve.devices import BF16_CAPABILITY, ask_driver, has_driver
from tuneserve.errors import ResourceError
from tuneserve.places import run_root
from tuneserve.plan.slices import Slice, ask_cuda, memory_by_name, slices

log = logging.getLogger(__name__)
_MIB = 2**20


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds GPU memory; `ours` when it belongs to a server of this home."""

    pid: int
    name: str
    used_bytes: int
    ours: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}, {self.used_bytes / 2**30:.1f} GiB)"


@dataclass(frozen=True)
class Gpu:
    """One card, or a MIG slice of one. `free_bytes` is what its driver reports, whoever holds the
    rest; `capability` is its compute capability, None where it is not known.
    """

    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    capability: tuple[int, int] | None = None

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bfloat16; assumed of a card that is not known."""
        return self.capability is None or self.capability >= BF16_CAPABILITY

    def check_memory_known(self) -> None:
        """Refuse a card of which nobody tells the memory.

        Raises:
            ResourceError: Neither `nvidia-smi` nor CUDA does.
        """
        if not self.total_bytes:
            raise ResourceError(
                f"the memory of {self.name} is not known: neither nvidia-smi nor CUDA tells it",
                expected="memory.total of `nvidia-smi --query-gpu`, `nvidia-smi -q -x` or CUDA",
                hint="check the driver; `tuneserve plan RUN.yaml --gpu-memory 24GiB` plans for a "
                "card of that size, and an empty CUDA_VISIBLE_DEVICES stays on the CPU",
            )

    @property
    def held_by_us_bytes(self) -> int:
        """What servers of this home hold."""
        return sum(process.used_bytes for process in self.processes if process.ours)

    @property
    def foreign(self) -> tuple[GpuProcess, ...]:
        """Everybody else."""
        return tuple(process for process in self.processes if not process.ours)


@dataclass(frozen=True)
class Machine:
    """Everything a plan compares its predictions with. Sizes in bytes.

    Attributes:
        gpu: The card that decides: of those that training shares, the fullest.
        gpus: How many cards there are; None where a card is only supposed.
    """

    gpu: Gpu | None
    ram_total_bytes: int
    ram_free_bytes: int
    disk_free_bytes: int
    disk_path: str
    cpu_bf16: bool = True
    supposed: bool = field(default=False)
    gpus: int | None = None

    @property
    def device(self) -> str:
        """How a table names it."""
        return self.gpu.name if self.gpu else "CPU"


def look(disk: Path, *, gpu_memory_bytes: int | None = None, gpus: int = 1) -> Machine:
    """This machine; with `gpu_memory_bytes` as if it had empty cards of that size.

    Args:
        disk: Where artifacts go; it need not exist yet.
        gpu_memory_bytes: Size of a card to suppose.
        gpus: Cards that share the work.

    Raises:
        ResourceError: There is a card, and nobody tells its memory.
    """
    total, free = memory()
    existing = disk
    while not existing.exists():
        existing = existing.parent
    cards = visible_cards() if gpu_memory_bytes is None else []
    for card in cards[:gpus]:
        card.check_memory_known()
    gpu = min(cards[:gpus], key=lambda card: card.free_bytes, default=None)
    if gpu_memory_bytes is not None:
        name = f"a {gpu_memory_bytes / 2**30:.0f} GiB GPU"  # as new as one with bfloat16
        gpu = Gpu(name, gpu_memory_bytes, gpu_memory_bytes)
    return Machine(
        gpu,
        total,
        free,
        shutil.disk_usage(existing).free,
        str(disk),
        has_bf16(),
        supposed=gpu_memory_bytes is not None,
        gpus=None if gpu_memory_bytes is not None else len(cards),
    )


def first_gpu(environment: Mapping[str, str] = os.environ) -> Gpu | None:
    """The card that CUDA would take first, by `nvidia-smi`; None where there is none."""
    return next(iter(visible_cards(environment)), None)


def visible_cards(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The cards that CUDA would show, in its order, by `nvidia-smi`; of MIG slices the first."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return _measured(_shown(_devices(visible), visible))


def all_cards() -> list[Gpu]:
    """All cards and slices of the machine, whatever CUDA_VISIBLE_DEVICES shows us of them."""
    return _measured(_devices(None))


@dataclass(frozen=True)
class _Device:
    """A card or a slice of one, as `nvidia-smi` has it; memory in MiB, where it is a number."""

    index: str
    uuid: str
    name: str
    total: str
    free: str
    capability: tuple[int, int] | None
    part: Slice | None = None

    def is_called(self, name: str) -> bool:
        part = self.part
        return (
            name == self.index
            or self.uuid.startswith(name)
            or (part is not None and (part.uuid.startswith(name) or part.place == name))
        )


def _devices(visible: str | None) -> list[_Device]:
    asked = "--query-gpu=index,uuid,name,memory.total,memory.free"
    # Drivers before 510 do not know the field before the last, and answer nothing at all.
    rows = ask_driver(f"{asked},compute_cap,mig.mode.current", silent=True) or ask_driver(asked)
    rows = [row for row in rows if len(row) >= 5]
    named = "MIG-" in (visible or "") or (visible != "" and has_driver())
    if named and not shutil.which("nvidia-smi"):
        _say(
            "there is no nvidia-smi to ask about the GPU: going on as without one; in a container, "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility brings it"
        )
    unclear = any("Enabled" in row[6:] or not row[3].isdigit() for row in rows)
    parts = slices() if unclear or "MIG-" in (visible or "") else []
    found = []
    for index, uuid, name, total, free, *rest in rows:
        capability = _capability(*rest[:1])
        mine = [part for part in parts if part.card == uuid]
        for part in mine:
            whole = f"{name} MIG {part.profile}"  # as CUDA calls it
            found.append(_Device(index, uuid, whole, *part.memory, capability, part))
        if not mine and "Enabled" in rest[1:]:
            _say(
                f"{name} ({uuid}) is in MIG mode, and no slice of it can be seen here: it cannot "
                "be used; `nvidia-smi -L` lists the slices, `sudo nvidia-smi mig -cgi` makes them"
            )
        elif not mine:
            found.append(_Device(index, uuid, name, total, free, capability))
    return found


def _shown(devices: list[_Device], visible: str | None) -> list[_Device]:
    """What CUDA shows of them, in its order: one slice, and no card beside it."""
    found = devices if visible is None else []
    for name in (visible or "").split(","):
        named = [device for device in devices if device.is_called(name.strip())]
        if not name.strip():
            continue
        if not named:  # CUDA stops there
            if devices and name.strip() != "-1":
                _say(
                    f"CUDA_VISIBLE_DEVICES: {name.strip()} is none of the devices that "
                    "`nvidia-smi -L` lists, and CUDA shows none from there on"
                )
            break
        found += named
    several = [device for device in found if device.part]
    if len(several) > 1:
        first, other = several[0].part, several[1].part
        assert first is not None and other is not None
        _say(
            f"CUDA shows a process one MIG slice: {first.uuid} ({first.profile}), the first of "
            f"{len(several)}; CUDA_VISIBLE_DEVICES={other.uuid} takes another"
        )
    return several[:1] or found


@functools.cache
def _say(text: str) -> None:
    """Once in a process, which may look at its cards every second."""
    log.warning("%s", text)


def _measured(devices: list[_Device]) -> list[Gpu]:
    whole = any(device.part is None for device in devices)
    asked = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    held = [row for row in ask_driver(asked) if len(row) > 3] if whole else []
    found = []
    for device in devices:
        processes: Sequence[Sequence[str]] = [rest for uuid, *rest in held if uuid == device.uuid]
        if device.part:
            processes = device.part.processes
        total, free = _memory(device)
        known = tuple(_process(*process) for process in processes if process[0].isdigit())
        found.append(Gpu(device.name, total, free, known, device.capability))
    return found


def _memory(device: _Device) -> tuple[int, int]:
    """Total and free bytes; 0 where nothing tells them."""
    part, total, free = device.part, device.total, device.free
    if not (total.isdigit() and free.isdigit()):  # in some containers; of cards that share the RAM
        total, free = ask_cuda(part.uuid if part else device.uuid)
    if not total.isdigit() and part and (least := memory_by_name(part.profile)):
        _say(
            f"neither nvidia-smi nor CUDA tells the memory of {device.name}: it is taken for "
            f"{least} MiB, by its name, all of it free"
        )
        total = free = str(least)
    return _mib(total), _mib(free)


def driver_version() -> str | None:
    """Version of NVIDIA's driver, such as ``580.65.06``; None where none answers."""
    found = [row[0] for row in ask_driver("--query-gpu=driver_version")]
    return found[0] if found and found[0][:1].isdigit() else None


def _process(pid: str, *rest: str) -> GpuProcess:
    *name, used = rest
    path = ", ".join(name)  # a process may call itself what it likes, commas included
    return GpuProcess(int(pid), Path(path).name or path, _mib(used), _is_ours(int(pid)))


def _capability(text: str = "") -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _mib(text: str) -> int:
    return int(text) * _MIB if text.isdigit() else 0  # "[N/A]" inside some containers


def _is_ours(pid: int) -> bool:
    """Whether the process or one of its parents was started with a path in our run folder."""
    home = str(run_root())
    for _ in range(20):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            # pid (name) state parent ...; the name may hold blanks and parentheses
            parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
        except OSError:
            return False
        if home in command:
            return True
        pid = int(parent.split()[1])
        if pid <= 1:
            return False
    return False


def memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Total and available memory in bytes, within the limits of our control groups."""
    values = {}
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):  # not Linux
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages, pages
    total = values["MemTotal"]
    free = values.get("MemAvailable", values["MemFree"])
    for limit, used in _group_limits(proc, groups):
        if limit < total:
            total = limit
        free = min(free, max(0, limit - used))
    return total, free


def _group_limits(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """Limit and use of our control group and of its parents (v2 and v1 interface files)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        names = ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        place = root / path.lstrip("/")
        found += _limit(place, *names)
        # Inside a container the path may be the host's; the files then lie at the root.
        while place != root and place != place.parent:
            place = place.parent
            found += _limit(place, *names)
    return found


def _limit(folder: Path, limit_name: str, used_name: str) -> list[tuple[int, int]]:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return []
    cache = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    return [] if limit == "max" else [(int(limit), used - cache)]
