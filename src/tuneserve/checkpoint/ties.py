"""Whether a model's output head is its input embedding, from config.json and what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families whose config classes tie the head unless told otherwise (transformers 5), so that
# config.json often leaves the flag out.
TIED_BY_DEFAULT = frozenset(
    """
    biogpt bloom cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2
    gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gpt2 gpt_bigcode gpt_neo granite_swa
    jetmoe lfm2 lfm2_moe mamba minicpm3 mpt opt recurrent_gemma smollm3 starcoder2 vaultgemma xglm
    zamba zamba2
    """.split()
)
# Families whose config classes do not, so that a head that is nowhere is missing.
UNTIED_BY_DEFAULT = frozenset(
    """
    apertus arcee codegen cwm deepseek_v2 deepseek_v3 exaone4 falcon_h1 glm glm4 glm4_moe gpt_neox
    gpt_oss gptj granite granitemoe helium hunyuan_v1_dense hunyuan_v1_moe jamba llama llama4_text
    ministral
    ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss stablelm
    """.split()
)


def is_tied(config: Mapping[str, Any], head_stored: bool | None) -> bool:
    """Whether the model computes its logits with the input embedding.

    Args:
        config: A config.json; one with a vision part nests the flag or leaves it out.
        head_stored: Whether the weights hold a head; None: not known. With the flag set, a head
            that is stored as well is a copy.
    """
    text = config.get("text_config")
    nested = text if isinstance(text, Mapping) else {}
    flag = config.get("tie_word_embeddings")
    if flag is None:
        flag = nested.get("tie_word_embeddings")
    if flag is not None:
        return bool(flag)
    if {str(part.get("model_type")) for part in (config, nested)} & TIED_BY_DEFAULT:
        return True
    if not nested and str(config.get("model_type")) in UNTIED_BY_DEFAULT:
        return False
    return head_stored is False  # without a head of its own it can only be tied
