"""What is chosen and what is refused, for machines that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_shapes import QWEN2_7B
from tuneserve.config import RunFile
from tuneserve.errors import DiskFull, OutOfMemory, ResourceError, RunFileError
from tuneserve.plan import plan_run
from tuneserve.plan.asjson import as_json
from tuneserve.plan.build import plan_for
from tuneserve.plan.machine import Gpu, GpuProcess, Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.rows import DataShape
from tuneserve.plan.stage import card_left_idle, refuse
from tuneserve.plan.stage import run as run_stage
from tuneserve.runfile import parse_run
from tuneserve.stages import StageContext

GIB = 2**30
ROWS = DataShape((2048,) * 64)
RECOMPUTED = {"gradient_checkpointing": True}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    return tmp_path


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_plan_address` is about who does."""
    monkeypatch.setattr("tuneserve.release.entrance.check_early", lambda serve: None)


def run(base: Path, **changes: Any) -> RunFile:
    data = {"train": ["a"], "max_length": 2048}
    return parse_run({"name": "t", "model": {"base": str(base)}, "data": data, **changes})


def machine(gpu_gib: float | None = 80, *held: GpuProcess, disk_gib: float = 500) -> Machine:
    gpu = None
    if gpu_gib is not None:
        used = sum(process.used_bytes for process in held)
        gpu = Gpu("card", int(gpu_gib * GIB), int(gpu_gib * GIB) - used, held)
    return Machine(gpu, 64 * GIB, 60 * GIB, int(disk_gib * GIB), "/store")


def plan(base: Path, place: Machine, **changes: Any) -> Plan:
    return plan_for(run(base, **changes), base_dir=base, data=ROWS, machine=place)


def test_takes_the_largest_micro_batch_that_fits(base: Path) -> None:
    sizes = []
    for gib in (12, 16, 24, 40, 80):
        found = plan(base, machine(gib), train=RECOMPUTED)
        step = found.step
        assert step.micro_batch * step.accumulation == 16
        assert found.stages["train"].peak.total_bytes <= 0.88 * gib * GIB
        sizes.append(step.micro_batch)
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] == 16


def test_auto_recomputes_only_where_there_is_no_room(base: Path) -> None:
    """NF4 of 7B, all kept, takes about 12 GiB at one row of 2,048 and 6 more for each other."""
    kept = {gib: plan(base, machine(gib)).step for gib in (9, 24, 80)}
    assert kept[80].checkpointing is False and kept[80].micro_batch == 8
    assert kept[24].checkpointing is False and kept[24].micro_batch >= 1
    assert kept[9].checkpointing is True
    hints = as_json(plan(base, machine(24)))["hints"]["train"]
    assert hints["gradient_checkpointing"] is False
    assert plan(base, machine(9), train={"gradient_checkpointing": "offload"}).step.checkpointing
    # What the run file says is kept, whether it fits or not.
    wanted = plan(base, machine(9), train={"gradient_checkpointing": False})
    assert wanted.step.checkpointing is False and not wanted.stages["train"].fits


def test_seconds_are_said_for_known_cards(base: Path) -> None:
    """2 rows of 2,048 kept in 16 bits took 0.24 s on an H200."""
    place = machine(140)
    assert place.gpu is not None
    named = replace(place, gpu=replace(place.gpu, name="NVIDIA H200"))
    train = {"method": "lora", "effective_batch": 2, "lora": {"r": 64}}
    found = as_json(plan(base, named, train=train))["train"]
    assert found["seconds_per_step"] == pytest.approx(0.24, rel=0.15)
    assert as_json(plan(base, place, train=train))["train"]["seconds_per_step"] is None
    rows = DataShape((2048,) * 30 + (1024,) * 10)
    known = plan_for(
        run(base, train={**train, "epochs": 2}), base_dir=base, data=rows, machine=named
    )
    found = as_json(known)["train"]
    assert found["steps"] == 40  # 2 epochs of 40 rows, 2 a step; a row has 1,792 tokens on average
    assert found["seconds"] == pytest.approx(40 * found["seconds_per_step"] * 1792 / 2048, rel=0.05)
    assert "40 steps in about" in as_json(known)["table"]
    unknown = as_json(plan_for(run(base, train=train), base_dir=base, machine=named))["train"]
    assert unknown["steps"] is None and unknown["seconds"] is None


