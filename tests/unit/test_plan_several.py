"""Several GPUs in the plan: memory of each worked out by hand, which way is worth it, what cannot
be cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_shapes import QWEN2_7B
from tuneserve.errors import RunFileError
from tuneserve.parallel import ServedShape, key_value_share, tensor_parallel_problems
from tuneserve.plan import checks
from tuneserve.plan.asjson import as_json
from tuneserve.plan.build import plan_for
from tuneserve.plan.machine import Gpu, Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.rows import DataShape
from tuneserve.runfile import parse_run

GIB = 2**30
QWEN2 = ServedShape(28, 4, 128, 18944, 152064)
SMOLLM2 = ServedShape(9, 3, 64, 1536, 49152)
# r (3584 + 3584) for q and o, r (3584 + 512) for k and v, r (3584 + 18944) three times, 28 layers
TRAINED = 28 * 64 * (2 * 7168 + 2 * 4096 + 3 * 22528)
EMBEDDING_AND_HEAD = 2 * 152064 * 3584


def plan(
    folder: Path,
    *,
    cards: int = 8,
    gib: float = 140,
    rows: int = 64,
    capability: tuple[int, int] | None = None,
    model: dict[str, Any] | None = None,
    **train: Any,
) -> Plan:
    (folder / "config.json").write_text(json.dumps({**QWEN2_7B, **(model or {})}))
    settings = {
        "method": "lora",
        "lora": {"r": 64, **train.pop("lora", {})},
        "effective_batch": 16,
        "micro_batch": 2,
        "gradient_checkpointing": True,
        **train,
    }
    run = parse_run(
        {
            "name": "t",
            "model": {"base": str(folder)},
            "data": {"train": ["a"], "max_length": 2048},
            "train": settings,
            "quantize": {"calibration_rows": min(rows, 256)},
        }
    )
    card = Gpu("card", int(gib * GIB), int(gib * GIB), capability=capability)
    place = Machine(card, 256 * GIB, 256 * GIB, 2**50, "/store", gpus=cards)
    data = DataShape((2048,) * rows)
    return plan_for(run, base_dir=folder, data=data, machine=place)


def parts(found: Plan) -> dict[str, int]:
    return dict(found.stages["train"].peak.components)


def test_ddp_copies_all_of_it(tmp_path: Path) -> None:
    one, two = plan(tmp_path), plan(tmp_path, gpus=2)
    assert two.step.accumulation == one.step.accumulation // 2 == 4
    for name in ("weights: linear layers", "adapters", "optimizer", "activations: checkpoints"):
        assert parts(two)[name] == parts(one)[name]
    assert parts(two)["gradients"] == 2 * TRAINED
    assert parts(two)["NCCL"] > 0 and "NCCL" not in parts(one)
    assert as_json(two)["train"]["gpus"] == 2
    assert "on each of 2 GPUs" in as_json(two)["table"]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_zero_cuts_gradients_and_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setattr(checks, "_installed", lambda *_: True)
    found = parts(plan(tmp_path, gpus=gpus, zero=2))
    # float32 weights and two 8-bit moments with a float32 scale per 256
    assert found["optimizer"] == int(TRAINED * (4 + 2 * (1 + 4 / 256)) / gpus)
    # 16 bits, and their float32 copy for the step
    assert found["gradients"] == int(TRAINED * (2 + 4) / gpus)
    assert found["ZeRO-2 buckets"] == 2 * 50_000_000 * 2
    assert found["adapters"] == 2 * TRAINED


def test_which_is_worth_it(tmp_path: Path) -> None:
    small = plan(tmp_path, gpus=2).several
    assert small is not None and small.zero == 0
    assert [way.name for way in small.ways] == ["DDP", "ZeRO-2"]
    assert "train.zero: 0" in small.why
    whole = {"modules_to_save": ["embed_tokens", "lm_head"]}
    large = plan(tmp_path, gpus=8, lora=whole).several
    assert large is not None and large.zero == 2 and "worth it" in large.why
    ddp, zero = large.ways
    # DDP: 2 bytes of gradient and 2.03 of moments; ZeRO-2: an eighth of 6 and of 6.03, and buckets
    trained = TRAINED + EMBEDDING_AND_HEAD
    saved = trained * (2 + 2.03125) - trained * (6 + 6.03125) / 8 - 2 * 50_000_000 * 2
    assert ddp.peak_bytes - zero.peak_bytes == pytest.approx(saved, rel=0.01)
    quantized = plan(tmp_path, gpus=2, method="qlora").several
    assert quantized is not None and quantized.zero == 0
    assert "4-bit" in quantized.why and len(quantized.ways) == 1
    assert plan(tmp_path).several is None


def test_only_zero_fits(tmp_path: Path) -> None:
    whole = {"modules_to_save": ["embed_tokens", "lm_head"]}
    roomy = plan(tmp_path, gpus=8, lora=whole, target_utilization=1.0).several
    assert roomy is not None
    ddp, zero = (way.peak_bytes for way in roomy.ways)
    between = (ddp + zero) / 2 / GIB
    tight = plan(tmp_path, gpus=8, gib=between, lora=whole, target_utilization=1.0)
    assert tight.several is not None and tight.several.zero == 2
    assert "only ZeRO-2 fits" in tight.several.why
    assert "train.zero" in [advice.field for advice in tight.advice if advice.fits]


def test_more_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="train.gpus: 2, and this machine shows 1"):
        plan(tmp_path, cards=1, gpus=2)


def test_fewer_rows_than_a_step_that_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="7 rows a step .* set train.gpus: 1, or .*batch: 6"):
        plan(tmp_path, rows=7, gpus=2, micro_batch="auto")
    assert plan(tmp_path, rows=6, gpus=2, micro_batch="auto").step.accumulation > 0


def test_zero_needs_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything starts, and never advised; a family in float32 may have it."""
    monkeypatch.setattr(checks, "_installed", lambda *_: True)
    with pytest.raises(RunFileError, match="train.zero: 2 needs bfloat16, which this GPU has not"):
        plan(tmp_path, gpus=2, zero=2, capability=(7, 5))
    gemma = {"model_type": "gemma2", "head_dim": 128}
    assert plan(tmp_path, gpus=2, zero=2, capability=(7, 5), model=gemma).step.zero == 2
    assert plan(tmp_path, gpus=2, zero=2, capability=(8, 0)).step.zero == 2

    whole = {"modules_to_save": ["embed_tokens", "lm_head"]}
    old = plan(tmp_path, gpus=8, gib=16, lora=whole, capability=(7, 0))
    assert old.several is not None and old.several.zero == 0 and len(old.several.ways) == 1
    assert "not for GPUs without bfloat16" in old.several.why
    assert old.advice and "train.zero" not in [advice.field for advice in old.advice]


