"""Vocabularies that grew before training: whatever PEFT saves of them is in the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from merge_models import assert_same_model, gpt2, llama, load, logits, make_base, train
from tuneserve.merge import merge_adapter
from tuneserve.merge.proof import verify

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("extra", [{}, {"trainable_token_indices": [97, 98, 5]}])
def test_a_grown_vocabulary(tied: bool, extra: dict[str, Any], tmp_path: Path) -> None:
    """PEFT saves the embeddings when the vocabulary grew; the merged model has the new rows."""
    base = make_base(tmp_path / "base", llama(tie_word_embeddings=tied), torch.float32)
    model = load(base)
    model.resize_token_embeddings(100)
    with torch.no_grad():
        model.get_input_embeddings().weight[97:].normal_()
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **extra)
    live = train(model, config)
    live.save_pretrained(tmp_path / "adapter")

    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)

    merged = load(tmp_path / "out")
    assert merged.config.vocab_size == 100
    assert merged.config.tie_word_embeddings is tied
    assert merged.get_input_embeddings().weight.shape[0] == 100
    torch.testing.assert_close(logits(merged), logits(live), rtol=1e-4, atol=1e-4)


def grown(base: Path, rows: int) -> Any:
    model = load(base)
    model.resize_token_embeddings(rows)
    return model


SAVED: dict[str, dict[str, Any]] = {
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both-ensured": {
        "modules_to_save": ["embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "embedding-ensured": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding-with-lora-head": {
        "modules_to_save": ["embed_tokens"],
        "target_modules": ["q_proj", "lm_head"],
    },
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", SAVED)
def test_grown_and_trained_whole(name: str, tied: bool, tmp_path: Path) -> None:
    """PEFT then saves embedding and head twice: before training (original_module), and after."""
    base = make_base(tmp_path / "base", llama(tie_word_embeddings=tied))
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **SAVED[name]}
    train(grown(base, 100), LoraConfig(r=4, **settings)).save_pretrained(tmp_path / "adapter")
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("original_module" in key for key in keys) or "lm_head" in settings["target_modules"]

    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)

    peft = PeftModel.from_pretrained(grown(base, 100), tmp_path / "adapter")
    expected = peft.merge_and_unload()
    assert_same_model(tmp_path / "out", expected)
    merged = load(tmp_path / "out")
    assert merged.config.vocab_size == 100
    assert merged.config.tie_word_embeddings is expected.config.tie_word_embeddings
    verify(tmp_path / "out")


def test_gpt2_grown_and_trained_whole(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", gpt2())
    settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    config = LoraConfig(r=4, modules_to_save=["wte", "lm_head"], **settings)
    train(grown(base, 100), config).save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)
    peft = PeftModel.from_pretrained(grown(base, 100), tmp_path / "adapter")
    assert_same_model(tmp_path / "out", peft.merge_and_unload())


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_tied_pair_that_grew_under_an_update_of_one_of_them(target: str, tmp_path: Path) -> None:
    """PEFT saves the rows with the one that has the update; the other has the same, without it."""
    base = make_base(tmp_path / "base", llama(tie_word_embeddings=True), torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", target], task_type="CAUSAL_LM")
    live = train(grown(base, 100), config)
    live.save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)
    merged = load(tmp_path / "out")
    assert merged.config.tie_word_embeddings is False
    assert merged.get_input_embeddings().weight.shape == merged.lm_head.weight.shape == (100, 96)
    torch.testing.assert_close(logits(merged), logits(live), rtol=1e-4, atol=1e-4)
