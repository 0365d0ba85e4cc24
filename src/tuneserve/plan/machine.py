"""What this machine has, without torch: GPU memory and who holds it, RAM, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuneserve.cpu import has_bf16
from tuneserve.devices import BF16_CAPABILITY, ask_driver
from tuneserve.places import run_root

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
    """One card. `free_bytes` is what its driver reports, whoever holds the rest; `capability` is
    its compute capability, None where it is not known.
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
    """
    total, free = memory()
    existing = disk
    while not existing.exists():
        existing = existing.parent
    cards = visible_cards() if gpu_memory_bytes is None else []
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
    """The cards that CUDA would show, in its order, by `nvidia-smi`."""
    asked = "--query-gpu=index,uuid,name,memory.total,memory.free"
    # Drivers before 510 do not know the last field, and answer nothing at all.
    rows = ask_driver(f"{asked},compute_cap", silent=True) or ask_driver(asked)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",") if name.strip()]
        rows = [r for name in wanted for r in rows if r[0] == name or r[1].startswith(name)]
    if not rows:
        return []
    held = ask_driver("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    return [
        Gpu(
            name,
            _mib(total),
            _mib(free),
            tuple(_process(*p) for o, *p in held if o == uuid and len(p) >= 3 and p[0].isdigit()),
            _capability(*rest),
        )
        for _, uuid, name, total, free, *rest in rows
    ]


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
