"""Small models of random values, adapters on them, and PEFT's merge to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel


def llama(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 96,
        "intermediate_size": 168,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **changes})


def qwen(**changes: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{**llama().to_dict(), "model_type": "qwen2", **changes})


def phi3(**changes: Any) -> Any:
    from transformers import Phi3Config

    settings = {**llama().to_dict(), "model_type": "phi3", "pad_token_id": 0, **changes}
    return Phi3Config(**settings)


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        **{"vocab_size": 97, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 64, **changes}
    )


def family(name: str, **changes: Any) -> Any:
    """Of any architecture that takes these sizes."""
    settings = {
        **llama().to_dict(), "pad_token_id": 0, "moe_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, **changes,
    }  # fmt: skip
    for own in ("model_type", "head_dim"):
        settings.pop(own, None)
    return AutoConfig.for_model(name, **settings)


def make_base(
    folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16, shard_size: str = "5GB"
) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too: zeros would hide mistakes
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def train(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Random values in place of training: every adapter parameter gets something to lose."""
    peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.1 * noise.to(parameter))
                else:
                    parameter.add_((noise * 0.03).to(parameter))
    return peft


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def assert_same_model(folder: Path, expected: Any, tolerance: float = 0.0) -> None:
    """The merged folder, loaded strictly, holds the same parameters as PEFT's merged model."""
    merged, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, theirs = dict(merged.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        if tolerance:
            torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(ours[name], value), (
                f"{name}: {int((ours[name] != value).sum())} of {value.numel()} elements differ"
            )


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 40).view(3, 13)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits
