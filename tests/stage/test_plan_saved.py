"""What a block of a real model keeps for its backward pass, tensor by tensor, against the plan."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.memory import _attention_bytes, saved_bytes_per_token
from tuneserve.plan.trainstep import Step

TOKENS = 64
# Counts storages that autograd keeps, parameters excepted, for three and for two blocks: the
# difference is one block. In its own process, because importing peft pulls in much that patches.
COUNT = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from peft import LoraConfig, get_peft_model

def kept(family, layers, targets, padded, tokens):
    sizes = dict(hidden_size=128, num_hidden_layers=layers, num_attention_heads=4,
                 num_key_value_heads=2, intermediate_size=352, vocab_size=256,
                 max_position_embeddings=512, tie_word_embeddings=False,
                 pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=targets))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.train()
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found = {}
    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor
    ids = torch.randint(3, 256, (2, tokens))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, tokens // 2:] = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.get_base_model().model(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(found.values()), config.to_dict()

torch.set_num_threads(2)
results = []
for family, targets, padded in json.loads(sys.argv[1]):
    two, _ = kept(family, 2, targets, padded, int(sys.argv[2]))
    three, config = kept(family, 3, targets, padded, int(sys.argv[2]))
    results.append([(three - two) / (2 * int(sys.argv[2])), config])
print("RESULTS" + json.dumps(results))
"""
CASES = [
    ("llama", "all-linear", False),
    ("llama", ["o_proj"], False),
    ("llama", "all-linear", True),
    ("qwen3", "all-linear", False),
    ("qwen3", ["q_proj", "v_proj"], True),
    ("gemma2", "all-linear", False),
    ("gemma2", "all-linear", True),
    ("phi3", "all-linear", True),
]

pytestmark = pytest.mark.full  # half a minute of imports for a formula that rarely changes


@pytest.fixture(scope="module")
def counted() -> list[tuple[float, dict[str, object]]]:
    command = [sys.executable, "-c", COUNT, json.dumps(CASES), str(TOKENS)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    return json.loads(done.stdout.rpartition("RESULTS")[2])


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_saved_bytes(counted: list[tuple[float, dict[str, object]]], at: int) -> None:
    _, targets, padded = CASES[at]
    measured, config = counted[at]
    arch = arch_from_config(config)
    chosen = tuple(t for t in arch.linears if targets == "all-linear" or t.name in targets)
    step = Step(2, TOKENS, chosen, 8, quantized=False, padded=padded)
    kept = saved_bytes_per_token(arch, step) + _attention_bytes(arch, step) / step.tokens
    assert kept == pytest.approx(measured, rel=0.02)
