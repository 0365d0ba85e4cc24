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
from tuneserve.plan.families import (
    ALL_HEADS,
    CACHES_LATENT,
    FAMILIES,
    Family,
    Latent,
    experts_of,
    family_of,
    size_of,
)

log = logging.getLogger(__name__)

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
HEADS = ("lm_head", "embed_out")
_ATTENTION = frozenset(
    """
    q_proj k_proj v_proj o_proj out_proj qkv_proj c_attn query_key_value dense Wqkv
    q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj
    """.split()
)
# Names of the same size in the configs of different families.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_CONTEXT = "max_position_embeddings n_positions max_seq_len seq_length max_sequence_length".split()
# Where the language model of one with several parts is described.
_PARTS = ("text_config", "llm_config", "language_config")
# More than any model has: such a number is a slip, and would be planned with in silence.
_MOST = {"num_hidden_layers": 10_000, "hidden_size": 2**20, "num_attention_heads": 2**16}
_MOST_OF_ANYTHING = 2**28
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
        other_weights: Norms, biases, experts and whatever else is neither linear, embedding nor
            head.
        inner: Width of the MLP; of experts, of those together that take a token.
        extra_norms: Norms a block has beyond the usual two.
        latent: What a server keeps of a token in a block instead of keys and values; 0: these.
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
    latent: int = 0
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
        return self.layers * (self.latent or 2 * self.key_value) * element_bytes


