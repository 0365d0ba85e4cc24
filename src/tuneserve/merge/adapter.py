"""A saved PEFT adapter, understood from its config and header alone: no torch, no weights.

Every tensor of the file ends up in exactly one place of an `Adapter`; what has no place is an
error, and so is a kind of adapter whose merge is another formula than those in
`tuneserve.merge.tiles`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.headers import Shard, TensorInfo, read_header
from tuneserve.checkpoint.jsonfile import read_json
from tuneserve.errors import AdapterError
from tuneserve.merge.fields import wrong_fields

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})

# What PEFT puts before the names of the model's own modules when it saves.
_PREFIX = "base_model.model."

# Wrappers that PEFT may leave in the names of whole parameters.
_WRAPPERS = ("base_layer", "original_module", "token_adapter", "modules_to_save")

# The one around what a module that is trained whole was before; saved too where PEFT saves whole
# embeddings, as it does when the vocabulary grew.
_UNTRAINED = "original_module"

_IN_MEMORY_HINT = (
    "merge with --in-memory, which lets PEFT do it and needs memory for the whole model"
)

# Initializations that subtract the adapter's start from the base: merging onto the original base
# would count it twice. PEFT can convert such an adapter when it saves
# (path_initial_model_for_weight_conversion).
_MUTATING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Fields of LoraConfig (peft 0.21, and the first releases) that do not change how a saved adapter is
# merged, and those that ms-swift adds.
_HARMLESS_FIELDS = frozenset(
    """
    peft_type task_type auto_mapping base_model_name_or_path revision inference_mode peft_version
    r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora
    modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern
    trainable_token_indices loftq_config eva_config corda_config lora_ga_config use_dora
    velora_config qalora_group_size lora_bias ensure_weight_tying runtime_config megatron_core
    merge_weights lora_dtype lorap_lr_ratio lorap_emb_lr
    """.split()  # noqa: SIM905
)

# Fields that make it another method when set, and what that method is called.
_OTHER_METHODS = {
    "target_parameters": "LoRA on fused parameters (experts)",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron layers",
}


@dataclass(frozen=True)
class Lora:
    """The low-rank update of one module.

    A linear layer has `a` of shape (r, in) and `b` of shape (out, r); an embedding has `a` of shape
    (r, rows) and `b` of shape (width, r), and its update is the transposed product.
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    scale: float
    embedding: bool = False
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None

    def tensors(self) -> list[TensorInfo]:
        """The adapter tensors it uses."""
        return [t for t in (self.a, self.b, self.magnitude, self.bias) if t is not None]


@dataclass(frozen=True)
class Adapter:
    """A saved adapter.

    Attributes:
        folder: Where it lies.
        config: Its adapter_config.json.
        shard: Header of its weights.
        loras: Low-rank updates by module path in the running model.
        saved: Whole parameters by name in the running model; several tensors of one name are the
            same parameter under PEFT's wrappers and must hold the same bytes.
        tokens: Retrained rows of embeddings by module path, with the row numbers.
        untrained: What some of `saved` were before training: the only tensors without a use.
    """

    folder: Path
    config: Mapping[str, Any]
    shard: Shard = field(repr=False)
    loras: Mapping[str, Lora] = field(repr=False)
    saved: Mapping[str, tuple[TensorInfo, ...]] = field(repr=False)
    tokens: Mapping[str, tuple[TensorInfo, tuple[int, ...]]] = field(repr=False)
    untrained: tuple[TensorInfo, ...] = field(default=(), repr=False)

    def saves_module(self, module: str) -> bool:
        """Whether `module` was trained whole (PEFT matches `modules_to_save` by the end of the
        path).
        """
        names = self.config.get("modules_to_save") or []
        return any(module == n or module.endswith(f".{n}") for n in names)

    def digests(self) -> tuple[str, str]:
        """SHA-256 of the weights file, and of it with the config's fields that matter."""
        digest = hashlib.sha256()
        with self.shard.file.open("rb", buffering=0) as stream:
            while block := stream.read(4 * 2**20):
                digest.update(block)
        weights = digest.hexdigest()
        config = {k: v for k, v in self.config.items() if k not in _NOT_IN_DIGEST}
        digest.update(json.dumps(config, sort_keys=True).encode())
        return weights, digest.hexdigest()