def test_the_table_counts_as_people_do(base: Path) -> None:
    for size, said in ((16, "16 rows of up to 2048 tokens a pass, 1 pass a step"),
                       (1, "1 row of up to 2048 tokens a pass, 16 passes a step")):  # fmt: skip
        train = {**RECOMPUTED, "micro_batch": size}
        assert f"train: {said}" in as_json(plan(base, machine(80), train=train))["table"]


def test_next_larger_micro_batch_would_not_fit(base: Path) -> None:
    place = machine(12)
    chosen = plan(base, place, train=RECOMPUTED).step.micro_batch
    larger = plan(base, place, train={**RECOMPUTED, "micro_batch": chosen * 2})
    assert not larger.stages["train"].fits


def test_effective_batch_shrinks_with_few_rows(base: Path) -> None:
    few = DataShape((2048,) * 3)
    served = run(base, quantize={"methods": ["none"]})  # three rows calibrate nothing
    found = plan_for(served, base_dir=base, data=few, machine=machine())
    assert (found.step.micro_batch, found.step.accumulation) == (3, 1)


def test_rows_decide_the_length_and_max_length_does_without_them(base: Path) -> None:
    known = plan_for(run(base), base_dir=base, data=DataShape((300,) * 64), machine=machine())
    unknown = plan_for(run(base), base_dir=base, machine=machine())
    assert (known.step.length, unknown.step.length) == (300, 2048)


def test_resident_server_counts_unless_stopped(base: Path) -> None:
    ours = GpuProcess(7, "VLLM::EngineCore", 12 * GIB, ours=True)
    share = plan(base, machine(24, ours), train=RECOMPUTED)
    stop = plan(base, machine(24, ours), serve={"while_training": "stop"}, train=RECOMPUTED)
    assert share.stages["train"].available_bytes == int(0.88 * 24 * GIB) - 12 * GIB
    assert stop.stages["train"].available_bytes == int(0.88 * 24 * GIB)
    assert share.step.micro_batch < stop.step.micro_batch


def test_foreign_process_is_named_and_its_end_advised(base: Path) -> None:
    stranger = GpuProcess(4711, "python", 20 * GIB)
    found = plan(base, machine(24, stranger))
    assert not found.fits
    with pytest.raises(OutOfMemory) as caught:
        refuse(found)
    assert caught.value.exit_status == 3
    assert "train needs" in caught.value.message
    assert "process 4711 (python, 20.0 GiB)" in caught.value.hint
    [advice] = [a for a in found.advice if "4711" in a.value and a.stage == "train"]
    assert advice.fits and advice.saves_bytes == 20 * GIB


def test_advice_is_true(base: Path) -> None:
    """Following an advice saves what it says, and fits where it says so."""
    place = machine(16)
    wasteful: dict[str, Any] = {"method": "lora", "gradient_checkpointing": False}
    before = plan(base, place, train=wasteful)
    assert [a.field for a in before.advice if a.stage == "train"] == [
        "train.gradient_checkpointing",
        "train.optimizer",
        "train.method",
        "train.lora.r",
        "data.max_length",
        "model.base",
    ]
    advice = before.advice[2]
    after = plan(base, place, train={**wasteful, "method": "qlora", "micro_batch": 1})
    saved = before.stages["train"].peak.total_bytes - after.stages["train"].peak.total_bytes
    assert saved == pytest.approx(advice.saves_bytes, rel=0.02)
    assert after.stages["train"].fits == advice.fits