def test_zero_without_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_installed", lambda *_: False)
    with pytest.raises(RunFileError, match="needs DeepSpeed"):
        plan(tmp_path, gpus=2, zero=2)


@pytest.mark.parametrize(
    ("gpus", "shape", "what"),
    [
        (8, QWEN2, "28 attention heads"),
        (2, SMOLLM2, "9 attention heads"),
        (4, ServedShape(12, 3, 64, 1536, 49152), "3 KV heads"),
        (4, ServedShape(32, 8, 128, 11010, 32000), "11010 columns"),
        (5, ServedShape(25, 5, 64, 6400, 50257), "padded to 50304"),
    ],
)
def test_what_vllm_could_not_cut(gpus: int, shape: ServedShape, what: str) -> None:
    found = tensor_parallel_problems(gpus, shape)
    assert any(what in text for text in found)
    assert all(text.startswith(f"serve.tensor_parallel: {gpus}: ") for text in found)


def test_what_vllm_cuts() -> None:
    assert tensor_parallel_problems(4, QWEN2) == []
    assert tensor_parallel_problems(3, SMOLLM2) == []
    # 8 KV heads on 16 GPUs: each is kept twice.
    assert tensor_parallel_problems(16, ServedShape(32, 8, 128, 14336, 128256)) == []
    assert key_value_share(16, 8) == 1 / 8 and key_value_share(4, 8) == 1 / 4


def test_groups_must_not_be_cut() -> None:
    """576 inputs of o_proj are 192 a GPU: three groups of 64, one and a half of 128."""
    three = {name: getattr(SMOLLM2, name) for name in vars(SMOLLM2)}
    assert tensor_parallel_problems(3, ServedShape(**{**three, "group_size": 64})) == []
    [problem] = tensor_parallel_problems(3, ServedShape(**{**three, "group_size": 128}))
    assert "o_proj's 576 inputs would be 192 a GPU" in problem and "1 would work" in problem
    assert tensor_parallel_problems(3, ServedShape(**{**three, "group_size": -1})) == []
    qwen = ServedShape(28, 4, 128, 18944, 152064, 128)
    assert tensor_parallel_problems(4, qwen) == []  # 18944 / 4 = 37 x 128


def test_the_shape_in_a_checkpoint() -> None:
    stored = {**QWEN2_7B, "quantization_config": {"quant_method": "gptq", "group_size": 128}}
    assert ServedShape.from_config(stored) == ServedShape(28, 4, 128, 18944, 152064, 128)
    assert ServedShape.from_config(QWEN2_7B) == QWEN2


def test_a_server_of_several_gpus_is_planned_by_its_share(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    card = Gpu("card", 80 * GIB, 80 * GIB)
    place = Machine(card, 256 * GIB, 256 * GIB, 2**50, "/store", gpus=8)

    def served(gpus: int) -> dict[str, int]:
        run = parse_run(
            {
                "name": "t",
                "model": {"base": str(tmp_path)},
                "data": {"train": ["a"], "max_length": 2048},
                "serve": {"tensor_parallel": gpus, "max_model_len": 4096},
                "quantize": {"methods": ["none"]},
            }
        )
        found = plan_for(run, base_dir=tmp_path, data=DataShape((2048,) * 64), machine=place)
        return dict(found.stages["serve"].peak.components)

    one, four = served(1), served(4)
    assert four["weights"] == pytest.approx(one["weights"] / 4, abs=4)
    assert four["KV cache"] == one["KV cache"] // 4
    with pytest.raises(RunFileError, match="28 attention heads"):
        served(8)
