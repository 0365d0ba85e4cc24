"""The merge with its neighbours: NF4, the layers of PEFT, the stage."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from merge_house import LINEARS, InProcessSampler, peft_adapter, real_base
from tuneserve.artifacts import Artifact
from tuneserve.errors import AdapterError
from tuneserve.merge import merge_adapter
from tuneserve.merge.proof import read_proof, verify
from tuneserve.runfile import parse_run
from tuneserve.stages import StageContext

pytestmark = pytest.mark.filterwarnings("ignore")

QUANTIZATION = {
    "quant_type": "nf4",
    "double_quant": True,
    "blocksize": 64,
    "compute_dtype": "bfloat16",
}


def linears(base: Path) -> list[str]:
    names = load_file(base / "model.safetensors")
    return [n.removesuffix(".weight") for n in names if n.split(".")[-2] in LINEARS]


def sidecar(base: Path, adapter: Path, **changes: Any) -> None:
    record = {
        "method": "qlora",
        "quantization": {**QUANTIZATION, **changes},
        "quantized_modules": linears(base),
    }
    (adapter / "training.json").write_text(json.dumps(record))


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"target_modules": ["q_proj"]}])
def test_nf4_is_what_bitsandbytes_gives_the_adapter(
    double_quant: bool, lora: dict[str, Any], tmp_path: Path
) -> None:
    """Only quantized modules go through NF4: embeddings, norms and head stay byte for byte."""
    import bitsandbytes.functional as functional

    base = real_base(tmp_path / "base")
    adapter = peft_adapter(base, tmp_path / "adapter", **lora)
    sidecar(base, adapter, double_quant=double_quant)

    merge_adapter(base, adapter, tmp_path / "out", base_weights="nf4", sample=False)

    seen = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    with torch.no_grad():
        for name in linears(base):
            weight = seen.get_submodule(name).weight
            codes, state = functional.quantize_4bit(
                weight.data, compress_statistics=double_quant, quant_type="nf4"
            )
            weight.copy_(functional.dequantize_4bit(codes, state))
    expected = PeftModel.from_pretrained(seen, adapter).merge_and_unload().state_dict()
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == expected.keys()
    for name, value in after.items():
        assert torch.equal(value, expected[name]), name
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(after[name], before[name])
    assert all(v.dtype == torch.bfloat16 for v in after.values())
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


def test_nf4_in_many_tiles_equals_nf4_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = real_base(tmp_path / "base")
    adapter = peft_adapter(base, tmp_path / "adapter")
    sidecar(base, adapter)
    merge_adapter(base, adapter, tmp_path / "whole", base_weights="nf4", sample=False)
    monkeypatch.setattr("tuneserve.merge.tiling.DEFAULT_PIECE_BYTES", 1000)
    merge_adapter(base, adapter, tmp_path / "tiles", base_weights="nf4", sample=False)
    name = "model.safetensors"
    assert (tmp_path / "tiles" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_round_trip_is_that_of_bitsandbytes_to_the_bit(
    dtype: torch.dtype, quant_type: str
) -> None:
    """Blocks of nothing, values on the bound between two codes, one outlier, infinity, a part of a
    block.
    """
    import bitsandbytes.functional as functional

    from tuneserve.merge.nf4 import Nf4Roundtrip

    code = functional.get_4bit_type(quant_type, device="cpu").sort().values
    special = torch.zeros(6, 64)
    special[1, :16], special[2, :15] = code, (code[:-1] + code[1:]) / 2
    special[2, 15], special[3, 5], special[4] = 1.0, 6e4, 1e-7
    special[5, 0], special[5, 1:] = torch.inf, -1.0
    torch.manual_seed(0)
    for values in (special, torch.randn(700, 448) * 0.02, torch.randn(3, 50)):
        weight = values.to(dtype)
        expected = functional.dequantize_4bit(
            *functional.quantize_4bit(weight.clone(), blocksize=64, quant_type=quant_type)
        )
        found = weight.clone()
        settings = {"quant_type": quant_type, "double_quant": False}
        output = SimpleNamespace(shape=weight.shape)
        Nf4Roundtrip(settings).prepare(output, found.__getitem__, 1)(found, 0)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_nf4_needs_the_training_record(tmp_path: Path) -> None:
    base = real_base(tmp_path / "base")
    adapter = peft_adapter(base, tmp_path / "adapter")
    with pytest.raises(AdapterError, match="does not say how its base was quantized"):
        merge_adapter(base, adapter, tmp_path / "out", base_weights="nf4", sample=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["lora", "dora", "embedding", "conv1d", "nf4"])
def test_samples_are_compared_with_pefts_own_layer(kind: str, tmp_path: Path) -> None:
    base = real_base(tmp_path / "base")
    lora: dict[str, Any] = {}
    if kind == "dora":
        lora = {"use_dora": True}
    elif kind == "embedding":
        lora = {"target_modules": ["embed_tokens", "q_proj"]}
    elif kind == "conv1d":
        lora = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=160, n_embd=96, n_layer=2, n_head=4)
        base = tmp_path / "gpt2"
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(base)
    adapter = peft_adapter(base, tmp_path / "adapter", **lora)
    if kind == "nf4":
        sidecar(base, adapter)
    weights: Any = "nf4" if kind == "nf4" else "original"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuneserve.merge.sample.Sampler", InProcessSampler)
        result = merge_adapter(base, adapter, tmp_path / "out", base_weights=weights)

    assert result.sampled >= 3
    inexact = 1 if kind == "embedding" else 0  # PEFT rounds an embedding's update first
    assert result.sampled_equal == result.sampled - inexact


def test_the_stage_fills_an_artifact_and_checks_with_peft(tmp_path: Path) -> None:
    """The whole stage, with the comparison in its own process; the folder loads strictly."""
    from tuneserve.merge.stage import run

    base = real_base(tmp_path / "base")
    adapter = peft_adapter(base, tmp_path / "adapter")
    sidecar(base, adapter)
    (tmp_path / "out").mkdir()
    left = tmp_path / "work" / "merged"  # by an attempt that was killed while it moved its files
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("whole, but its proof is gone")
    context = StageContext(
        run=parse_run({"name": "x", "model": {"base": str(base)}, "data": {"train": ["x"]}}),
        base=base,
        inputs={"adapter": Artifact("adapter-1", adapter, {})},
        out=tmp_path / "out",
        work=tmp_path / "work",
        settings={"base_weights": "original"},
    )
    metrics = run(context)
    json.dumps(metrics)
    assert metrics["merged"] == 14 and metrics["copied"] == 7
    assert metrics["sampled"] == metrics["sampled_equal"] == 8
    assert 0.5 < metrics["delta_survival"] <= 1
    assert not list((tmp_path / "work").iterdir())
    verify(tmp_path / "out")
    proof = read_proof(tmp_path / "out")
    assert proof is not None and "key" in proof
    assert str(tmp_path) not in json.dumps(proof)
    assert (tmp_path / "out" / "change.png").read_bytes().startswith(b"\x89PNG")
    name = "model.layers.1.mlp.down_proj"
    trained = load_file(adapter / "adapter_model.safetensors")
    a, b = (trained[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    weight = load_file(base / "model.safetensors")[f"{name}.weight"].float()
    relative = float((b @ a * 2).norm() / weight.norm())  # alpha / r is 2
    assert proof["tensors"][f"{name}.weight"]["delta_relative"] == pytest.approx(relative, rel=0.01)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