def test_advice_of_later_stages_is_true(base: Path) -> None:
    """8 chats of 2,049 to 2,176 tokens are 8 x 18 x 128 x 57,344 B (28 blocks, 512 keys, twice)."""
    before = plan(base, machine(8))
    short = {name: stage for name, stage in before.stages.items() if not stage.fits}
    assert set(short) == {"evaluate", "quantize", "serve"}
    fields = {name: [a.field for a in before.advice if a.stage == name] for name in before.stages}
    assert fields == {
        "train": [],
        "merge": [],
        "evaluate": ["model.base"],
        "quantize": [
            "quantize.calibration_rows",
            "quantize.calibration_max_tokens",
            "model.base",
        ],
        "serve": ["serve.max_concurrent_chats", "model.base"],
    }
    for advice in before.advice:
        if advice.field == "model.base":
            stage = short[advice.stage]
            assert advice.saves_bytes == stage.peak.needed_bytes - 8 * GIB
            continue
        section, _, name = advice.field.partition(".")
        after = plan(base, machine(8), **{section: {name: int(advice.value)}}).stages[advice.stage]
        saved = short[advice.stage].peak.needed_bytes - after.peak.needed_bytes
        assert (saved, after.fits) == (advice.saves_bytes, advice.fits)
    chats = next(a for a in before.advice if a.stage == "serve")
    assert (chats.value, chats.saves_bytes, chats.fits) == ("2", 6 * 17 * 128 * 57_344, True)
    table = as_json(before)["table"]
    assert "\nserve does not fit:\n  1. serve.max_concurrent_chats: 2 saves 714.0 MiB, eno" in table
    with pytest.raises(OutOfMemory) as caught:
        refuse(before)
    assert "for serve, serve.max_concurrent_chats: 2 saves 714.0 MiB" in caught.value.hint


def test_advice_that_would_be_refused_is_not_given(base: Path) -> None:
    """28 x 3584 x 18944 = 1,901,068,288 weights of the down projections are trained whole: in 16
    bits, with as many gradients, and 2 x (1 + 4 / 256) B of moments each; the adapters of 28
    queries have 28 x 16 x 7168 = 3,211,264."""
    whole, factors = 1_901_068_288, 3_211_264
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}
    found = plan(base, machine(24), train={"method": "lora", "lora": lora, "micro_batch": 2})
    parts = found.stages["train"].peak.components
    assert parts["modules trained whole"] == 2 * whole
    assert parts["optimizer"] == int((whole + factors) * 2 * (1 + 4 / 256))
    assert parts["gradients"] == 2 * (whole + factors)
    fields = [advice.field for advice in found.advice]
    assert "train.lora.modules_to_save" in fields and "train.method" not in fields
    other = plan(base, machine(12), train={"method": "lora"})
    assert "train.method" in [advice.field for advice in other.advice]


def test_what_is_left_at_the_bottom_is_in_the_hints(base: Path) -> None:
    """Of one row with checkpoints in host memory: halving the rank saves, by hand, 20,185,088
    numbers of 2 B, as many gradients, and 2 x (1 + 4 / 256) B of moments: 116 MiB."""
    left = as_json(plan(base, machine(24)))["hints"]["train"]["advice"]
    assert [text.partition(" saves ")[0] for text in left] == [
        "train.optimizer: paged_adamw_8bit",
        "train.lora.r: 8",
        "data.max_length: 1024",
    ]
    assert " saves 116.2 MiB (a smaller adapter)" in left[1]


def test_blue_green_and_hold(base: Path) -> None:
    ours = GpuProcess(7, "vllm", 10 * GIB, ours=True)
    place = machine(16, ours)
    beside = plan(base, place)
    assert not beside.stages["serve"].fits and not beside.blue_green_fits
    instead = plan(base, place, serve={"rollout": "hold"})
    assert instead.stages["serve"].fits


def test_serve_length_gives_way_until_two_servers_fit(base: Path) -> None:
    small, large = plan(base, machine(24)), plan(base, machine(141))
    assert large.serving.max_model_len == 32768
    assert 2048 <= small.serving.max_model_len < 32768
    assert small.blue_green_fits and large.blue_green_fits
    fixed = plan(base, machine(24), serve={"max_model_len": 30000})
    assert fixed.serving.max_model_len == 30000


def test_disk_is_counted_before_it_is_full(base: Path) -> None:
    place = replace(machine(80), disk_free_bytes=20 * GIB)
    found = plan(base, place)
    assert found.disk_bytes > 2 * 2 * 7_615_616_512  # two merges in 16 bits
    assert found.download_bytes == 2 * 7_615_616_512
    with pytest.raises(DiskFull, match="/store"):
        refuse(found)


