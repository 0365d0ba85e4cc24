"""Parameter counts against the published ones, from config.json and from headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tuneserve.checkpoint.headers import TensorInfo
from tuneserve.errors import ModelError
from tuneserve.plan.arch import arch_from_config, lora_weights, with_headers


def config(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A config.json: hidden, layers, heads, key-value heads, MLP, vocabulary."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


QWEN2_7B = config("qwen2", (3584, 28, 28, 4, 18944, 152064), tie_word_embeddings=False)
LLAMA3_8B = config("llama", (4096, 32, 32, 8, 14336, 128256), tie_word_embeddings=False)

# The parameter counts on the models' pages.
PUBLISHED = [
    (
        "SmolLM2-135M",
        config("llama", (576, 30, 9, 3, 1536, 49152), tie_word_embeddings=True),
        134515008,
    ),
    ("Qwen2-7B", QWEN2_7B, 7615616512),
    ("Llama-3-8B", LLAMA3_8B, 8030261248),
    ("TinyLlama", config("llama", (2048, 22, 32, 4, 5632, 32000)), 1100048384),
    ("Mistral-7B", config("mistral", (4096, 32, 32, 8, 14336, 32000)), 7241732096),
    (
        "Qwen2.5-0.5B",
        config("qwen2", (896, 24, 14, 2, 4864, 151936), tie_word_embeddings=True),
        494032768,
    ),
    (
        "Qwen3-0.6B",
        config("qwen3", (1024, 28, 16, 8, 3072, 151936), tie_word_embeddings=True, head_dim=128),
        596049920,
    ),
    ("Gemma-2B", config("gemma", (2048, 18, 8, 1, 16384, 256000), head_dim=256), 2506172416),
    ("Gemma-2-2B", config("gemma2", (2304, 26, 8, 4, 9216, 256000), head_dim=256), 2614341888),
    ("Phi-3-mini", config("phi3", (3072, 32, 32, 32, 8192, 32064)), 3821079552),
]


@pytest.mark.parametrize(("name", "data", "count"), PUBLISHED, ids=[p[0] for p in PUBLISHED])
def test_published_parameter_counts(name: str, data: dict[str, Any], count: int) -> None:
    arch = arch_from_config(data)
    assert arch.weights == count
    assert arch.source == "config"


def test_adapter_sizes_as_measured() -> None:
    """Both settings of the measurements train 40,370,176 parameters."""
    arch = arch_from_config(QWEN2_7B)
    attention = [linear for linear in arch.linears if linear.in_attention]
    assert len(attention) == 4
    assert lora_weights(attention, 64) == lora_weights(arch.linears, 16) == 40370176


def test_kv_cache_per_token() -> None:
    """2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB, as often quoted for Llama-3-8B."""
    assert arch_from_config(LLAMA3_8B).kv_bytes_per_token() == 128 * 1024


def test_text_part_of_a_nested_config() -> None:
    nested = {"model_type": "gemma3", "text_config": {**QWEN2_7B, "model_type": "gemma3_text"}}
    assert arch_from_config(nested).hidden == 3584


def test_missing_sizes_are_all_named() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers, num_attention_heads, vocab_size"):
        arch_from_config({"model_type": "t5", "hidden_size": 512})


def test_unknown_family_is_a_guess() -> None:
    assert arch_from_config({**LLAMA3_8B, "model_type": "novel"}).source == "guess"


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, Path("model.safetensors"), "BF16", shape, 0, 0)
        for name, shape in shapes.items()
    }


def test_headers_decide_for_an_unknown_family() -> None:
    data = config("novel", (64, 2, 4, 4, 128, 100), tie_word_embeddings=False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (100, 64),
        "lm_head.weight": (100, 64),
        "model.norm.weight": (64,),
    }
    for layer in range(2):
        shapes[f"model.layers.{layer}.mixer.weight"] = (192, 64)
        shapes[f"model.layers.{layer}.out.weight"] = (64, 96)
        shapes[f"model.layers.{layer}.out.bias"] = (64,)
    arch = with_headers(arch_from_config(data), tensors(shapes))
    assert arch.source == "headers"
    assert {(t.name, t.in_features, t.out_features, t.count) for t in arch.linears} == {
        ("mixer", 64, 192, 2),
        ("out", 96, 64, 2),
    }
    assert arch.weights == 2 * 100 * 64 + 64 + 2 * (192 * 64 + 64 * 96 + 64)


def test_surplus_weights_are_said(caplog: pytest.LogCaptureFixture) -> None:
    data = config("llama", (64, 1, 4, 4, 128, 100), tie_word_embeddings=True)
    shapes = {
        "model.embed_tokens.weight": (100, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "extra": (500, 64),
    }
    found = with_headers(arch_from_config(data), tensors(shapes))
    assert found.other_weights == 500 * 64
    assert "planning with these" in caplog.text