_NOT_IN_DIGEST = frozenset({"base_model_name_or_path", "peft_version", "auto_mapping"})


def open_adapter(folder: Path) -> Adapter:
    """Read an adapter's config and header, and give every tensor its place.

    Raises:
        AdapterError: It is no LoRA adapter that can be merged tile by tile, or its config is wrong;
            all reasons are listed.
        ModelError: Its weights file is broken.
    """
    config = read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        others = [p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".safetensors")]
        raise AdapterError(
            f"{folder}: has no {WEIGHTS_NAME}{', only ' if others else ''}{', '.join(others[:5])}",
            expected="an adapter saved by PEFT as one safetensors file",
            hint="load it with what saved it and call PEFT's save_pretrained",
        )
    refused = refusals(config)
    if refused:
        raise AdapterError(
            f"{folder}: cannot be merged tile by tile: {'; '.join(refused)}",
            expected="LoRA, rsLoRA or DoRA",
            hint=_IN_MEMORY_HINT,
            details={"refused": refused},
        )
    wrong = wrong_fields(config)
    if wrong:
        raise AdapterError(
            f"{folder / CONFIG_NAME}: {'; '.join(wrong)}",
            expected="fields as PEFT's LoraConfig has them",
            hint="correct the file, or save the adapter again with PEFT",
            details={"fields": wrong},
        )
    shard = read_header(path)
    if not shard.tensors:
        raise AdapterError(
            f"{path}: holds no tensors",
            expected="the adapter's weights, as PEFT saves them",
            hint="train again; nothing was saved",
        )
    return _sort_tensors(folder, config, shard)


def read_config(folder: Path) -> dict[str, Any]:
    """The adapter's config.

    Raises:
        AdapterError: It is missing or not a JSON object, or only folders below have one.
    """
    below = sorted(p.parent.name for p in folder.glob(f"*/{CONFIG_NAME}"))
    if below and not (folder / CONFIG_NAME).exists():
        raise AdapterError(
            f"{folder}: has no {CONFIG_NAME}; adapters lie in {', '.join(below[:5])} below it",
            expected="the folder of one adapter",
            hint=f"name one: {folder / below[0]}",
        )
    return read_json(folder / CONFIG_NAME, kind=AdapterError, writer="PEFT")


