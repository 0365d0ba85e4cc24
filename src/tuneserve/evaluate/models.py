"""Load base, adapter and merged model one after the other and measure each. Engine file."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from tuneserve.errors import AdapterError
from tuneserve.lm import hardware
from tuneserve.lm.fused_head import add_fused_head
from tuneserve.lm.load import load_base
from tuneserve.lm.loss import RowLosses, row_losses
from tuneserve.lm.rows import Rows
from tuneserve.progress import Progress
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

_SAMPLES = 4
_ANSWER_TOKENS = 64


def measure(
    context: StageContext, rows: Rows, chosen: Sequence[int]
) -> tuple[dict[str, RowLosses], list[dict[str, Any]]]:
    """Row losses by model, and what the base answers to the first held-out questions."""
    device = hardware.device()
    found: dict[str, RowLosses] = {}
    samples: list[dict[str, Any]] = []
    with Progress("evaluate", total=3 * len(chosen), unit="row") as progress:
        for name in ("base", "adapter", "merged"):
            model = _load(name, context, device)
            said = functools.partial(progress.advance, detail=name)
            found[name] = row_losses(model, rows, chosen, done=said)
            if name == "base":
                samples = _samples(model, context.inputs["dataset"].path)
            del model
            hardware.release_memory()
    return found, samples


def _load(name: str, context: StageContext, device: torch.device) -> Any:
    dtype = hardware.compute_dtype(device)
    folder = context.base if name != "merged" else context.inputs["merged"].path
    assert folder is not None
    adapter = context.inputs["adapter"].path
    nf4 = name == "adapter" and _trained_on_nf4(adapter, context)
    model = load_base(
        folder,
        device=device,
        dtype=dtype,
        nf4=nf4,
        attention=context.run.train.attention,
        trust_remote_code=context.run.model.trust_remote_code,
    )
    add_fused_head(model, float32=True)
    if name != "adapter":
        return model
    import peft

    try:
        wrapped = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    except (ValueError, RuntimeError, OSError) as error:
        raise AdapterError(
            f"{adapter}: cannot be loaded onto the base ({error})",
            hint="train again on this base",
        ) from error
    for name_, parameter in wrapped.named_parameters():
        if "lora_" in name_ and "lora_magnitude_vector" not in name_:
            parameter.data = parameter.data.to(dtype)
    return wrapped.eval()


def _trained_on_nf4(adapter: Path, context: StageContext) -> bool:
    path = adapter / "training.json"
    if not path.is_file():  # an adapter from elsewhere does not say; the run file does
        return context.run.train.method == "qlora"
    return json.loads(path.read_text(encoding="utf-8")).get("quantization") is not None


def _samples(model: Any, dataset: Path) -> list[dict[str, Any]]:
    """The base's greedy answers to the first user turns of some held-out chats."""
    tokenizer = AutoTokenizer.from_pretrained(dataset / "tokenizer")
    samples: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    with (dataset / "eval_messages.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            chat = json.loads(line)
            roles = [message["role"] for message in chat["messages"]]
            turn = roles.index("user") + 1 if "user" in roles else len(roles)
            if roles[turn : turn + 1] != ["assistant"]:
                continue
            prompt, answer = chat["messages"][:turn], chat["messages"][turn]
            samples.append(
                {
                    "source": chat["source"],
                    "messages": prompt,
                    "reference": answer.get("content") or "",
                }
            )
            prompts.append(
                tokenizer.apply_chat_template(
                    prompt, tools=chat["tools"], add_generation_prompt=True, return_dict=False
                )
            )
            if len(samples) == _SAMPLES:
                break
    for sample, ids in zip(samples, _greedy(model, prompts), strict=True):
        sample["base"] = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return samples


def _greedy(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    if not prompts:
        return []
    from transformers import GenerationConfig

    place = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, prompt in enumerate(prompts):  # on the left, so that all answers begin together
        ids[at, width - len(prompt) :] = torch.tensor(prompt)
        mask[at, width - len(prompt) :] = 1
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    config = GenerationConfig(
        max_new_tokens=_ANSWER_TOKENS, do_sample=False, eos_token_id=ends or None, pad_token_id=0
    )
    with torch.no_grad():
        out = model.generate(ids.to(place), attention_mask=mask.to(place), generation_config=config)
    return [_until(answer, ends) for answer in out[:, width:].tolist()]


def _until(answer: list[int], ends: Sequence[int]) -> list[int]:
    at = next((i for i, token in enumerate(answer) if token in ends), len(answer))
    return answer[:at]