def test_ram_is_checked_for_the_merge(base: Path) -> None:
    place = replace(machine(80), ram_free_bytes=200 * 2**20)
    with pytest.raises(OutOfMemory, match=r"merge needs 700.0 MiB of memory"):
        refuse(plan(base, place))


def test_supposed_card_asks_nothing_of_this_machine(base: Path) -> None:
    found = plan_for(run(base), base_dir=base, gpu_memory_bytes=24 * GIB)
    assert found.machine.supposed and found.stages["merge"].fits
    assert found.stages["train"].available_bytes == int(0.88 * 24 * GIB)
    tiny = replace(found.machine, disk_free_bytes=0)
    assert plan_for(run(base), base_dir=base, machine=tiny).disk_fits


def test_cpu_plans_in_memory(base: Path) -> None:
    found = plan(base, machine(None))
    assert {stage.device for stage in found.stages.values()} == {"RAM"}
    assert found.step.micro_batch == 1  # one row of 2048 tokens is the most that pays there


def test_problems_come_before_sizes(base: Path) -> None:
    bad: dict[str, Any] = {"lora": {"target_modules": ["query", "key"]}}
    with pytest.raises(RunFileError) as caught:
        plan(base, machine(1), train=bad, serve={"max_model_len": 40000})
    assert len(caught.value.details["problems"]) == 3
    assert caught.value.exit_status == 2


def test_json_keys(base: Path) -> None:
    data = json.loads(json.dumps(as_json(plan(base, machine(24)))))
    assert data["fits"] is True
    assert set(data["stages"]) == {"train", "merge", "quantize", "evaluate", "serve"}
    for stage in data["stages"].values():
        assert stage["peak_bytes"] == sum(stage["components"].values())
        assert stage["disk_bytes"] >= 0
    assert data["disk_bytes"] > sum(stage["disk_bytes"] for stage in data["stages"].values())
    assert data["train"]["micro_batch"] * data["train"]["gradient_accumulation"] == 16
    assert data["serve"]["kv_cache_bytes"] > 0 and data["serve"]["max_model_len"] > 0
    assert data["hints"]["train"]["micro_batch"] == data["train"]["micro_batch"]
    for name in data["stages"]:
        assert f"\n{name} " in data["table"]


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve.doctor._installed", {"torch": "2.13.0"}.get)