def refusals(config: Mapping[str, Any]) -> list[str]:
    """Why an adapter with this config cannot be merged tile by tile; empty when it can."""
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"its method is {kind}"]
    reasons = []
    init = str(config.get("init_lora_weights", True)).lower()
    if init.startswith(_MUTATING_INITS):
        reasons.append(f"init_lora_weights={init} changed the base it was trained on")
    for name, method in _OTHER_METHODS.items():
        if config.get(name):
            reasons.append(f"{name} makes it {method}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        reasons.append(f"its task is {config['task_type']}, not CAUSAL_LM")
    unknown = sorted(
        name
        for name, value in config.items()
        if value and name not in _HARMLESS_FIELDS and name not in _OTHER_METHODS
    )
    if unknown:
        reasons.append(f"its config sets fields that are not known: {', '.join(unknown)}")
    return reasons


def pattern_key(patterns: Iterable[str], module: str) -> str | None:
    """The first pattern that names `module`, as PEFT's `get_pattern_key` decides it (0.21)."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return None


def scale_of(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank and scale of a module: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732)."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    rank = ranks.get(pattern_key(ranks, module), config.get("r", 8))
    alpha = alphas.get(pattern_key(alphas, module), config.get("lora_alpha", 8))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


_PART_SUFFIXES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
_TOKENS_SUFFIX = ".token_adapter.trainable_tokens_delta"


def _sort_tensors(folder: Path, config: Mapping[str, Any], shard: Shard) -> Adapter:
    parts: dict[str, dict[str, TensorInfo]] = {}
    saved: dict[str, list[TensorInfo]] = {}
    before: dict[str, list[TensorInfo]] = {}
    tokens: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for info in shard.tensors:
        if not info.name.startswith(_PREFIX) or info.name.startswith(_PREFIX * 2):
            problems.append(f"{info.name}: does not begin with {_PREFIX} once")
            continue
        if info.dtype not in FLOAT_DTYPES:
            problems.append(f"{info.name}: has dtype {info.dtype}")
            continue
        name = info.name.removeprefix(_PREFIX)
        suffix = next((s for s in _PART_SUFFIXES if name.endswith(s)), None)
        if suffix:
            module, part = name.removesuffix(suffix), _PART_SUFFIXES[suffix]
            if parts.setdefault(module, {}).setdefault(part, info) is not info:
                problems.append(f"{info.name}: is there twice, as {parts[module][part].name}")
        elif name.endswith(_TOKENS_SUFFIX):
            tokens[name.removesuffix(_TOKENS_SUFFIX)] = info
        elif any(p.startswith(("lora_", "trainable_tokens")) for p in name.split(".")):
            problems.append(f"{info.name}: is not a part of a LoRA layer that is known")
        else:
            plain = ".".join(p for p in name.split(".") if p not in _WRAPPERS)
            kept = before if _UNTRAINED in name.split(".") else saved
            kept.setdefault(plain, []).append(info)
    untrained = [info for name, infos in before.items() if name in saved for info in infos]
    saved |= {name: infos for name, infos in before.items() if name not in saved}
    loras = {m: lora for m, p in parts.items() if (lora := _lora(config, m, p, problems))}
    token_rows = {
        m: (info, rows)
        for m, info in tokens.items()
        if (rows := _token_rows(config, m, info, problems)) is not None
    }
    if config.get("trainable_token_indices") and not tokens:
        problems.append("trainable_token_indices is set, and no rows of tokens were saved")
    if problems:
        raise AdapterError(
            f"{shard.file}: {len(problems)} tensors cannot be placed: {'; '.join(problems[:10])}",
            expected="the tensors of a LoRA adapter as PEFT saves it",
            hint=_IN_MEMORY_HINT,
            details={"problems": problems[:100]},
        )
    whole = {name: tuple(infos) for name, infos in saved.items()}
    return Adapter(folder, config, shard, loras, whole, token_rows, tuple(untrained))


def _lora(
    config: Mapping[str, Any], module: str, parts: dict[str, TensorInfo], problems: list[str]
) -> Lora | None:
    """One module's update from its parts, or None after its faults were added to `problems`."""
    embedding = "embedding_a" in parts or "embedding_b" in parts
    names = ("embedding_a", "embedding_b") if embedding else ("a", "b")
    if not all(name in parts for name in names):
        problems.append(f"{module}: has only {', '.join(sorted(parts))}")
        return None
    a, b = parts.pop(names[0]), parts.pop(names[1])
    magnitude, bias = parts.pop("magnitude", None), parts.pop("bias", None)
    before = len(problems)
    if parts:
        problems.append(f"{module}: also has {', '.join(sorted(parts))}")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        problems.append(f"{module}: shapes {a.shape} and {b.shape} are no low-rank pair")
        return None
    rank, scale = scale_of(config, module)
    if rank != a.shape[0]:
        problems.append(f"{module}: has rank {a.shape[0]}, its config says {rank}")
    if bool(config.get("use_dora")) != (magnitude is not None):
        found = "a" if magnitude else "no"
        problems.append(f"{module}: has {found} magnitude, use_dora={config.get('use_dora')}")
    if bool(config.get("lora_bias")) != (bias is not None) and not embedding:
        found = "a" if bias else "no"
        problems.append(f"{module}: has {found} lora_B bias, lora_bias={config.get('lora_bias')}")
    if len(problems) > before:
        return None
    return Lora(module, a, b, scale, embedding, magnitude, bias)


def _token_rows(
    config: Mapping[str, Any], module: str, info: TensorInfo, problems: list[str]
) -> tuple[int, ...] | None:
    """The row numbers of retrained tokens; a plain list in the config is for every embedding."""
    indices = config.get("trainable_token_indices") or []
    if isinstance(indices, dict):
        keys = [k for k in indices if module == k or module.endswith(f".{k}")]
        if not keys and len(indices) == 1:  # a tied head, saved too because the vocabulary grew
            keys = list(indices)
        indices = indices[keys[0]] if keys else []
    if len(info.shape) != 2 or len(indices) != info.shape[0]:
        problems.append(
            f"{info.name}: has shape {info.shape} for {len(indices)} trainable_token_indices"
        )
        return None
    return tuple(int(i) for i in indices)
