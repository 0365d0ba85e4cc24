"""Reading a machine: a card by a stand-in nvidia-smi, memory within control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuneserve.cpu import has_bf16
from tuneserve.errors import ResourceError
from tuneserve.plan.machine import first_gpu, look, memory, visible_cards
from tuneserve.release.capacity import read_free_memory

MIB = 2**20
SMI = """#!/bin/sh
case "$1" in
--query-gpu*) printf '0, GPU-aa, Card A, 81920, 81000\\n1, GPU-bb, Card B, 40960, 30960\\n';;
*) printf 'GPU-bb, {pid}, /usr/bin/python3, 10000\\nGPU-bb, 999999999, [Not Found], [N/A]\\n';;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(SMI.format(pid=os.getpid()))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def test_first_card(smi: Path) -> None:
    gpu = first_gpu({})
    assert gpu is not None
    assert (gpu.name, gpu.total_bytes, gpu.free_bytes) == ("Card A", 81920 * MIB, 81000 * MIB)
    assert gpu.processes == ()


@pytest.mark.parametrize("visible", ["1", "GPU-bb", "1,0"])
def test_visible_card_and_its_processes(smi: Path, visible: str) -> None:
    gpu = first_gpu({"CUDA_VISIBLE_DEVICES": visible})
    assert gpu is not None and gpu.name == "Card B"
    known, gone = gpu.processes
    assert (known.pid, known.name, known.used_bytes) == (os.getpid(), "python3", 10000 * MIB)
    assert gone.used_bytes == 0 and gpu.foreign == gpu.processes


def test_a_process_that_is_called_in_no_known_encoding(smi: Path) -> None:
    smi.write_bytes(smi.read_bytes().replace(b"/usr/bin/python3", b"/usr/bin/\xff3"))
    gpu = first_gpu({"CUDA_VISIBLE_DEVICES": "1"})
    assert gpu is not None and gpu.processes[0].used_bytes == 10000 * MIB


