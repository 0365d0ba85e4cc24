"""How the blocks of decoder families are made: their linear layers by name, and all else in them.

Read in transformers 5.19, whose modules hold the experts of a block as one tensor: no linear layer,
so that they get no adapter and stay in 16 bits beside a base in NF4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GATED = ("gate_proj", "up_proj", "down_proj")
_FOUR = ("q_proj", "k_proj", "v_proj", "o_proj")
_GPT = ("query_key_value", "dense")
_GPT_MLP = ("dense_h_to_4h", "dense_4h_to_h")


@dataclass(frozen=True)
class Family:
    """What every model of a family shares.

    Attributes:
        attention: Names of queries, keys, values and output, or of one layer for the first three
            and the output.
        mlp: Names of gate, up and down projection; of both in one and down; or, ungated, up and
            down.
        gated: Whether the first of two MLP layers holds gate and up projection.
        norms: Norms of hidden width in a block.
        norm_bias: Whether a norm has a bias.
        biased: Layers with a bias, by part: ``q`` (queries, keys and values), ``o``, ``m`` (MLP).
        positions: Rows of a table of positions beyond the context; None without such a table.
        head_bias: Whether the head has a bias.
        qk_norm: What a norm of queries and of keys is as wide as: a ``head``, or ``all`` of them.
    """

    attention: tuple[str, ...] = _FOUR
    mlp: tuple[str, ...] = _GATED
    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    biased: str = ""
    positions: int | None = None
    head_bias: bool = False
    qk_norm: str = ""

    def attention_linears(
        self, layers: int, hidden: int, query: int, key_value: int
    ) -> list[tuple[str, int, int, int]]:
        """Name, inputs, outputs and number of the attention's linear layers."""
        *into, out = self.attention
        widths = [query, key_value, key_value] if len(into) == 3 else [query + 2 * key_value]
        found = [(name, hidden, width, layers) for name, width in zip(into, widths, strict=True)]
        return [*found, (out, query, hidden, layers)]

    def mlp_linears(self, layers: int, hidden: int, inner: int) -> list[tuple[str, int, int, int]]:
        """The same of the MLPs'."""
        *into, down = self.mlp
        width = 2 * inner if len(into) == 1 and self.gated else inner
        return [*((name, hidden, width, layers) for name in into), (down, inner, hidden, layers)]


_LLAMA = Family()
_OPT = Family(
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("fc1", "fc2"),
    gated=False,
    norm_bias=True,
    biased="qom",
    positions=2,
)
_NEOX = Family(_GPT, _GPT_MLP, gated=False, norm_bias=True, biased="qom")
_GPT2 = Family(
    ("c_attn", "c_proj"),
    ("c_fc", "c_proj"),
    gated=False,
    norm_bias=True,
    biased="qom",
    positions=0,
)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys("llama mistral ministral3 gemma granite smollm3 cwm".split(), _LLAMA),
    **dict.fromkeys("helium ernie4_5 ernie4_5_moe glm4_moe mixtral vaultgemma".split(), _LLAMA),
    **dict.fromkeys("granitemoe llama4_text deepseek_v2 deepseek_v3 minicpm3".split(), _LLAMA),
    **dict.fromkeys("qwen2 qwen2_moe seed_oss".split(), Family(biased="q")),
    **dict.fromkeys("qwen3 qwen3_moe hunyuan_v1_dense".split(), Family(qk_norm="head")),
    "exaone4": Family(qk_norm="head"),
    "gemma2": Family(norms=4),
    **dict.fromkeys("gemma3 gemma3_text".split(), Family(norms=4, qk_norm="head")),
    **dict.fromkeys("olmo2 olmo3 olmoe".split(), Family(qk_norm="all")),
    "olmo": Family(norms=0),
    "cohere": Family(norms=1),
    "cohere2": Family(norms=1),
    "stablelm": Family(norm_bias=True),
    "phi3": Family(("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj")),
    "glm": Family(mlp=("gate_up_proj", "down_proj")),
    "glm4": Family(mlp=("gate_up_proj", "down_proj"), norms=4),
    "gpt_oss": Family(biased="qo"),
    "phimoe": Family(norm_bias=True),
    "arcee": Family(mlp=("up_proj", "down_proj"), gated=False),
    "apertus": Family(mlp=("up_proj", "down_proj"), gated=False, qk_norm="head"),
    "nemotron": Family(mlp=("up_proj", "down_proj"), gated=False, norm_bias=True),
    "starcoder2": Family(mlp=("c_fc", "c_proj"), gated=False, norm_bias=True, biased="qom"),
    "phi": Family(
        ("q_proj", "k_proj", "v_proj", "dense"),
        ("fc1", "fc2"),
        gated=False,
        norms=1,
        norm_bias=True,
        biased="qom",
        head_bias=True,
    ),
    "opt": _OPT,
    "biogpt": _OPT,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": Family(
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        ("c_fc", "c_proj"),
        gated=False,
        norm_bias=True,
        biased="om",
        positions=0,
    ),
    "gptj": Family(
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        ("fc_in", "fc_out"),
        gated=False,
        norms=1,
        norm_bias=True,
        biased="m",
        head_bias=True,
    ),
    "codegen": Family(
        ("qkv_proj", "out_proj"),
        ("fc_in", "fc_out"),
        gated=False,
        norms=1,
        norm_bias=True,
        biased="m",
        head_bias=True,
    ),
    **dict.fromkeys("gpt_neox bloom persimmon".split(), _NEOX),
    "falcon": Family(_GPT, _GPT_MLP, gated=False, norms=1, norm_bias=True),
    "mpt": Family(("Wqkv", "out_proj"), ("up_proj", "down_proj"), gated=False),
}
"""Those of which the layers are known; any other is taken for a Llama."""

