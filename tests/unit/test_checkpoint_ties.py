"""Whether a head is the embedding, as config.json says it, nests it or leaves it out."""

from __future__ import annotations

from typing import Any

import pytest

from tuneserve.checkpoint.ties import TIED_BY_DEFAULT, UNTIED_BY_DEFAULT, is_tied
from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.families import FAMILIES
from tuneserve.quantize.checks import head_problems

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("config", "stored", "tied"),
    [
        (TIED, False, True),
        (TIED, True, True),  # what is stored is a copy
        (UNTIED, True, False),
        (UNTIED, False, False),
        ({"text_config": TIED}, True, True),
        ({"text_config": UNTIED}, False, False),
        ({**UNTIED, "text_config": TIED}, True, False),  # transformers reads the outer one
        ({"model_type": "gemma"}, True, True),
        ({"model_type": "gemma"}, None, True),
        ({"model_type": "gemma", **UNTIED}, None, False),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, None, True),
        ({"model_type": "llama"}, True, False),
        ({"model_type": "llama"}, None, False),
        ({"model_type": "llama"}, False, False),  # untied by default: the head is missing
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, False, True),
        ({"model_type": "novel"}, False, True),  # it can be nothing else
        ({"model_type": "novel", "text_config": None}, False, True),
    ],
)
def test_the_flag_wherever_it_stands(
    config: dict[str, Any], stored: bool | None, tied: bool
) -> None:
    assert is_tied(config, stored) is tied


def test_families_without_the_flag_are_as_transformers_takes_them() -> None:
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for family in {*TIED_BY_DEFAULT, *UNTIED_BY_DEFAULT, *FAMILIES}:
        default = mapping[family]().tie_word_embeddings
        assert (family in TIED_BY_DEFAULT) is default, family


def test_gemma_s_hub_config_is_exported_and_planned_as_tied() -> None:
    """It has no flag, and the weights have no head."""
    tensors = {"model.embed_tokens.weight": 0}
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    assert head_problems(tensors, gemma) == []
    assert arch_from_config({**gemma, **SIZES}).tied
    nested = {"language_model.model.embed_tokens.weight": 0}
    assert head_problems(nested, {"model_type": "gemma3", "text_config": TIED}) == []
    found = head_problems(nested, {"model_type": "gemma3", "text_config": UNTIED})
    assert "lm_head.weight is missing" in found[0]
    packed = {**tensors, "lm_head.qweight": 0}
    assert "quantized" in head_problems(packed, gemma)[0]
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert "lm_head.weight is missing" in head_problems(tensors, llama)[0]
