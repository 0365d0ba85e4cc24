"""The shape of a model: which linear layers it has, how wide, and how many parameters of each kind.

From `config.json` alone for the usual decoder families; from the safetensors headers for any other,
and as a check of the first where both are there.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuneserve.checkpoint.headers import TensorInfo
from tuneserve.checkpoint.ties import is_tied
from tuneserve.errors import ModelError

log = logging.getLogger(__name__)

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
HEADS = ("lm_head", "embed_out")
_ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "c_attn",
    "query_key_value",
    "dense",
)
_QK_NORM = ("qwen3", "gemma3_text", "gemma3", "olmo2", "olmo3")
_FOUR_NORMS = ("gemma2", "gemma3_text", "gemma3")
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Linear:
    """A kind of linear layer: its name in the module tree, its shape, and how many there are."""

    name: str
    in_features: int
    out_features: int
    count: int

    @property
    def weights(self) -> int:
        """Parameters of all of them together."""
        return self.in_features * self.out_features * self.count

    @property
    def in_attention(self) -> bool:
        """Whether it belongs to the attention block; else to the MLP."""
        return self.name in _ATTENTION


@dataclass(frozen=True)
class Arch:
    """A decoder's shape. Sizes are in elements; `query` and `key_value` are heads times head size.

    Attributes:
        linears: Linear layers of the decoder blocks, without embedding and head.
        other_weights: Norms, biases and whatever else is neither linear, embedding nor head.
        inner: Width of the MLP.
        extra_norms: Norms a block has beyond the usual two.
        gate: The MLP's activation, as transformers names it.
        source: ``config``, ``headers``, or ``guess`` for a family that is not known.
    """

    model_type: str
    architecture: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    context: int
    linears: tuple[Linear, ...]
    other_weights: int
    qk_norm: bool = False
    extra_norms: int = 0
    experts: int = 0
    gate: str = "silu"
    source: str = "config"

    @property
    def query(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of the keys, and of the values."""
        return self.key_value_heads * self.head_dim

    @property
    def linear_weights(self) -> int:
        """Parameters of the decoder's linear layers, the ones that are quantized."""
        return sum(linear.weights for linear in self.linears)

    @property
    def embedding_weights(self) -> int:
        """Parameters of the embedding, and of the head unless it is the same tensor."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        """All parameters."""
        return self.linear_weights + self.embedding_weights + self.other_weights

    def linear_names(self) -> list[str]:
        """Names that `lora.target_modules` may list."""
        return sorted({linear.name for linear in self.linears})

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of keys and values that a server keeps for one token."""
        return 2 * self.layers * self.key_value * element_bytes