def test_of_several_cards_the_fullest_decides(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both, first = look(tmp_path, gpus=2), look(tmp_path)
    assert both.gpu is not None and first.gpu is not None
    assert (both.gpu.name, first.gpu.name) == ("Card B", "Card A")
    assert both.gpus == first.gpus == 2


@pytest.mark.parametrize("visible", ["1", "GPU-bb"])
def test_a_server_has_the_memory_of_the_cards_it_may_see(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, both = read_free_memory(), read_free_memory(2)
    assert (first.device, first.free_bytes, first.holders) == ("gpu", 81000 * MIB, ())
    assert (both.free_bytes, both.total_bytes) == (30960 * MIB, 40960 * MIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    other = read_free_memory()
    assert (other.free_bytes, other.total_bytes) == (30960 * MIB, 40960 * MIB)
    assert other.holders[0] == f"process {os.getpid()} (python3): 10000 MiB"
    with pytest.raises(ResourceError, match="tensor_parallel: 2, and this machine shows 1"):
        read_free_memory(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_free_memory().device == "cpu"


def test_hidden_cards_do_not_exist(smi: Path) -> None:
    assert first_gpu({"CUDA_VISIBLE_DEVICES": ""}) is None


def test_a_driver_that_does_not_know_compute_cap(
    smi: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses the whole query; the card is there all the same, and taken for one with bf16."""
    smi.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "*compute_cap*) echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;;\n"
        "--query-gpu*) printf '0, GPU-aa, A100, 81920, 81000\\n';; esac\n"
    )
    (card,) = visible_cards({})
    assert (card.name, card.total_bytes, card.capability) == ("A100", 81920 * MIB, None)
    assert card.has_bf16 and not caplog.text


def test_a_process_may_be_called_anything(smi: Path) -> None:
    """Ray and others write arguments into their titles; some rows are no processes."""
    smi.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "--query-gpu*) printf '0, GPU-aa, A100, 81920, 1000, 8.0\\n';;\n"
        "*) printf 'GPU-aa, 999999998, ray::fit(2, lr=3), 60000\\nGPU-aa, 999999999, a/b, 20000'\n"
        "   printf '\\nGPU-aa, [N/A], [N/A], [N/A]\\nNo running processes found\\n';; esac\n"
    )
    (card,) = visible_cards({})
    assert [str(process) for process in card.foreign] == [
        "process 999999998 (ray::fit(2, lr=3), 58.6 GiB)",
        "process 999999999 (b, 19.5 GiB)",
    ]


def test_broken_driver_is_said(smi: Path, caplog: pytest.LogCaptureFixture) -> None:
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert first_gpu({}) is None
    assert "going on as without a GPU" in caplog.text


def test_our_own_server_is_known_by_its_parents(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grandchild of a process started with a path in our run folder is ours."""
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    inner = "import sys; print(__import__('os').getpid(), flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    socket = str(tmp_path / "home" / "run" / "s")
    with subprocess.Popen(
        [sys.executable, "-c", outer, socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        smi.write_text(SMI.format(pid=int(server.stdout.readline())))
        gpu = first_gpu({"CUDA_VISIBLE_DEVICES": "1"})
        server.stdin.close()
    assert gpu is not None
    assert [process.ours for process in gpu.processes] == [True, False]
    assert gpu.held_by_us_bytes == 10000 * MIB


def proc(folder: Path, group: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        "MemTotal: 1000000 kB\nMemFree: 100 kB\nMemAvailable: 800000 kB\n"
    )
    (folder / "self" / "cgroup").write_text(group)
    return folder


def limit(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_memory_without_limits(tmp_path: Path) -> None:
    place = proc(tmp_path / "proc", "0::/user\n")
    assert memory(place, tmp_path / "cgroup") == (1000000 * 1024, 800000 * 1024)


def test_memory_within_a_group_and_its_parents(tmp_path: Path) -> None:
    place, groups = proc(tmp_path / "proc", "0::/a/b\n"), tmp_path / "cgroup"
    limit(groups / "a" / "b", "max", 5, 0)
    limit(groups / "a", "500000", 300000, 100000)
    # Page cache that can be dropped is not in use.
    assert memory(place, groups) == (500000, 300000)


def test_memory_with_the_groups_files_at_the_root(tmp_path: Path) -> None:
    place, groups = proc(tmp_path / "proc", "0::/docker/abc\n"), tmp_path / "cgroup"
    limit(groups, "500000", 600000, 0)
    assert memory(place, groups) == (500000, 0)


def test_bf16_by_flags(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor: 0\nflags\t\t: fpu avx2 avx512_bf16\n")
    assert has_bf16(info)
    info.write_text("processor: 0\nflags\t\t: fpu avx2\n")
    assert not has_bf16(info)
    assert not has_bf16(tmp_path / "absent")


def test_supposed_card(tmp_path: Path) -> None:
    found = look(tmp_path / "not" / "there", gpu_memory_bytes=24 * 2**30)
    assert found.supposed and found.gpu is not None and found.gpu.free_bytes == 24 * 2**30
    assert found.disk_free_bytes > 0 and found.device == "a 24 GiB GPU"


def test_a_card_says_whether_it_has_bfloat16(smi: Path) -> None:
    """A T4 has not; an A100 has; what an old driver or a container does not tell is assumed."""
    smi.write_text(
        '#!/bin/sh\ncase "$1" in --query-gpu=*compute_cap*)\n'
        "printf '0, GPU-aa, Tesla T4, 15360, 15000, 7.5\\n1, GPU-bb, A100, 81920, 81000, 8.0\\n'\n"
        "printf '2, GPU-cc, Some card, 81920, 81000, [N/A]\\n';; esac\n"
    )
    t4, a100, unknown = visible_cards({})
    assert (t4.capability, a100.capability, unknown.capability) == ((7, 5), (8, 0), None)
    assert (t4.has_bf16, a100.has_bf16, unknown.has_bf16) == (False, True, True)
