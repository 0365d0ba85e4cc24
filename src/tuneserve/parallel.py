"""What several GPUs cannot share, with the reason: in training, and in one server.

Without torch: the run file is read by every command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FSDP = ("fsdp", "fsdp2", "fsdp_config", "fsdp_version")


def refuse_other_sharding(data: Any) -> Any:
    """A `train` section as it was given, unless it asks for sharding that does not work.

    Raises:
        ValueError: FSDP, with 4-bit or 16-bit weights, or a ZeRO stage other than 2.
    """
    if not isinstance(data, Mapping):
        return data
    asked = [name for name in _FSDP if data.get(name)]
    if asked and data.get("method", "qlora") == "qlora":
        raise ValueError(
            f"{asked[0]}: FSDP2 cannot shard 4-bit weights: it cuts the packed bytes apart from "
            "the scales that belong to them (bitsandbytes 1945, accelerate 3983); leave it out "
            "and set gpus, by which every GPU holds the 4-bit base whole"
        )
    if asked:
        raise ValueError(
            f"{asked[0]}: FSDP is not supported; leave it out and set gpus, with zero: 2 when the "
            "adapter is large, or method: qlora when the base does not fit on one GPU"
        )
    if data.get("zero") in (1, 3):
        raise ValueError(
            f"zero: {data['zero']} is not supported: stage 2 saves more than 1 at the same speed, "
            "and 3 would shard the frozen base, which method: qlora makes smaller; use 2 or 0"
        )
    return data


def check_zero(method: str, *, use_dora: bool) -> None:
    """Refuse ZeRO-2 where DeepSpeed would change what is trained.

    Raises:
        ValueError: The base is in 4 bits, or the adapter has float32 parameters.
    """
    if method != "lora":
        raise ValueError(
            "zero: 2 needs method: lora, since DeepSpeed casts the whole model to one type, and a "
            "4-bit base has none; with qlora set gpus alone"
        )
    if use_dora:
        raise ValueError(
            "zero: 2 cannot train lora.use_dora, whose magnitudes stay float32 while DeepSpeed "
            "casts the whole model to one type"
        )


# vLLM pads the vocabulary to a multiple of this before it cuts it
# (`vocab_parallel_embedding.py::DEFAULT_VOCAB_PADDING_SIZE`, vllm 0.32).
_VOCABULARY_BLOCK = 64
# Eight 4-bit weights of neighbouring outputs lie in one 32-bit word.
_PACKED = 8


@dataclass(frozen=True)
class ServedShape:
    """What of a model is cut when its server is spread over GPUs. Sizes are in elements.

    Attributes:
        group_size: Weights per scale of a 4-bit model, -1 for a whole row; None: 16 bits.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    inner: int
    vocab: int
    group_size: int | None = None

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ServedShape:
        """Read from a `config.json` of transformers; a size that it does not name counts as 0."""
        text = config.get("text_config") or config
        heads = int(text.get("num_attention_heads") or text.get("n_head") or 0)
        hidden = int(text.get("hidden_size") or text.get("n_embd") or 0)
        stored = config.get("quantization_config") or {}
        group = stored.get("group_size") if isinstance(stored, Mapping) else None
        return ServedShape(
            heads,
            int(text.get("num_key_value_heads") or heads),
            int(text.get("head_dim") or (hidden // heads if heads else 0)),
            int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden),
            int(text.get("vocab_size") or 0),
            int(group) if group is not None else None,
        )


def tensor_parallel_problems(gpus: int, shape: ServedShape) -> list[str]:
    """Why vLLM could not cut the model into `gpus` parts, each beginning with the field to mend.

    Every check is one that vLLM makes itself, after it has started (0.32: `config/model.py`,
    the models' attention, `vocab_parallel_embedding.py`, `auto_gptq.py`, `auto_awq.py`).
    """
    found = _uneven(gpus, shape)
    if not found:
        return []
    fits = ", ".join(str(count) for count in range(1, gpus) if not _uneven(count, shape))
    return [f"serve.tensor_parallel: {gpus}: {text}; {fits} would work" for text in found]


def _uneven(gpus: int, shape: ServedShape) -> list[str]:
    if gpus == 1:
        return []
    found = []
    if shape.heads % gpus:
        found.append(f"{shape.heads} attention heads cannot be shared evenly")
    many, few = shape.key_value_heads % gpus == 0, gpus % max(shape.key_value_heads, 1) == 0
    if not (many or few):
        found.append(f"{shape.key_value_heads} KV heads can be neither shared nor repeated evenly")
    if shape.inner % gpus:
        found.append(f"the MLP's {shape.inner} columns cannot be shared evenly")
    padded = -(-shape.vocab // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK
    if padded % gpus:
        found.append(
            f"the vocabulary, padded to {padded} (a multiple of {_VOCABULARY_BLOCK}), cannot be "
            "shared evenly"
        )
    if shape.group_size is not None and not found:
        found += _packed_problems(gpus, shape, shape.group_size)
    return found


def _packed_problems(gpus: int, shape: ServedShape, group: int) -> list[str]:
    found = []
    inputs = {"o_proj": shape.heads * shape.head_dim, "down_proj": shape.inner}
    for name, size in inputs.items():
        if group > 0 and size // gpus % group:
            found.append(
                f"{name}'s {size} inputs would be {size // gpus} a GPU, not a multiple of "
                f"quantize.group_size {group}"
            )
    key_value = max(shape.key_value_heads // gpus, 1) * shape.head_dim
    outputs = {
        "q_proj": shape.heads * shape.head_dim // gpus,
        "k_proj": key_value,
        "gate_proj": shape.inner // gpus,
    }
    for name, size in outputs.items():
        if size % _PACKED:
            found.append(f"{name} would have {size} outputs a GPU, not a multiple of {_PACKED}")
    return found


def key_value_share(gpus: int, key_value_heads: int) -> float:
    """Share of keys and values that one of the server's GPUs holds: fewer heads are repeated."""
    return max(key_value_heads // gpus, 1) / max(key_value_heads, 1)