def arch_from_config(config: Mapping[str, Any]) -> Arch:
    """Read the shape from a `config.json` of transformers.

    Raises:
        ModelError: Sizes are missing that no estimate can do without, or are no sizes; all of them
            are listed.
    """
    text = _language_part(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    family = family_of(model_type)
    hidden, layers, heads, vocab = _needed(text, model_type)
    latent = _latent(text)
    kv_heads = _kv_heads(model_type, text, heads)
    head_dim = (
        latent.plain + latent.rope if latent else size_of(text, "head_dim") or hidden // heads
    )
    if not latent:
        _check_heads(text, model_type, hidden, heads, kv_heads)
    inner = size_of(text, *_INNER) or size_of(text, "expansion_ratio") * hidden or 4 * hidden
    query, key_value = heads * head_dim, kv_heads * head_dim
    experts = experts_of(model_type, text, layers, inner)
    linears = family.attention_linears(layers, hidden, query, key_value)
    if latent:
        linears = [(*shape, layers) for shape in latent.linears(hidden, heads)]
    dense = size_of(text, "intermediate_size_mlp") or inner
    linears += family.mlp_linears(layers - experts.blocks, hidden, dense)
    if experts.shared:
        linears += family.mlp_linears(experts.blocks, hidden, experts.shared)
    if model_type == "qwen2_moe":
        linears.append(("shared_expert_gate", hidden, 1, experts.blocks))
    active = experts.active * experts.width + experts.shared if experts.blocks else 0
    context = size_of(text, *_CONTEXT) or _DEFAULT_CONTEXT
    found = Arch(
        model_type=model_type,
        architecture=_architecture(config, text),
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=kv_heads,
        head_dim=head_dim,
        inner=max(active, dense if layers > experts.blocks else 0),
        vocab=vocab,
        tied=is_tied(config, None),
        context=context,
        linears=tuple(Linear(*shape) for shape in linears if shape[-1]),
        other_weights=experts.weights(hidden),
        qk_norm=bool(family.qk_norm),
        extra_norms=max(family.norms - 2, 0),
        experts=experts.count if experts.blocks else 0,
        latent=latent.cached if latent and model_type in CACHES_LATENT else 0,
        gate=_gate(text),
        source="config" if model_type in FAMILIES else "guess",
    )
    biased = family.biased + ("qo" if text.get("attention_bias") else "")
    return replace(found, other_weights=found.other_weights + _small(found, family, biased))


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of the language model, which it may nest.

    Raises:
        ModelError: Something else stands where it would be.
    """
    for name in _PARTS:
        part = config.get(name)
        if part is not None and not isinstance(part, Mapping):
            raise ModelError(
                f"config.json: {name} holds {type(part).__name__}",
                expected="an object with the sizes of the language model",
                hint="copy or download the model again",
            )
        if part and size_of(part, *_HIDDEN):
            return part
    return config


def _needed(config: Mapping[str, Any], model_type: str) -> tuple[int, int, int, int]:
    """Hidden width, layers, heads and vocabulary.

    Raises:
        ModelError: Lists those that are missing, and those that are no such number.
    """
    names = {
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "vocab_size": ("vocab_size",),
    }
    sizes = {name: size_of(config, *spellings) for name, spellings in names.items()}
    missing, wrong = [], []
    for name, spellings in names.items():
        given = [f"{key}: {config[key]!r:.40}" for key in spellings if config.get(key) is not None]
        most = _MOST.get(name, _MOST_OF_ANYTHING)
        if given and not 0 < sizes[name] <= most:
            wrong.append(f"{given[0]} (a whole number from 1 to {most})")
        elif not given:
            missing.append(name)
    for key in (*_KV_HEADS, *_INNER, "head_dim"):  # which may be left out, but say something else
        value = config.get(key)
        if value is not None and not isinstance(value, list) and not size_of(config, key):
            wrong.append(f"{key}: {value!r:.40} (a whole number from 1)")
    if wrong:
        raise _wrong_sizes(model_type, wrong)
    if missing:
        raise ModelError(
            f"config.json of a {model_type} model has no {', '.join(missing)}",
            expected="the config of a decoder (causal language model)",
            hint="choose a text generation model as model.base",
        )
    return (
        sizes["hidden_size"],
        sizes["num_hidden_layers"],
        sizes["num_attention_heads"],
        sizes["vocab_size"],
    )


def _wrong_sizes(model_type: str, wrong: list[str]) -> ModelError:
    return ModelError(
        f"config.json of a {model_type} model: {'; '.join(wrong)}",
        expected="sizes as transformers writes them",
        hint="copy or download the model again",
    )


def _check_heads(
    config: Mapping[str, Any], model_type: str, hidden: int, heads: int, kv_heads: int
) -> None:
    """Refuse heads that do not divide what they share: transformers would not load the model.

    Raises:
        ModelError: They do not.
    """
    wrong = []
    # Others round down.
    if not size_of(config, "head_dim") and (
        hidden % heads if model_type == "llama" else hidden < heads
    ):
        wrong.append(f"hidden_size {hidden} is no multiple of its {heads} attention heads")
    if heads % kv_heads:
        wrong.append(f"{heads} attention heads cannot share {kv_heads} of keys and values")
    if wrong:
        raise _wrong_sizes(model_type, wrong)


def _kv_heads(model_type: str, config: Mapping[str, Any], heads: int) -> int:
    """Heads of keys and values; one for all queries in older families (multi-query attention)."""
    several = config.get("new_decoder_architecture") if model_type == "falcon" else False
    if model_type in ("falcon", "gpt_bigcode") and not several and config.get("multi_query", True):
        return 1
    if model_type in ALL_HEADS:
        return heads
    grouped = config.get("attn_config")
    inside = size_of(grouped, "kv_n_heads") if isinstance(grouped, Mapping) else 0
    return size_of(config, *_KV_HEADS) or inside or heads


def _latent(config: Mapping[str, Any]) -> Latent | None:
    state = size_of(config, "kv_lora_rank")
    rope, plain = size_of(config, "qk_rope_head_dim"), size_of(config, "qk_nope_head_dim")
    if not (state and rope and plain):
        return None
    value = size_of(config, "v_head_dim") or plain
    return Latent(size_of(config, "q_lora_rank"), state, rope, plain, value)


def _architecture(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The first of the classes that a config names; empty where it names none."""
    named = config.get("architectures") or text.get("architectures")
    named = named if isinstance(named, list) else [named]
    return named[0] if isinstance(named[0] if named else None, str) else ""


def _small(arch: Arch, family: Family, biased: str) -> int:
    """Parameters of norms, biases and positions."""
    norm = arch.hidden * (2 if family.norm_bias else 1)
    found = (arch.layers * family.norms + bool(family.norms)) * norm
    for linear in arch.linears:
        last = linear.name == family.attention[-1] and linear.in_features == arch.query
        into = linear.name in family.attention[:-1] and linear.in_features == arch.hidden
        part = "o" if last else "q" if into else "m"
        found += linear.count * linear.out_features * (part in biased)
    if family.qk_norm == "all":
        found += arch.layers * (arch.query + arch.key_value)
    elif family.qk_norm:
        found += arch.layers * 2 * arch.head_dim
    if family.positions is not None:
        found += (arch.context + family.positions) * arch.hidden
    return found + arch.vocab * family.head_bias


def _gate(config: Mapping[str, Any]) -> str:
    """The MLP's activation; the usual decoders leave it out when it is SiLU."""
    name = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    return "silu" if name == "swish" else str(name)


def with_headers(arch: Arch, tensors: Mapping[str, TensorInfo]) -> Arch:
    """The same shape with layers and counts as stored, which hold for every family.

    A difference from what the config gave is logged: it is a family this module knows wrongly, or a
    checkpoint with surplus tensors.
    """
    linears: Counter[tuple[str, int, int]] = Counter()
    embedding = head = others = 0
    transposed = arch.model_type == "gpt2"  # Conv1D stores (in, out)
    # Stored one by one, experts run as one tensor, and what chooses among them is no linear layer.
    no_linears = ("gate", "router") if arch.experts else ()
    for name, info in tensors.items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if leaf in HEADS:
            head += info.numel
        elif leaf in EMBEDDINGS:
            embedding += info.numel
        elif (
            len(info.shape) == 2
            and name.endswith(".weight")
            and re.search(r"\.\d+\.", name)
            and not re.search(r"\.(experts|router)\.", name)
            and leaf not in no_linears
        ):
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
