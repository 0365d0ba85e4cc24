"""The streaming merge against PEFT's merge_and_unload of the same saved adapter, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from merge_house import rewrite
from merge_models import (
    assert_same_model,
    family,
    gpt2,
    llama,
    load,
    logits,
    make_base,
    phi3,
    qwen,
    stored,
    train,
)
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.merge import merge_adapter
from tuneserve.merge.proof import read_proof, verify

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Case:
    lora: dict[str, Any]
    config: Callable[..., Any] = llama
    model: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    tolerance: float = 0.0
    adapter_dtype: torch.dtype = torch.float32
    kinds: set[str] = field(default_factory=lambda: {"copy", "lora"})


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 2},
    "alpha_pattern": {r".*\.0\..*o_proj": 64, "down_proj": 3},
}
CASES = {
    "lora": Case({"target_modules": ALL}),
    "lora-fp16": Case({"target_modules": ALL}, dtype=torch.float16),
    "lora-fp32": Case({"target_modules": ALL}, dtype=torch.float32),
    # Adapters are often saved in 16 bits; PEFT computes with them in float32.
    "lora-of-bf16": Case({"target_modules": ALL}, adapter_dtype=torch.bfloat16),
    "lora-of-fp16": Case({"target_modules": ALL}, adapter_dtype=torch.float16),
    "dora-of-bf16": Case(
        {"target_modules": ALL, "use_dora": True},
        adapter_dtype=torch.bfloat16,
        kinds={"copy", "dora"},
    ),
    "rslora": Case({"target_modules": ALL, "use_rslora": True, "r": 16, "lora_alpha": 16}),
    "patterns": Case({"target_modules": ALL, **PATTERNS}),
    "rslora-patterns": Case({"target_modules": ALL, **PATTERNS, "use_rslora": True}),
    "regex-targets": Case({"target_modules": r".*\.(q|up)_proj"}),
    "some-layers": Case({"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "named-layers": Case(
        {"target_modules": ["up_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}
    ),
    "excluded": Case({"target_modules": ALL, "exclude_modules": ["down_proj"]}),
    "excluded-regex": Case({"target_modules": ALL, "exclude_modules": r".*layers\.0\..*"}),
    "all-linear": Case({"target_modules": "all-linear"}),
    "tied": Case({"target_modules": ALL}, model={"tie_word_embeddings": True}),
    "qwen-biases": Case({"target_modules": ALL}, config=qwen),
    "qwen-lora-bias": Case(
        {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
        config=qwen,
        kinds={"copy", "lora", "bias"},
    ),
    "qwen-bias-all": Case(
        {"target_modules": ["q_proj"], "bias": "all"},
        config=qwen,
        kinds={"copy", "lora", "replace"},
    ),
    "qwen-bias-lora-only": Case(
        {"target_modules": ["q_proj"], "bias": "lora_only"},
        config=qwen,
        kinds={"copy", "lora", "replace"},
    ),
    "qwen-lora-bias-and-bias-all": Case(
        {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "bias": "all"},
        config=qwen,
        kinds={"copy", "lora", "bias", "replace"},
    ),
    "qwen-dora-bias-all": Case(
        {"target_modules": ["q_proj", "o_proj"], "use_dora": True, "bias": "all"},
        config=qwen,
        kinds={"copy", "dora", "replace"},
    ),
    "neox-fused-bias-all": Case(
        {"target_modules": ["query_key_value", "dense"], "bias": "all"},
        config=lambda: family("gpt_neox"),
        kinds={"copy", "lora", "replace"},
    ),
    "falcon-fused": Case(
        {"target_modules": ["query_key_value", "dense"]}, config=lambda: family("falcon")
    ),
    # Experts are stored one by one and run as one tensor: the names target the shared expert alone.
    "experts-untouched": Case({"target_modules": ALL}, config=lambda: family("qwen2_moe")),
    "phi3-fused": Case({"target_modules": ["qkv_proj", "gate_up_proj"]}, config=phi3),
    "gpt2-conv1d": Case(
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, config=gpt2
    ),
    "gpt2-found-by-peft": Case({"target_modules": ["c_attn", "c_proj", "c_fc"]}, config=gpt2),
    "gpt2-lora-bias": Case(
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "lora_bias": True},
        config=gpt2,
        kinds={"copy", "lora", "bias"},
    ),
    "gpt2-bias-all": Case(
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "all"},
        config=gpt2,
        kinds={"copy", "lora", "replace"},
    ),
    "gpt2-saved-head-tied": Case(
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["lm_head"]},
        config=gpt2,
        kinds={"copy", "lora", "replace"},
    ),
    "gpt2-dora": Case(
        {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "use_dora": True},
        config=gpt2,
        kinds={"copy", "dora"},
    ),
    "dora": Case({"target_modules": ALL, "use_dora": True}, kinds={"copy", "dora"}),
    "dora-fp32": Case(
        {"target_modules": ALL, "use_dora": True}, dtype=torch.float32, kinds={"copy", "dora"}
    ),
    "dora-patterns": Case(
        {"target_modules": ALL, "use_dora": True, **PATTERNS}, kinds={"copy", "dora"}
    ),
    "head": Case({"target_modules": ["q_proj", "lm_head"]}),
    "embedding-fp32": Case(
        {"target_modules": ["q_proj", "embed_tokens"]}, dtype=torch.float32, kinds={"copy", "lora"}
    ),
    "embedding-dora-fp32": Case(
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
        dtype=torch.float32,
        kinds={"copy", "dora"},
    ),
    # PEFT rounds the update of an embedding to bfloat16 before it adds: 2**-8 of the update.
    "embedding-bf16": Case({"target_modules": ["embed_tokens"]}, tolerance=2**-8),
    "saved-untied": Case(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        kinds={"copy", "lora", "replace"},
    ),
    "saved-norm": Case(
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
        kinds={"copy", "lora", "replace"},
    ),
    # PEFT puts no adapter inside of what is trained whole, whatever the targets' names are.
    "saved-mlp-with-targets-inside": Case(
        {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]},
        kinds={"copy", "lora", "replace"},
    ),
    "saved-embedding-tied": Case(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        model={"tie_word_embeddings": True},
        kinds={"copy", "lora", "replace"},
    ),
    "saved-head-tied": Case(
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        model={"tie_word_embeddings": True},
        kinds={"copy", "lora", "replace"},
    ),
    "saved-both-tied": Case(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        model={"tie_word_embeddings": True},
        kinds={"copy", "lora", "replace"},
    ),
    "saved-both-ensured": Case(
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens", "lm_head"],
            "ensure_weight_tying": True,
        },
        model={"tie_word_embeddings": True},
        kinds={"copy", "lora", "replace"},
    ),
    "saved-embedding-ensured": Case(
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
        model={"tie_word_embeddings": True},
        kinds={"copy", "lora", "replace"},
    ),
    "tokens-tied": Case(
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 96, 7]},
        model={"tie_word_embeddings": True},
        kinds={"copy", "lora", "tokens"},
    ),
    "tokens-untied": Case(
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 96, 7]},
        kinds={"copy", "lora", "tokens"},
    ),
    "tokens-both": Case(
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]},
        },
        model={"tie_word_embeddings": True},
        kinds={"copy", "lora", "tokens"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_peft(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base = make_base(tmp_path / "base", case.config(**case.model), case.dtype)
    adapter = tmp_path / "adapter"
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", **case.lora})
    train(load(base), config).save_pretrained(adapter)
    rewrite(adapter, lambda t: t.update({k: v.to(case.adapter_dtype) for k, v in t.items()}))

    result = merge_adapter(base, adapter, tmp_path / "out", sample=False)

    expected = PeftModel.from_pretrained(load(base), adapter).merge_and_unload()
    assert_same_model(tmp_path / "out", expected, case.tolerance)
    proof = read_proof(tmp_path / "out")
    assert proof is not None
    assert set(proof["counts"]) == case.kinds
    assert result.merged + result.copied == len(Checkpoint.open(tmp_path / "out").tensors)
    verify(tmp_path / "out")
    before, after = stored(base), stored(tmp_path / "out")
    for tensor, value in before.items():
        if tensor not in proof["tensors"]:
            assert after[tensor].view(torch.uint8).equal(value.view(torch.uint8)), tensor
    flag = json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert flag == expected.config.tie_word_embeddings


APART = {
    "lora-head": {"target_modules": ["q_proj", "lm_head"]},
    "lora-embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora-both": {"target_modules": ["embed_tokens", "lm_head"]},
    "lora-embedding-ensured": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "lora-head-ensured": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "tokens-apart": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [4]},
    },
}


@pytest.mark.parametrize("name", APART)
def test_one_of_a_tied_pair_is_untied_and_computes_what_was_trained(
    name: str, tmp_path: Path
) -> None:
    """PEFT's own merge changes both of the pair here, so the live model is what counts."""
    base = make_base(tmp_path / "base", llama(tie_word_embeddings=True), torch.float32)
    config = LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **APART[name])
    live = train(load(base), config)
    live.save_pretrained(tmp_path / "adapter")

    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)

    merged = load(tmp_path / "out")
    assert merged.config.tie_word_embeddings is False
    torch.testing.assert_close(logits(merged), logits(live), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "extra", [{"trainable_token_indices": [3, 7]}, {"modules_to_save": ["lm_head"]}]
)
def test_a_tied_base_that_stores_its_head_as_well(extra: dict[str, Any], tmp_path: Path) -> None:
    """The stored copy follows the embedding where the pair stays tied, and is its own where not."""
    base = make_base(tmp_path / "base", llama(tie_word_embeddings=True), torch.float32)
    weights = stored(base)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **extra)
    live = train(load(base), config)
    live.save_pretrained(tmp_path / "adapter")

    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)

    after = stored(tmp_path / "out")
    follows = "trainable_token_indices" in extra
    assert after["lm_head.weight"].equal(after["model.embed_tokens.weight"]) is follows
    assert after["model.embed_tokens.weight"].equal(weights["lm_head.weight"]) is not follows
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(live), rtol=1e-4, atol=1e-4)


