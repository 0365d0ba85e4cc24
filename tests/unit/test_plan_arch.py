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


def experts(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return config(model_type, sizes, tie_word_embeddings=False, **more)


MIXTRAL = experts("mixtral", (4096, 32, 32, 8, 14336, 32000), num_local_experts=8)
# Parameters of other families, again those of the models' pages.
OTHERS = [
    ("Mixtral-8x7B", MIXTRAL, 46702792704),
    (
        "Qwen1.5-MoE-A2.7B",
        experts(
            "qwen2_moe",
            (2048, 24, 16, 16, 5632, 151936),
            num_experts=60,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14315784192,
    ),
    (
        "Qwen3-30B-A3B",
        experts(
            "qwen3_moe",
            (2048, 48, 32, 4, 6144, 151936),
            head_dim=128,
            num_experts=128,
            moe_intermediate_size=768,
        ),
        30532122624,
    ),
    (
        "gpt-oss-20b",
        experts("gpt_oss", (2880, 24, 64, 8, 2880, 201088), head_dim=64, num_local_experts=32),
        20914757184 - 24 * 64,  # without the attention's sinks
    ),
    (
        "DeepSeek-V2-Lite",
        experts(
            "deepseek_v2",
            (2048, 27, 16, 16, 10944, 102400),
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
        ),
        15706484224 - 27 * 512,  # without the norms inside the attention
    ),
    (
        "GPT-2",
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124439808,
    ),
    (
        "OPT-125M",
        {
            "model_type": "opt",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "vocab_size": 50272,
        },
        125239296,
    ),
    (
        "Phi-2",
        {**config("phi", (2560, 32, 32, 32, 10240, 51200)), "tie_word_embeddings": False},
        2779683840,
    ),
    (
        "Falcon-7B",
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
            "vocab_size": 65024,
        },
        6921720704,
    ),
    (
        "GPT-NeoX-20B",
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "vocab_size": 50432,
        },
        20554567680,
    ),
]


@pytest.mark.parametrize(("name", "data", "count"), OTHERS, ids=[p[0] for p in OTHERS])
def test_published_counts_of_other_families(name: str, data: dict[str, Any], count: int) -> None:
    arch = arch_from_config(data)
    assert arch.weights == count
    assert arch.source == "config"


def test_experts_are_no_linear_layers() -> None:
    """They run as one tensor: no adapter, and 16 bits beside NF4. 8 x 3 x 4096 x 14336 a block."""
    arch = arch_from_config(MIXTRAL)
    assert arch.linear_names() == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert arch.linear_weights == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert arch.other_weights == 32 * 8 * (3 * 4096 * 14336 + 4096) + 65 * 4096
    stored = {
        "model.embed_tokens.weight": (32000, 4096),
        "lm_head.weight": (32000, 4096),
        "model.layers.0.self_attn.q_proj.weight": (4096, 4096),
        "model.layers.0.block_sparse_moe.gate.weight": (8, 4096),
        "model.layers.1.block_sparse_moe.router.layer.weight": (8, 4096),  # as Granite's
        "model.layers.0.block_sparse_moe.experts.0.w1.weight": (14336, 4096),
    }
    found = with_headers(arch, tensors(stored))
    assert found.linear_names() == ["q_proj"]
    assert found.other_weights == 2 * 8 * 4096 + 14336 * 4096


def test_keys_and_values_of_few_heads_and_of_a_narrow_state() -> None:
    """Falcon-7B has one head of 64 for 71; DeepSeek-V2-Lite keeps 512 + 64 numbers a block."""
    shapes = {name: data for name, data, _ in OTHERS}
    falcon = arch_from_config(shapes["Falcon-7B"])
    assert falcon.kv_bytes_per_token() == 32 * 2 * 64 * 2
    assert arch_from_config(shapes["DeepSeek-V2-Lite"]).kv_bytes_per_token() == 27 * 576 * 2


def test_a_key_that_the_family_does_not_know_counts_for_nothing() -> None:
    gpt2 = {name: data for name, data, _ in OTHERS}["GPT-2"]
    assert arch_from_config({**gpt2, "num_key_value_heads": 4}).weights == 124439808


def test_the_language_part_is_found_under_its_names() -> None:
    for name in ("text_config", "llm_config", "language_config"):
        assert arch_from_config({"model_type": "seeing", name: QWEN2_7B}).weights == 7615616512
    assert arch_from_config({**QWEN2_7B, "text_config": {}}).weights == 7615616512
    for part in ([1], "llama"):
        with pytest.raises(ModelError, match="text_config holds (list|str)"):
            arch_from_config({**QWEN2_7B, "text_config": part})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "4096"),
        ("hidden_size", 4096.0),
        ("hidden_size", -4096),
        ("hidden_size", 10**30),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**12),
        ("num_attention_heads", True),
        ("vocab_size", []),
        ("num_key_value_heads", 0),
        ("intermediate_size", "14336"),
        ("head_dim", -128),
    ],
)
def test_sizes_that_are_none_are_named(field: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        arch_from_config({**LLAMA3_8B, field: value})
    assert f"{field}: {value!r}"[:40] in caught.value.message
    assert "a whole number from 1" in caught.value.message


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_attention_heads": 33, "num_key_value_heads": 11}, "no multiple of its 33"),
        ({"num_attention_heads": 8192}, "no multiple of its 8192"),
        ({"num_key_value_heads": 7}, "32 attention heads cannot share 7"),
        ({"num_key_value_heads": 64}, "32 attention heads cannot share 64"),
    ],
)
def test_heads_that_do_not_divide_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        arch_from_config({**LLAMA3_8B, **sizes})


@pytest.mark.parametrize(
    ("named", "architecture"),
    [(["LlamaForCausalLM"], "LlamaForCausalLM"), ("LlamaForCausalLM", "LlamaForCausalLM")]
    + [(value, "") for value in (None, [], 5, [None])],
)
def test_architectures_of_any_kind(named: Any, architecture: str) -> None:
    assert arch_from_config({**LLAMA3_8B, "architectures": named}).architecture == architecture
