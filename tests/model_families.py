"""Tiny configurations of decoder families, as transformers builds them."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OWN: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "gpt_bigcode": {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_inner": 256, "n_positions": 256},
    "gptj": {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_inner": 256, "rotary_dim": 16},
}


def family_config(family: str) -> Any:
    """The config of a model of two layers, 128 wide, whose layers suit groups of 32."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_SIZES, **_OWN.get(family, {})})
