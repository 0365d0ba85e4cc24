"""Two layers with an adapter, plain as PEFT made them: what fused forms are compared with."""

from __future__ import annotations

from typing import Any

import torch

from tuneserve.lm.load import quiet_libraries

quiet_libraries()

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def make(
    dtype: torch.dtype,
    targets: Any,
    *,
    nf4: bool,
    family: str = "qwen2",
    config: Any = None,
    **lora: Any,
) -> Any:
    """Two layers with an adapter whose B is not zero, the same numbers every time."""
    import bitsandbytes
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=320, num_hidden_layers=2, vocab_size=300)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    settings = {**sizes, **heads, **(config or {})}
    made = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero, as they are made
            torch.nn.init.normal_(parameter, std=0.1)
    model = model.bfloat16().to(dtype)
    for name, module in list(model.named_modules()) if nf4 else []:
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            new = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=dtype,
                quant_type="nf4",
                compress_statistics=True,
            )
            new.weight = bitsandbytes.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            new.bias = module.bias
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new.to("cpu"))
    model.requires_grad_(False)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": targets, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**{**settings, **lora}))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data = (torch.randn(parameter.shape) * 0.05).bfloat16().to(dtype)
    return model.train()


IDS = torch.randint(1, 300, (3, 21), generator=torch.Generator().manual_seed(1))


def step(model: Any, *, recompute: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch."""
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        model.enable_input_require_grads()
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.requires_grad}
    return float(out.loss.detach()), grads


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient, of its norm."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs)