def test_stage_and_command_give_the_same(
    base: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve.plan.build.look", lambda *_, **__: machine(80))
    context = StageContext(run(base), base, {}, base / "out", base / "work")
    shown = plan_run(run(base))
    (gone,) = shown.pop("refused_for")  # a stage of a run that was not refused has none
    assert "data path" in gone and run_stage(context) == shown


def test_data_that_are_not_there_yet_are_said(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tuneserve.plan.build.look", lambda *_, **__: machine(80))
    (tmp_path / "here.jsonl").touch()
    there = [str(tmp_path / "here.jsonl"), str(tmp_path / "h*.jsonl"), "s3://bucket/a.jsonl"]
    gone = [str(tmp_path / "gone.jsonl"), str(tmp_path / "e*.jsonl")]
    paths = {"train": [*there, gone[0]], "eval": [gone[1]]}
    *_, refused_for = plan_run(run(base, data=paths))["refused_for"]
    assert refused_for.startswith("2 data paths match nothing")
    (said,) = (m for r in caplog.records if "match nothing" in (m := r.getMessage()))
    assert said.startswith("the run would be refused: 2 data paths match nothing")
    assert all(path in said for path in gone) and not any(path in said for path in there)


def test_a_base_that_the_run_would_refuse_is_said(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve.plan.build.look", lambda *_, **__: machine(80))
    config = json.loads((base / "config.json").read_text())
    packed = {**config, "quantization_config": {"quant_method": "gptq"}, "auto_map": {}}
    (base / "config.json").write_text(json.dumps(packed))
    *_, refused_for = plan_run(run(base))["refused_for"]
    assert "already quantized (gptq)" in refused_for and "trust_remote_code" in refused_for


def test_a_card_that_torch_cannot_use_stops_the_run(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever installed for the CPU beside a card learns it before an hour of training."""
    monkeypatch.setattr("tuneserve.doctor._installed", {"torch": "2.13.0+cpu"}.get)
    monkeypatch.setattr("tuneserve.plan.build.look", lambda *_, **__: machine(80))

    def start(run_file: RunFile) -> None:
        run_stage(StageContext(run_file, base, {}, base / "out", base / "work"))

    with pytest.raises(ResourceError) as caught:
        start(run(base))
    error = caught.value
    assert (type(error), error.exit_status, error.retryable) == (ResourceError, 3, False)
    assert error.message.startswith("torch 2.13.0+cpu cannot use the card: ")
    assert error.expected == "a torch that is built for CUDA"
    assert "rm -rf .venv; make venv ACCEL=cuda" in error.hint
    assert "CUDA_VISIBLE_DEVICES=` (before `prefect worker start`" in error.hint
    assert not (base / "out").exists() and not (base / "work").exists()

    plan_run(run(base))  # a plan alone spends nothing: it says so and goes on
    assert "torch 2.13.0+cpu cannot use the card" in caplog.text
    start(run(base, engines={"train": {"python": "/opt/cuda/bin/python"}}))
    # Hidden by CUDA_VISIBLE_DEVICES, or only supposed.
    for other in (machine(None), replace(machine(80), supposed=True)):
        assert card_left_idle(run(base), other) is None


def test_command_shows_what_does_not_fit_and_the_stage_raises(
    base: Path, cuda_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneserve.plan.build.look", lambda *_, **__: machine(6))
    shown = plan_run(run(base))
    assert shown["fits"] is False and "train does not fit" in shown["table"]
    with pytest.raises(OutOfMemory):
        run_stage(StageContext(run(base), base, {}, base / "out", base / "work"))
    assert not (base / "out").exists()


def test_a_card_without_bfloat16_trains_float32_adapters_on_float16(base: Path) -> None:
    """Rank 16 on all linear layers of Qwen2-7B, by hand: inputs and outputs of a block are
    2 x 7168 (q, o) + 2 x 4096 (k, v) + 3 x 22528 (gate, up, down) = 90,112; times 16 and 28
    blocks 40,370,176 numbers."""
    numbers = 40_370_176
    lora = {"r": 16, "target_modules": "all-linear"}
    train = {**RECOMPUTED, "lora": lora, "micro_batch": 2}
    old, new, unknown = (
        plan(
            base,
            replace(machine(16), gpu=Gpu("T4", 16 * GIB, 16 * GIB, (), capability)),
            train=train,
        )
        for capability in ((7, 5), (8, 0), None)
    )
    assert (old.step.element_bytes, old.step.adapter_element_bytes, old.step.half) == (2, 4, True)
    assert (new.step.element_bytes, new.step.adapter_element_bytes, new.step.half) == (2, 2, False)
    assert unknown.step == new.step  # a card that is only supposed has bfloat16
    ours, theirs = (dict(p.stages["train"].peak.components) for p in (old, new))
    assert (ours["adapters"], theirs["adapters"]) == (4 * numbers, 2 * numbers)
    assert (ours["gradients"], theirs["gradients"]) == (4 * numbers, 2 * numbers)
    assert ours.pop("adapters in float16") == 2 * numbers
    rest = ours.keys() - {"adapters", "gradients", "allocator slack"}
    assert {name: ours[name] for name in rest} == {name: theirs[name] for name in rest}


@pytest.mark.parametrize(("family", "sizes"), [("llama", (2, 4)), ("gemma2", (4, 4))])
def test_a_family_that_float16_does_not_hold_is_computed_in_float32(
    base: Path, family: str, sizes: tuple[int, int]
) -> None:
    (base / "config.json").write_text(
        json.dumps({**QWEN2_7B, "model_type": family, "head_dim": 128})
    )
    place = replace(machine(80), gpu=Gpu("T4", 80 * GIB, 80 * GIB, (), (7, 5)))
    step = plan(base, place).step
    assert (step.element_bytes, step.adapter_element_bytes) == sizes
