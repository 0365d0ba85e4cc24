"""Memory beside a training step's: the host's, the comparison of losses, a server's on large cards.

Expected values are worked out here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_shapes import QWEN2_7B
from tuneserve.config import RunFile
from tuneserve.errors import OutOfMemory
from tuneserve.plan import later
from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.asjson import as_json
from tuneserve.plan.build import plan_for
from tuneserve.plan.constants import DEFAULT, LARGE_GPU_BYTES, for_card
from tuneserve.plan.host import export_host, power_of_two, train_host
from tuneserve.plan.later import quantize_peak
from tuneserve.plan.machine import Gpu, Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.rows import DataShape
from tuneserve.plan.stage import refuse
from tuneserve.plan.trainstep import Step
from tuneserve.release import capacity
from tuneserve.runfile import parse_run

ROOT = Path(__file__).parents[2]
GIB, MIB = 2**30, 2**20
ARCH = arch_from_config(QWEN2_7B)
WEIGHTS = 7_615_616_512
WIDEST = 3584 * 18944
CONTEXT = 740 * MIB


def run(base: Path | str = "b", **changes: Any) -> RunFile:
    data = {"train": ["a"], "max_length": 2048}
    return parse_run({"name": "t", "model": {"base": str(base)}, "data": data, **changes})


def test_pinned_memory_comes_in_powers_of_two() -> None:
    """16 x 2048 tokens of 3584 x 2 bytes are 224 MiB and take 256; 320 MiB hold one, two stay."""
    assert [power_of_two(size) for size in (1, 2, 3, 4096, 4097)] == [1, 2, 4, 4096, 8192]
    step = Step(16, 2048, ARCH.linears, 16, True, checkpointing="offload", kernels="fused")
    parts = train_host(ARCH, step).components
    assert parts == {"processes": 3 * GIB, "pinned: checkpoints": (28 - 2) * 256 * MIB}
    # 2 x 2048 tokens are 28 MiB and take 32; ten stay on the card.
    small = train_host(ARCH, replace(step, micro_batch=2, gpus=2)).components
    assert small == {"processes": 2 * 3 * GIB, "pinned: checkpoints": 2 * 18 * 32 * MIB}
    assert train_host(ARCH, replace(step, checkpointing=True)).components == {"processes": 3 * GIB}
    assert not train_host(ARCH, replace(step, gpu=False)).components


def planned(base: Path, gib: float, ram_gib: float, *, tokens: int = 2048, **changes: Any) -> Plan:
    (base / "config.json").write_text(json.dumps(QWEN2_7B))
    card = Gpu("card", int(gib * GIB), int(gib * GIB))
    machine = Machine(card, 64 * GIB, int(ram_gib * GIB), 500 * GIB, "/store")
    rows = DataShape((tokens,) * 64)
    return plan_for(run(base, **changes), base_dir=base, data=rows, machine=machine)


def test_offload_needs_the_host(tmp_path: Path) -> None:
    wanted = {"gradient_checkpointing": "offload", "micro_batch": 16}
    fits = planned(tmp_path, 40, 12, train=wanted)
    assert fits.stages["train"].host.needed_bytes == 3 * GIB + 26 * 256 * MIB  # 9.5 GiB
    assert fits.fits
    assert (
        "train: 9.5 GiB of the host's memory, 6.5 GiB of it for checkpoints"
        in as_json(fits)["table"]
    )
    small = planned(tmp_path, 40, 9, train=wanted)
    with pytest.raises(OutOfMemory) as caught:
        refuse(small)
    assert "train needs 9.5 GiB of memory, 9.0 GiB can be had" in caught.value.message
    assert "1. " not in caught.value.hint  # nothing that saves the card's memory
    assert "lower train.micro_batch, or set train.gradient_checkpointing: true" in (
        caught.value.hint
    )
    stage = caught.value.details["stages"]["train"]
    assert (stage["host_bytes"], stage["host_available_bytes"]) == (9.5 * GIB, 9 * GIB)


def test_a_host_without_room_for_a_process_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as caught:
        refuse(planned(tmp_path, 80, 2))
    for stage in ("train", "evaluate", "quantize"):
        assert f"{stage} needs 3.0 GiB of memory, 2.0 GiB can be had" in caught.value.message
    assert "free memory of the host" in caught.value.hint


def test_auto_does_not_offload_to_memory_that_is_not_there(tmp_path: Path) -> None:
    """Of rows of 1,024 tokens a card of 7.9 GiB takes two with checkpoints on the host, which is
    3 GiB and 18 x 16 MiB there, and one without.
    """
    ample, short = (
        planned(tmp_path, 7.9, 3 + mib / 1024, tokens=1024).step for mib in (18 * 16, 18 * 16 - 1)
    )
    assert (ample.checkpointing, ample.micro_batch) == ("offload", 2)
    assert (short.checkpointing, short.micro_batch) == (True, 1)


def test_the_comparison_of_losses_by_hand() -> None:
    """12 layers, of which ours reserved 11.16e9 bytes: 16 bits of each weight, one layer unpacked
    (three int64 and two float32 a weight), the logits of 192 tokens.
    """
    arch = arch_from_config({**QWEN2_7B, "num_hidden_layers": 12})
    asked = run(quantize={"calibration_rows": 32})
    found = quantize_peak(arch, asked, gpu=True, room_bytes=140 * GIB)
    weights = 12 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * WIDEST) + 2 * 152064 * 3584
    counted = 2 * weights + 32 * WIDEST + 10 * 192 * 152064
    assert found.total_bytes - CONTEXT - 881 * MIB == pytest.approx(counted, rel=0.001)
    result = json.loads((ROOT / "bench/results/quantize_h200_gptq.json").read_text())
    measured = result["peaks"]["ours"]["peak_gpu_bytes"]
    assert found.total_bytes - CONTEXT == pytest.approx(measured, rel=0.01)


def test_it_is_counted_where_it_is_made() -> None:
    """15.2 GB in 16 bits want 21.3 GiB free beside the context; else 45.7 GB of half the memory."""
    alone = quantize_peak(ARCH, run(), gpu=True)
    assert quantize_peak(ARCH, run(), gpu=True, room_bytes=21 * GIB) == alone
    beside = quantize_peak(ARCH, run(), gpu=True, room_bytes=23 * GIB)
    assert beside.components["16-bit model to compare with"] == 2 * WEIGHTS
    assert beside.needed_bytes > alone.needed_bytes

    def host(gpu_gib: int, free_gib: int, **changes: Any) -> dict[str, int]:
        peak = export_host(
            ARCH,
            run(**changes),
            gpu_room_bytes=gpu_gib * GIB,
            free_bytes=free_gib * GIB,
            constants=DEFAULT,
        )
        return dict(peak.components)

    assert host(23, 128) == {"processes": 3 * GIB}
    assert host(16, 80) == {"processes": 3 * GIB}  # 42.6 GiB are more than half
    assert host(16, 90)["model to compare with, in float32"] == 4 * WEIGHTS
    assert host(16, 90, quantize={"methods": ["none"]}) == {}


def test_without_a_gpu_it_is_in_float32() -> None:
    assert "one block" in quantize_peak(ARCH, run(), gpu=False, room_bytes=80 * GIB).components
    found = quantize_peak(ARCH, run(), gpu=False, room_bytes=90 * GIB)
    assert found.components["model to compare with, in float32"] == 4 * WEIGHTS
    assert found.total_bytes - found.needed_bytes == 2 * WEIGHTS  # the mapped checkpoint


def test_the_rule_is_the_one_of_the_export() -> None:
    from tuneserve.quantize import smoke

    assert later.COMPARED_TOKENS == smoke.ROW_TOKENS
    assert (later.GPU_FACTOR, later.MEMORY_FACTOR) == (smoke._GPU_FACTOR, smoke._MEMORY_FACTOR)


def test_a_server_on_a_large_card_as_measured() -> None:
    """Two of them on an H200: 31.95 GB of the card, 32.42 after one had answered 32 at once."""
    large = for_card(DEFAULT, 140 * GIB).server_gpu_bytes
    result = json.loads((ROOT / "bench/results/serve_h200.json").read_text())
    counted = sum(m["weights_bytes"] + m["kv_cache_bytes"] + large for m in result["models"])
    assert counted == 20_806_652_552 + 2 * 1_644_167_168 + 2 * 3.75 * GIB
    for model in result["models"]:
        assert counted == pytest.approx(model["device_used_bytes"], rel=0.01)
    assert for_card(DEFAULT, 24 * GIB) is DEFAULT and for_card(DEFAULT, None) is DEFAULT


def test_plan_and_release_count_the_same() -> None:
    assert LARGE_GPU_BYTES == capacity._LARGE_GPU_BYTES
    assert DEFAULT.server_gpu_bytes == capacity.GPU_WORKSPACE_BYTES
    assert for_card(DEFAULT, LARGE_GPU_BYTES).server_gpu_bytes == capacity.LARGE_GPU_WORKSPACE_BYTES


def test_the_plan_takes_the_card_for_its_server(tmp_path: Path) -> None:
    sizes = {
        gib: planned(tmp_path, gib, 60).stages["serve"].peak.components for gib in (24, 79.6, 140)
    }
    beside = {gib: parts["context, graphs, activations"] for gib, parts in sizes.items()}
    assert beside == {24: 2560 * MIB, 79.6: 3840 * MIB, 140: 3840 * MIB}
