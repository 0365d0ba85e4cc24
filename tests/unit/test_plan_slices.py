"""MIG slices by a stand-in nvidia-smi, whose words are those of real ones; CUDA's by a stand-in
libcuda.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tuneserve import doctor
from tuneserve.devices import visible_gpus
from tuneserve.errors import ResourceError
from tuneserve.plan import machine
from tuneserve.plan.machine import all_cards, first_gpu, look, visible_cards
from tuneserve.plan.slices import memory_by_name
from tuneserve.release.capacity import read_free_memory

MIB = 2**20
LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-aa11)
  MIG 3g.71gb     Device  0: (UUID: MIG-0a0a)
  MIG 1g.18gb+me  Device  1: (UUID: MIG-0b0b)
GPU 1: NVIDIA H200 (UUID: GPU-bb22)
"""
SLICE = """
<mig_device><index>{0}</index><gpu_instance_id>{1}</gpu_instance_id>
<compute_instance_id>0</compute_instance_id>
<fb_memory_usage><total>{2}</total><reserved>0 MiB</reserved><used>9 MiB</used><free>{3}</free>
</fb_memory_usage></mig_device>"""
SHOWN = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><attached_gpus>2</attached_gpus>
<gpu id="00000000:07:00.0"><uuid>GPU-aa11</uuid>
<mig_devices>{slices}</mig_devices>
<fb_memory_usage><total>Insufficient Permissions</total></fb_memory_usage>
<processes><process_info><gpu_instance_id>9</gpu_instance_id>
<compute_instance_id>0</compute_instance_id><pid>999999998</pid><type>C</type>
<process_name>/usr/bin/a&amp;b</process_name><used_memory>1200 MiB</used_memory></process_info>
<process_info><gpu_instance_id>2</gpu_instance_id><compute_instance_id>0</compute_instance_id>
<pid>999999999</pid><type>C</type><process_name>other</process_name>
<used_memory>5 MiB</used_memory></process_info></processes></gpu>
<gpu id="00000000:0B:00.0"><uuid>GPU-bb22</uuid><mig_devices>None</mig_devices></gpu>
</nvidia_smi_log>
"""
IN_MIB = SLICE.format(0, 2, "71424 MiB", "71400 MiB") + SLICE.format(1, 9, "16384 MiB", "15100 MiB")
UNTOLD = SLICE.format(0, 2, "N/A", "N/A") + SLICE.format(1, 9, *["Insufficient Permissions"] * 2)
WHOLE = "143771, 142000"
FIRST, SECOND = "NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 1g.18gb+me"


class Smi:
    """An nvidia-smi of two H200, the first in MIG mode; the second may be missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write()

    def write(
        self,
        slices: str = IN_MIB,
        listed: str = LISTED,
        memory: str = "[Insufficient Permissions], [Insufficient Permissions]",
        cards: int = 2,
    ) -> None:
        """What it prints from now on."""
        rows = [f"0, GPU-aa11, NVIDIA H200, {memory}, 9.0, Enabled"]
        rows += [f"1, GPU-bb22, NVIDIA H200, {WHOLE}, 9.0, Disabled"]
        for name, text in (
            ("rows", "\n".join(rows[:cards]) + "\n"),
            ("listed", listed),
            ("shown", SHOWN.format(slices=slices)),
        ):
            (self.folder / name).write_text(text)
        program = self.folder / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncd {self.folder}\ncase "$1" in\n'
            "--query-gpu*) cat rows;; -L) cat listed;; -q) cat shown;;\n"
            "*) echo 'GPU-bb22, 999999997, vllm, 300';; esac\n"
        )
        program.chmod(0o755)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine._say.cache_clear()
    return Smi(folder)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [FIRST]),  # one slice, and no card beside it
        ("MIG-0b0b", [SECOND]),
        ("MIG-0b0b,MIG-0a0a", [SECOND]),
        ("MIG-GPU-aa11/9/0", [SECOND]),  # before driver 470
        ("0", [FIRST]),
        ("GPU-aa11", [FIRST]),
        ("1", ["NVIDIA H200"]),
        ("GPU-bb", ["NVIDIA H200"]),
        ("", []),
        ("-1,MIG-0b0b", []),
    ],
)
def test_cuda_shows_one_slice(smi: Smi, visible: str | None, expected: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [card.name for card in visible_cards(environment)] == expected


def test_a_slice_has_memory_and_processes_of_its_own(smi: Smi) -> None:
    card = first_gpu({"CUDA_VISIBLE_DEVICES": "MIG-0b0b"})
    assert card is not None and card.capability == (9, 0)
    assert (card.total_bytes, card.free_bytes) == (16384 * MIB, 15100 * MIB)
    assert [str(process) for process in card.processes] == ["process 999999998 (a&b, 1.2 GiB)"]
    names = [(c.name, [p.pid for p in c.processes]) for c in all_cards()]
    assert names == [(FIRST, [999999999]), (SECOND, [999999998]), ("NVIDIA H200", [999999997])]


@pytest.mark.parametrize("memory", [WHOLE, "[N/A], [N/A]"])
def test_plan_server_and_doctor_see_the_slice(
    smi: Smi, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside containers nvidia-smi tells the whole card's memory, which no slice has."""
    smi.write(memory=memory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0b0b,MIG-0a0a")
    found = look(tmp_path)
    assert found.gpu is not None and found.device == SECOND and found.gpus == 1
    assert found.gpu.total_bytes == 16384 * MIB
    server = read_free_memory()
    assert (server.device, server.total_bytes, server.free_bytes) == (
        "gpu",
        16384 * MIB,
        15100 * MIB,
    )
    with pytest.raises(ResourceError, match="tensor_parallel: 2, and this machine shows 1"):
        read_free_memory(2)
    assert SECOND in doctor._gpu(first_gpu()).found
    assert visible_gpus() == ["MIG-0b0b"]  # what a run locks, and pays for


def test_which_slice_it_is_is_said(smi: Smi, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        visible_cards({})
    (said,) = caplog.messages
    assert "MIG-0a0a (3g.71gb), the first of 2; CUDA_VISIBLE_DEVICES=MIG-0b0b takes" in said


def test_a_slice_that_is_not_there_is_named(smi: Smi, caplog: pytest.LogCaptureFixture) -> None:
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "MIG-cccc"}) == []
    assert "MIG-cccc is none of the devices that `nvidia-smi -L` lists" in caplog.text


def test_a_card_in_mig_mode_without_slices_is_none(
    smi: Smi, caplog: pytest.LogCaptureFixture
) -> None:
    smi.write(slices="None", listed="GPU 0: NVIDIA H200 (UUID: GPU-aa11)\n", cards=1)
    assert visible_cards({}) == []
    assert "GPU-aa11) is in MIG mode, and no slice of it can be seen" in caplog.text


def test_without_nvidia_smi_a_slice_is_missed_aloud(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine._say.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_cards({"CUDA_VISIBLE_DEVICES": "MIG-0b0b"}) == []
    assert "no nvidia-smi to ask about the GPU: going on as without one" in caplog.text


def test_where_nothing_tells_the_memory_the_name_does(
    smi: Smi, caplog: pytest.LogCaptureFixture
) -> None:
    smi.write(slices=UNTOLD)
    card = first_gpu({"CUDA_VISIBLE_DEVICES": "MIG-0b0b"})
    assert card is not None
    assert (card.total_bytes, card.free_bytes) == (16307 * MIB, 16307 * MIB)  # of 16384
    assert f"tells the memory of {SECOND}: it is taken for 16307 MiB" in caplog.text


@pytest.mark.parametrize(
    ("profile", "at_most"),  # MiB that nvidia-smi shows of such slices
    [("1g.5gb", 4864), ("2c.3g.20gb", 19968), ("1g.10gb", 9728), ("3g.71gb", 71424)],
)
def test_a_name_never_promises_more_than_there_is(profile: str, at_most: int) -> None:
    assert 0.85 * at_most < memory_by_name(profile) <= at_most


LIBCUDA = """
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
int cuInit(int flags) { return strcmp(getenv("CUDA_VISIBLE_DEVICES"), "WANTED") ? 100 : 0; }
int cuDeviceGet(int *device, int n) { *device = n; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  *free = 15872ull << 20; *total = 16384ull << 20; return 0; }
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="makes a libcuda")
@pytest.mark.parametrize("wanted", ["MIG-0b0b", "GPU-aa11"])
def test_cuda_is_asked_where_nvidia_smi_does_not_tell(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Also of a card that has no memory of its own, whose total is [N/A]."""
    source = smi.folder / "cuda.c"
    source.write_text(LIBCUDA.replace("WANTED", wanted))
    library = str(smi.folder / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(source)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(smi.folder))
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # which drops assertions, and what they call
    smi.write(slices=UNTOLD)
    if wanted.startswith("GPU"):
        rows = (smi.folder / "rows").read_text()
        (smi.folder / "rows").write_text(rows.replace("Enabled", "[N/A]"))
        (smi.folder / "listed").write_text("GPU 0: NVIDIA GB10 (UUID: GPU-aa11)\n")
    card = first_gpu({"CUDA_VISIBLE_DEVICES": wanted})
    assert card is not None
    assert (card.total_bytes, card.free_bytes) == (16384 * MIB, 15872 * MIB)


def test_a_memory_that_nobody_knows_is_refused(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.write(slices=UNTOLD, listed=LISTED.replace("1g.18gb+me", "odd"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0b0b")
    said = "the memory of NVIDIA H200 MIG odd is not known: neither nvidia-smi nor CUDA tells it"
    with pytest.raises(ResourceError, match=said):
        look(tmp_path)
    with pytest.raises(ResourceError, match=said):
        read_free_memory()
    finding = doctor._gpu(first_gpu())
    assert finding.state == "fail" and "whose memory is not known" in finding.found
    assert look(tmp_path, gpu_memory_bytes=2**34).gpu is not None
