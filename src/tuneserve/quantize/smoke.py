"""Read an export back without GPTQModel and compare its loss with the 16-bit model's.

The packed weights are taken apart here by the formats' definitions, so a packing fault shows itself
as well as a bad quantization. Fine judgement is the release gates' work; this refuses what answers
only "!!!!".
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.devices import FLOAT32_FAMILIES
from tuneserve.errors import QuantizeError
from tuneserve.plan.machine import Gpu, first_gpu
from tuneserve.quantize.checks import quantized_shapes, read_config

log = logging.getLogger(__name__)

ROWS = 4
ROW_TOKENS = 192
# Perplexity may at most double: working 4-bit exports of small models lose 1 to 10 %, broken ones
# end near the vocabulary's size.
MAX_LOSS_INCREASE = math.log(2)
# Greedy tokens after the first half of a row; all of them the same are a loop.
LOOP_TOKENS = 16
MAX_FLOAT16 = 65504.0
# On a CPU the comparison holds the model in float32, twice for a moment at its largest tensor; on a
# GPU in the checkpoint's own 16 bits, beside what GPTQModel still holds.
_MEMORY_FACTOR, _GPU_FACTOR = 3, 1.5
# AWQ packs eight columns into one int32 in this order (AutoAWQ, `AWQ_ORDER`).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def too_large(model: Path) -> str:
    """Why the model cannot be compared here; empty when it can."""
    from tuneserve.progress import human_bytes

    if _fits_on_gpu(model):
        return ""
    needed = _MEMORY_FACTOR * Checkpoint.open(model).data_bytes
    free = _available_memory()
    if needed > free // 2:
        return f"it would take {human_bytes(needed)} of {human_bytes(free)} free memory"
    return ""


def smoke_test(
    model: Path,
    export: Path,
    dataset: Path,
    *,
    method: str,
    group_size: int,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Mean loss of the 16-bit model and of its export on a few held-out rows, and how they go on.

    Returns:
        rows, tokens, and the two losses in nats per token.

    Raises:
        QuantizeError: Logits are not finite, the export's perplexity is more than twice the
            model's, it repeats one token where the model does not, or its float16 activations
            overflow.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    rows = _rows(dataset)
    place = "cuda" if _fits_on_gpu(model) else "cpu"
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=torch.float32 if place == "cpu" else "auto",
            device_map={"": place},
            trust_remote_code=trust_remote_code,
        ).eval()
        before, _ = _loss(reference, rows)
        if not math.isfinite(before):
            raise QuantizeError(
                f"{model.name} (16-bit): its logits are not finite",
                expected="a model that computes finite numbers in its own precision",
                hint="train and merge in bfloat16; if it persists, look at the training",
            )
        looped = _looping(reference, rows)
        load_dequantized(reference, export, model, method, group_size)
        after, largest = _loss(reference, rows)
        loops = _looping(reference, rows) if math.isfinite(after) else 0
    tokens = sum(len(row) - 1 for row in rows)
    found = {
        "rows": len(rows),
        "tokens": tokens,
        "loss_merged": round(before, 6),
        "loss_quantized": round(after, 6),
    }
    log.info("loss on %d tokens: %.4f in 16 bits, %.4f in 4 bits", tokens, before, after)
    if not math.isfinite(after) or after - before > MAX_LOSS_INCREASE:
        raise QuantizeError(
            f"the {method} export lost the model: {after:.3f} nats per token, "
            f"{before:.3f} before, on {tokens} tokens",
            expected=f"at most {before + MAX_LOSS_INCREASE:.3f}",
            hint="use a smaller group_size or more calibration rows, or add awq or none to "
            "quantize.methods",
            details=found,
        )
    why = why_float16(read_config(export), first_gpu())
    if why and largest > MAX_FLOAT16:
        raise QuantizeError(
            f"activations reach {largest:.3g}, more than float16 holds ({MAX_FLOAT16:.0f}), and "
            f"{why}",
            hint="train and merge in bfloat16, on a GPU that has it",
            details=found,
        )
    # One row more says little of a model that repeats itself already, such as an untrained one.
    if loops > 2 * looped:
        raise QuantizeError(
            f"the {method} export repeats one token {LOOP_TOKENS} times after {loops} of "
            f"{len(rows)} beginnings of rows, the 16-bit model after {looped}",
            expected="greedy text that goes on as the model's does",
            hint="use a smaller group_size or more calibration rows, or add awq or none to "
            "quantize.methods",
            details=found,
        )
    return found


def why_float16(config: dict[str, Any], card: Gpu | None) -> str:
    """Why a server here computes in float16; empty where it does not."""
    if _served_type(config) == "float16":
        return "config.json says float16"
    if card is None or card.has_bf16 or config.get("model_type") in FLOAT32_FAMILIES:
        return ""
    return f"{card.name} has no bfloat16, so that vLLM serves in float16"


def _served_type(config: dict[str, Any]) -> str:
    """What a server computes in, under either of the names that transformers gave it."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return str(next((value for value in found if value), "")).removeprefix("torch.")