MORE_SEEDS = [pytest.param(n, marks=pytest.mark.full) for n in range(6, 60)]


@pytest.mark.parametrize("seed", [*range(6), *MORE_SEEDS])
def test_random_architectures(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd shapes, one to seven files, mixed dtypes, tied or not, tiles down to their floor."""
    chance = random.Random(seed)
    family = chance.choice([llama, qwen, phi3, gpt2])
    shape: dict[str, Any] = {"tie_word_embeddings": chance.random() < 0.5}
    if family is gpt2:
        heads = chance.choice([1, 2, 3])
        shape |= {"n_head": heads, "n_embd": heads * chance.choice([24, 50, 66])}
        targets = ["c_attn", "c_proj", "c_fc"]
    else:
        heads = chance.choice([2, 4])
        shape |= {
            "num_attention_heads": heads,
            "num_key_value_heads": chance.choice([1, 2]),
            "hidden_size": heads * chance.choice([18, 34, 66]),
            "intermediate_size": chance.randrange(70, 400),
            "vocab_size": chance.randrange(60, 400),
            "num_hidden_layers": chance.choice([1, 3]),
        }
        targets = ["qkv_proj", "o_proj", "gate_up_proj"] if family is phi3 else ALL
    dtype = chance.choice([torch.bfloat16, torch.float16, torch.float32])
    size = chance.choice(["5GB", "400KB", "200KB"])
    base = make_base(tmp_path / "base", family(**shape), dtype, size)
    if chance.random() < 0.5:  # norms are often kept in another dtype than the rest
        for path in base.glob("*.safetensors"):
            values = load_file(path)
            values = {k: v.float() if "norm" in k else v for k, v in values.items()}
            save_file(values, path, {"format": "pt"})
    settings = {
        "r": chance.choice([1, 3, 8, 32]),
        "lora_alpha": chance.choice([5, 16]),
        "use_rslora": chance.random() < 0.3,
        "use_dora": chance.random() < 0.3,
        "target_modules": chance.sample(targets, chance.randrange(1, len(targets) + 1)),
        "fan_in_fan_out": family is gpt2,
        "task_type": "CAUSAL_LM",
    }
    train(load(base), LoraConfig(**settings)).save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(
        "tuneserve.merge.tiling.DEFAULT_PIECE_BYTES", chance.choice([500, 10**4, 2**22])
    )

    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)

    theirs = PeftModel.from_pretrained(load(base), tmp_path / "adapter").merge_and_unload()
    expected, before, after = theirs.state_dict(), stored(base), stored(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, expected[name].to(value.dtype)), name
    assert Checkpoint.open(tmp_path / "out").shards[0].raw == Checkpoint.open(base).shards[0].raw
