"""How long stages take: every expected value is worked out here from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_shapes import QWEN2_7B
from tuneserve.config import RunFile
from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.asjson import as_json
from tuneserve.plan.build import plan_for
from tuneserve.plan.machine import Gpu, Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.rows import DataShape
from tuneserve.plan.times import (
    Times,
    about,
    copying_seconds,
    evaluate_seconds,
    merge_seconds,
    quantize_seconds,
    stage_times,
)
from tuneserve.plan.trainstep import Step
from tuneserve.runfile import parse_run

GIB = 2**30
ARCH = arch_from_config(QWEN2_7B)
STEP = Step(2, 2048, ARCH.linears, 16, True, kernels="fused")
CPU = replace(STEP, gpu=False)
H200 = 990e12
BYTES = 2 * 7_615_616_512
LINEAR = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)  # 6.5e9


def run(**changes: Any) -> RunFile:
    return parse_run({"name": "t", "model": {"base": "b"}, "data": {"train": ["a"]}, **changes})


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (2, "10 s"), (44, "40 s"), (57, "1 min"), (89, "1 min"), (200, "3 min"), (560, "9 min"),
        (600, "10 min"), (1300, "20 min"), (3300, "55 min"), (3500, "1 h"), (4100, "1 h 10 min"),
        (17_000, "4 h 40 min"), (40_000, "11 h"),
    ],
)  # fmt: skip
def test_words_without_false_precision(seconds: float, said: str) -> None:
    assert about(seconds) == said


def test_a_merge_is_what_the_disk_takes_and_nf4_is_made_on_one_core() -> None:
    once = 5 + BYTES / 0.48e9
    nf4 = LINEAR / 100e6
    assert merge_seconds(run(merge={"base": "original"}), ARCH) == pytest.approx(once)
    assert merge_seconds(run(train={"method": "lora"}), ARCH) == pytest.approx(once)
    assert merge_seconds(run(merge={"base": "nf4"}), ARCH) == pytest.approx(once + nf4)
    assert merge_seconds(run(), ARCH) == pytest.approx(2 * once + nf4)
    # As measured: 14.5 GB in 30 s, and 8.2 GB in 15 to 25 s.
    assert copying_seconds(14_483_501_045) == pytest.approx(30.2, rel=0.2)
    assert copying_seconds(8_208_506_846) == pytest.approx(20, rel=0.3)


def test_gptq_of_a_7b_by_hand() -> None:
    """Of a layer: seven matrices' columns, and for each token 4 operations a weight and the
    Hessians.
    """
    columns = 28 * (6 * 3584 + 18944)
    squares = 28 * (6 * 3584**2 + 18944**2)
    tokens = 128 * 512
    asked = run(quantize={"calibration_rows": 128})
    by_hand = (
        19 + BYTES / 0.83e9 + columns * 55e-6 + tokens * (4 * LINEAR + 2 * squares) / (0.1 * H200)
    )
    found = quantize_seconds(asked, ARCH, STEP, H200, 2048)
    assert found == pytest.approx(by_hand, rel=1e-6)
    # Bare GPTQModel took 135 s from loading to saving, imports left out.
    assert found - 19 == pytest.approx(135, rel=0.2)
    # Rows shorter than the limit hold fewer tokens; another card takes longer for them alone.
    shorter = quantize_seconds(asked, ARCH, STEP, H200, 256)
    assert shorter is not None and by_hand - shorter == pytest.approx(
        tokens / 2 * (4 * LINEAR + 2 * squares) / (0.1 * H200), rel=1e-6
    )


def test_gptq_of_12_layers_as_measured() -> None:
    arch = arch_from_config({**QWEN2_7B, "num_hidden_layers": 12})
    asked = run(quantize={"calibration_rows": 32})
    measured = 1.5 + 18.8 + 0.2 + 30.2 + 3.3 + 0.5 + 3.1 + 0.8
    assert quantize_seconds(asked, arch, STEP, H200, 512) == pytest.approx(measured, rel=0.05)


def test_awq_of_8_layers_as_measured() -> None:
    """Of 128 rows of 512 tokens, 20 products with each of 1.86e9 weights at a twentieth of the
    rate.
    """
    arch = arch_from_config({**QWEN2_7B, "num_hidden_layers": 8})
    asked = run(quantize={"methods": ["awq"], "calibration_rows": 128})
    found = quantize_seconds(asked, arch, STEP, H200, 2048)
    size = 2 * (LINEAR * 8 / 28 + 2 * 152064 * 3584)
    search = 20 * 2 * 65536 * LINEAR * 8 / 28 / (0.05 * H200)
    assert found == pytest.approx(19 + size / 0.83e9 + search, rel=1e-3)
    assert found == pytest.approx(139, rel=0.15)


def test_what_nobody_measured_has_no_time() -> None:
    assert quantize_seconds(run(quantize={"methods": ["awq"]}), ARCH, CPU, 1e12, 512) is None
    assert quantize_seconds(run(quantize={"methods": ["none"]}), ARCH, STEP, H200, 512) == 0
    assert quantize_seconds(run(), ARCH, STEP, None, 512) is None
    assert evaluate_seconds(ARCH, STEP, None, 512) is None
    found = stage_times(run(), ARCH, STEP, "a card", steps_seconds=None, row_tokens=2048)
    assert {name for name, seconds in found.stages.items() if seconds is None} == {
        "train", "evaluate", "quantize",
    }  # fmt: skip
    assert found.total is None and found.line() == ""


def test_evaluating_a_7b_by_hand() -> None:
    """Three models of 15.2 GB; 32,768 tokens twice for losses at 14 % of the rate, four times at
    8 %: base, adapter, merged, merged and rounded, and last answers by base and merged."""
    one = 2 * 32768 * (LINEAR + 152064 * 3584) / H200
    by_hand = 19 + 3 * BYTES / 1.46e9 + 2 * one / 0.14 + 4 * one / 0.08
    assert evaluate_seconds(ARCH, STEP, H200, 32768) == pytest.approx(by_hand, rel=1e-6)
    # As measured: 3.3 s for losses and 5.8 s for scores.
    assert one / 0.14 == pytest.approx(3.3, rel=0.05) and one / 0.08 == pytest.approx(5.8, rel=0.05)


def test_the_server_starts_as_measured() -> None:
    """118 and 152 s, 96 and 100 s: 16 bits and 4 bits differ by less than the runs do."""
    for methods in (["none"], ["gptq"]):
        times = stage_times(
            run(quantize={"methods": methods}),
            ARCH,
            STEP,
            "NVIDIA H200",
            steps_seconds=None,
            row_tokens=512,
        )
        assert times.stages["serve"] == pytest.approx((118 + 152 + 96 + 100) / 4, rel=0.05)


def test_the_demo_as_measured(tmp_path: Path) -> None:
    """Two cores with bfloat16: train 120 s, merge 8 (5 when nothing
    else ran), evaluate 18, quantize 42, serve 23; 757 s in
    all on two without, installing and proving included.
    """
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 2048, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    demo = run(
        model={"base": str(tmp_path)},
        data={"train": ["a"], "eval": ["b"], "max_length": 512},
        train={"max_steps": 64, "effective_batch": 8, "gradient_checkpointing": False},
        merge={"base": "nf4"},
        quantize={"group_size": 64, "calibration_rows": 32, "calibration_max_tokens": 128},
    )
    machine = Machine(None, 24 * GIB, 20 * GIB, 100 * GIB, "/store")
    data = DataShape((155, *[77] * 249))

    def planned(place: Machine) -> Plan:
        return plan_for(demo, base_dir=tmp_path, machine=place, data=data)

    found = planned(machine).times
    measured = {"train": 120, "merge": 8, "quantize": 42, "serve": 23}
    for name, seconds in measured.items():
        assert found.stages[name] == pytest.approx(seconds, rel=0.2), name
    # 18 s were 24 rows and four passes; it is planned for up to 64 rows, and six passes.
    assert 18 <= (found.stages["evaluate"] or 0) <= 18 * 64 / 24
    assert found.line() == "in all about 4 min, of which train 2 min"
    table = as_json(planned(machine))["table"]
    assert f"\n{'all':<10}{'':<5}{'':>11}{'':>12}" in table
    assert "time: in all about 4 min, of which train 2 min (without the download, " in table
    assert "as on two cores" in table
    slow = planned(replace(machine, cpu_bf16=False)).times.total
    assert slow == pytest.approx(757, rel=0.2)


def test_the_plan_says_the_whole_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    size = 140 * GIB
    machine = Machine(Gpu("NVIDIA H200", size, size), 64 * GIB, 60 * GIB, 500 * GIB, "/store")
    file = run(model={"base": str(tmp_path)}, data={"train": ["a"], "max_length": 2048})
    rows = DataShape((2048,) * 30 + (1024,) * 10)
    known = plan_for(file, base_dir=tmp_path, machine=machine, data=rows)
    data = json.loads(json.dumps(as_json(known)))
    seconds = {name: stage["seconds"] for name, stage in data["stages"].items()}
    # The steps, and before them 19 s of imports and 15.2 GB at 1.46 GB/s.
    assert seconds["train"] == pytest.approx(data["train"]["seconds"] + 19 + 10.4, rel=0.05)
    assert data["seconds"] == pytest.approx(sum(seconds.values()), rel=0.05)
    # 40 rows, a tenth of the whole held out beside them: 4 rows of 1,792 tokens are scored.
    one = 2 * 4 * 1792 * (LINEAR + 152064 * 3584) / H200
    by_hand = 19 + 31.3 + 2 * one / 0.14 + 4 * one / 0.08
    assert seconds["evaluate"] == pytest.approx(by_hand, rel=0.05)
    unknown = as_json(plan_for(file, base_dir=tmp_path, machine=machine))
    assert unknown["seconds"] is None and unknown["stages"]["train"]["seconds"] is None
    assert "beside train, whose rows are not known yet" in unknown["table"]


def test_nothing_is_said_where_little_is_known() -> None:
    assert Times({"train": None, "merge": 30.0, "quantize": None}).line() == ""
    assert Times({"train": None, "merge": 30.0}).line() == (
        "about 30 s beside train, whose rows are not known yet"
    )
    assert Times({"train": 3300.0, "merge": 60.0, "quantize": None}).line() == (
        "about 55 min, of which train 55 min; how long quantize takes was not measured"
    )
    assert Times({}).line() == ""
    assert Times({"train": 3300.0, "merge": 900.0}).line() == (
        "in all about 1 h 10 min, of which train 55 min"
    )