def arch_from_config(config: Mapping[str, Any]) -> Arch:
    """Read the shape from a `config.json` of transformers.

    Raises:
        ModelError: Sizes are missing that no estimate can do without; all of them are listed.
    """
    text = config.get("text_config") or config
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    sizes = {
        "hidden_size": _size(text, "hidden_size", "n_embd", "d_model"),
        "num_hidden_layers": _size(text, "num_hidden_layers", "n_layer", "num_layers"),
        "num_attention_heads": _size(text, "num_attention_heads", "n_head", "num_heads"),
        "vocab_size": _size(text, "vocab_size"),
    }
    missing = [name for name, value in sizes.items() if not value]
    if missing:
        raise ModelError(
            f"config.json of a {model_type} model has no {', '.join(missing)}",
            expected="the config of a decoder (causal language model)",
            hint="choose a text generation model as model.base",
        )
    hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    heads, vocab = sizes["num_attention_heads"], sizes["vocab_size"]
    kv_heads = _size(text, "num_key_value_heads", "num_kv_heads") or heads
    head_dim = _size(text, "head_dim") or hidden // heads
    inner = _size(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    query, key_value = heads * head_dim, kv_heads * head_dim
    linears, known = _linears(model_type, hidden, layers, query, key_value, inner)
    architectures = config.get("architectures") or text.get("architectures") or [""]
    four = 2 if model_type in _FOUR_NORMS else 0
    qk_norm = model_type in _QK_NORM
    biased = model_type == "qwen2" or bool(text.get("attention_bias"))
    others = layers * (2 + four) * hidden + hidden
    others += layers * 2 * head_dim * qk_norm + layers * (query + 2 * key_value) * biased
    return Arch(
        model_type=model_type,
        architecture=str(architectures[0]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=kv_heads,
        head_dim=head_dim,
        inner=inner,
        vocab=vocab,
        tied=is_tied(config, None),
        context=_size(text, "max_position_embeddings", "n_positions", "max_seq_len")
        or _DEFAULT_CONTEXT,
        linears=linears,
        other_weights=others,
        qk_norm=qk_norm,
        extra_norms=four,
        experts=_size(text, "num_local_experts", "num_experts", "n_routed_experts"),
        gate=_gate(text),
        source="config" if known else "guess",
    )


def _gate(config: Mapping[str, Any]) -> str:
    """The MLP's activation; the usual decoders leave it out when it is SiLU."""
    name = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    return "silu" if name == "swish" else str(name)


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of several spellings that holds a positive whole number; 0 when none does."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _linears(
    model_type: str, hidden: int, layers: int, query: int, key_value: int, inner: int
) -> tuple[tuple[Linear, ...], bool]:
    """The block's linear layers by family, and whether the family is one of those known."""
    shapes: list[tuple[str, int, int]]
    if model_type == "gpt2":
        shapes = [("c_attn", hidden, 3 * hidden), ("c_proj", hidden, hidden)]
        shapes += [("c_fc", hidden, inner), ("c_proj", inner, hidden)]
        known = True
    elif model_type == "phi3":
        shapes = [("qkv_proj", hidden, query + 2 * key_value), ("o_proj", query, hidden)]
        shapes += [("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)]
        known = True
    else:
        shapes = [("q_proj", hidden, query), ("k_proj", hidden, key_value)]
        shapes += [("v_proj", hidden, key_value), ("o_proj", query, hidden)]
        shapes += [("gate_proj", hidden, inner), ("up_proj", hidden, inner)]
        shapes += [("down_proj", inner, hidden)]
        known = model_type in LLAMA_LIKE
    return tuple(Linear(name, i, o, layers) for name, i, o in shapes), known


# Families whose blocks have q/k/v/o and gate/up/down projections (read in transformers 5.19).
LLAMA_LIKE = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "stablelm",
    "cohere",
    "cohere2",
    "exaone4",
    "seed_oss",
)


def with_headers(arch: Arch, tensors: Mapping[str, TensorInfo]) -> Arch:
    """The same shape with layers and counts as stored, which hold for every family.

    A difference from what the config gave is logged: it is a family this module knows wrongly, or a
    checkpoint with surplus tensors.
    """
    linears: Counter[tuple[str, int, int]] = Counter()
    embedding = head = others = 0
    transposed = arch.model_type == "gpt2"  # Conv1D stores (in, out)
    for name, info in tensors.items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if leaf in HEADS:
            head += info.numel
        elif leaf in EMBEDDINGS:
            embedding += info.numel
        elif len(info.shape) == 2 and name.endswith(".weight") and re.search(r"\.\d+\.", name):
            out_features, in_features = info.shape[::-1] if transposed else info.shape
            linears[leaf, in_features, out_features] += 1
        else:
            others += info.numel
    if not linears or not embedding:
        return arch
    found = replace(
        arch,
        linears=tuple(Linear(*shape, count=count) for shape, count in linears.items()),
        other_weights=others,
        vocab=embedding // arch.hidden,
        tied=arch.tied or not head,
        source="headers",
    )
    if arch.source == "config" and abs(found.weights - arch.weights) > 0.005 * arch.weights:
        log.warning(
            "config.json gives %.2f billion parameters, the weights hold %.2f; planning with these",
            arch.weights / 1e9,
            found.weights / 1e9,
        )
    return found


def lora_weights(linears: Iterable[Linear], rank: int, *, dora: bool = False) -> int:
    """Parameters of LoRA factors (and DoRA magnitudes) on these layers."""
    return sum(
        linear.count
        * (rank * (linear.in_features + linear.out_features) + dora * linear.out_features)
        for linear in linears
    )