# Families whose heads have keys and values of their own each, whatever a config says.
ALL_HEADS = frozenset("gpt2 gpt_neo gpt_neox gptj codegen bloom opt biogpt persimmon".split())
# Families whose narrow state vLLM keeps as it is (0.32, `is_deepseek_mla`).
CACHES_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "longcat_flash")


def family_of(model_type: str) -> Family:
    """A family by `model_type`; a Llama where it is not known."""
    return FAMILIES.get(model_type, _LLAMA)


def size_of(config: Mapping[str, Any], *names: str) -> int:
    """The first of several spellings that holds a positive whole number; 0 when none does."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


@dataclass(frozen=True)
class Latent:
    """Attention through a narrow state that queries and keys are made of (DeepSeek-V2, MLA).

    Attributes:
        queries: Width of the queries' state; 0 where they are made of the hidden state.
        state: Width of what keys and values are made of.
        rope: Width of the one rotated key that all heads share.
        plain: Width of a head's queries and keys that are not rotated.
        value: Width of a head's values.
    """

    queries: int
    state: int
    rope: int
    plain: int
    value: int

    @property
    def cached(self) -> int:
        """What a server that knows of it keeps of a token in a block."""
        return self.state + self.rope

    def linears(self, hidden: int, heads: int) -> list[tuple[str, int, int]]:
        """Name, inputs and outputs of each layer."""
        query = heads * (self.plain + self.rope)
        found = [("q_proj", hidden, query)]
        if self.queries:
            found = [("q_a_proj", hidden, self.queries), ("q_b_proj", self.queries, query)]
        return [
            *found,
            ("kv_a_proj_with_mqa", hidden, self.cached),
            ("kv_b_proj", self.state, heads * (self.plain + self.value)),
            ("o_proj", heads * self.value, hidden),
        ]


@dataclass(frozen=True)
class Experts:
    """The experts of those blocks that have any.

    Attributes:
        count: Of a block.
        active: How many of them take a token.
        width: Inner width of one.
        shared: Inner width of what takes every token; 0 without such a layer.
        blocks: Blocks that have experts.
        biased: Whether their layers have biases.
    """

    count: int
    active: int
    width: int
    shared: int
    blocks: int
    biased: bool = False

    def weights(self, hidden: int) -> int:
        """Parameters of all experts and of what chooses among them, shared layers excepted."""
        one = 3 * hidden * self.width
        if self.biased:
            one += 2 * self.width + hidden + 1  # and of the router's row
        return self.blocks * self.count * (one + hidden)


def experts_of(model_type: str, config: Mapping[str, Any], layers: int, inner: int) -> Experts:
    """What a config says of experts; `count` is 0 for a model without.

    Args:
        model_type: The family.
        config: Of the language model.
        layers: Its blocks.
        inner: Inner width of an MLP that takes every token.
    """
    count = size_of(
        config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
    )
    width = size_of(config, "moe_intermediate_size", "expert_ffn_hidden_size") or inner
    several = size_of(config, "n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    shared = size_of(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or several * width or (inner if model_type == "llama4_text" else 0)
    return Experts(
        count=count,
        active=size_of(config, "num_experts_per_tok", "moe_k", "num_experts_per_token") or 1,
        width=width,
        shared=shared,
        blocks=sum(_has_experts(config, at, layers) for at in range(layers)) if count else 0,
        biased=model_type == "gpt_oss",
    )


def _has_experts(config: Mapping[str, Any], at: int, layers: int) -> bool:
    """Whether block `at` has experts, in any of the ways in which configs say so."""
    kinds, listed = config.get("mlp_layer_types"), config.get("moe_layers")
    if isinstance(kinds, list) and len(kinds) == layers:
        return kinds[at] == "sparse"
    if isinstance(listed, list) and listed:
        return at in listed
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and at in dense:
        return False
    first = size_of(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    period = size_of(config, "expert_layer_period")
    if period:
        return at % period == size_of(config, "expert_layer_offset")
    every = size_of(
        config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"
    )
    return at >= first and (at + 1) % (every or 1) == 0
