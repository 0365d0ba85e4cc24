"""The plan's families beside the models that transformers builds from the same configs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.checks import EAGER_ONLY
from tuneserve.plan.families import FAMILIES

# Sizes without which a family's default config builds no model.
_NEEDED: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
}


def built(family: str) -> Any:
    """A model of the family's default sizes, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **_NEEDED.get(family, {}))
    if hasattr(config, "text_config"):
        config = config.get_text_config()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemma3"}))
def test_layers_and_parameters(family: str) -> None:
    import torch

    model = built(family)
    arch = arch_from_config({**json.loads(json.dumps(model.config.to_dict(), default=str))})
    head = model.get_output_embeddings()
    kinds = {"Linear", "FalconLinear", "Conv1D"}
    linears: Counter[tuple[str, int, int]] = Counter()
    for name, module in model.named_modules():
        if type(module).__name__ in kinds and module is not head:
            rows, columns = module.weight.shape
            inputs, outputs = (rows, columns) if family == "gpt2" else (columns, rows)
            linears[name.rpartition(".")[2], inputs, outputs] += 1
    planned: Counter[tuple[str, int, int]] = Counter()
    for linear in arch.linears:
        planned[linear.name, linear.in_features, linear.out_features] += linear.count
    assert planned == linears
    assert arch.weights == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-4)
    assert arch.source == "config"
    assert isinstance(model, torch.nn.Module)
    assert (family in EAGER_ONLY) is not type(model)._supports_sdpa