def load_dequantized(model: Any, export: Path, merged: Path, method: str, group_size: int) -> None:
    """Put the export's weights, taken apart, into a transformers model of the merged checkpoint."""
    from safetensors import safe_open

    shapes = quantized_shapes(Checkpoint.open(merged).tensors)
    state = dict(model.named_parameters())
    tensors = Checkpoint.open(export).tensors
    for file in sorted({info.file for info in tensors.values()}):
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 (it is no mapping)
                module = name.rpartition(".")[0]
                if module not in shapes:
                    if name in state:
                        state[name].copy_(stream.get_tensor(name))
                elif name.endswith(".qweight"):
                    place = state[f"{module}.weight"].device
                    parts = {
                        part: _get(tensors, f"{module}.{part}").to(place)
                        for part in ("qzeros", "scales")
                    }
                    weight = dequantize(method, stream.get_tensor(name).to(place), **parts)
                    state[f"{module}.weight"].copy_(weight)
                elif name.endswith(".bias"):
                    state[name].copy_(stream.get_tensor(name))


def dequantize(method: str, qweight: Any, qzeros: Any, scales: Any) -> Any:
    """The (out, in) float32 matrix of one packed layer without activation order.

    GPTQ: eight rows an int32, low bits first, zero points stored minus one. AWQ (gemm): eight
    columns an int32 in AWQ's order, zero points as they are. Either way ``(q - zero) * scale``.
    """
    import torch

    shifts = torch.arange(0, 32, 4, device=qweight.device)
    if method == "gptq":
        values = (qweight.unsqueeze(1) >> shifts[None, :, None]) & 15
        values = values.reshape(-1, qweight.shape[1])
        zeros = ((qzeros.unsqueeze(2) >> shifts) & 15).reshape(qzeros.shape[0], -1) + 1
    else:
        places = torch.tensor(_AWQ_ORDER, device=qweight.device).argsort()
        values = ((qweight.unsqueeze(2) >> shifts) & 15)[:, :, places]
        values = values.reshape(qweight.shape[0], -1)
        zeros = ((qzeros.unsqueeze(2) >> shifts) & 15)[:, :, places].reshape(qzeros.shape[0], -1)
    width = values.shape[0] // scales.shape[0]
    scale = scales.float().repeat_interleave(width, dim=0)
    zero = zeros.repeat_interleave(width, dim=0)
    return ((values - zero).float() * scale).T.contiguous()


def _get(tensors: dict[str, Any], name: str) -> Any:
    from safetensors import safe_open

    with safe_open(tensors[name].file, framework="pt") as stream:
        return stream.get_tensor(name)


def _rows(dataset: Path) -> list[list[int]]:
    """Held-out rows, or training rows where nothing was held out; long enough, evenly taken."""
    import pyarrow.parquet

    for name in ("eval.parquet", "train.parquet"):
        path = dataset / name
        if not path.is_file():
            continue
        ids = pyarrow.parquet.read_table(path, columns=["input_ids"])["input_ids"].to_pylist()
        rows = [row[:ROW_TOKENS] for row in ids if len(row) > 10]
        if rows:
            return rows[:: max(1, len(rows) // ROWS)][:ROWS]
    raise QuantizeError(f"{dataset.name} holds no row to compare the export on")


def _loss(model: Any, rows: list[list[int]]) -> tuple[float, float]:
    """Mean nats per token, and the largest activation: hidden states, and what goes into the linear
    layers, of which the last of an MLP gets the largest."""
    import torch

    total, count, largest = 0.0, 0, 0.0

    def look(_: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal largest
        largest = max(largest, float(inputs[0].abs().max()))

    hooks = [
        module.register_forward_pre_hook(look)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        for row in rows:
            ids = torch.tensor([row], device=next(model.parameters()).device)
            found = model(input_ids=ids, output_hidden_states=True, use_cache=False)
            logits = found.logits[0, :-1].float()
            if not torch.isfinite(logits).all():
                return math.inf, math.inf
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += len(row) - 1
            largest = max(largest, *(float(h.abs().max()) for h in found.hidden_states))
    finally:
        for hook in hooks:
            hook.remove()
    return total / count, largest


def _looping(model: Any, rows: list[list[int]]) -> int:
    """After how many beginnings of rows the greedy text is one token, over and over."""
    import torch
    from transformers import GenerationConfig

    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    config = GenerationConfig(
        max_new_tokens=LOOP_TOKENS, do_sample=False, eos_token_id=ends or None, pad_token_id=0
    )
    count = 0
    for row in rows:
        ids = torch.tensor([row[: len(row) // 2]], device=next(model.parameters()).device)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answer = said[0, ids.shape[1] :].tolist()
        count += len(answer) == LOOP_TOKENS and len(set(answer)) == 1 and answer[0] not in ends
    return count


def _fits_on_gpu(model: Path) -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    free, _ = torch.cuda.mem_get_info()
    return _GPU_FACTOR * Checkpoint.open(model).data_bytes < free


def _available_memory() -> int:
    """MemAvailable of this machine in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0
