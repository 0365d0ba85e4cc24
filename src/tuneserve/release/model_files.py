"""What a model folder says about serving it: template, stop tokens, sizes, and what is unsafe in
it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import ModelError
from tuneserve.parallel import ServedShape
from tuneserve.plan.arch import arch_from_config

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
# Written by pickle: loading one runs whatever code it holds.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True)
class ModelFacts:
    """Facts for serving, read from JSON files and file sizes.

    Attributes:
        path: The folder.
        weights_bytes: Size of its safetensors files.
        kv_bytes_per_token: Keys and values of one token over all layers.
        max_positions: Longest sequence the model was made for; None when it does not say.
        stop_ids: Ids that end an answer.
        generation: generation_config.json where it lacks some of `stop_ids`, with all of them;
            None where the server finds them by itself.
        chat_template: The template file to give to the server; None when it is in
            tokenizer_config.json.
        has_template: Whether there is a chat template at all.
        sampling: Sampling defaults in generation_config.json.
        quantization: `quant_method` of the checkpoint; None for 16 bits.
        shape: What is cut when the server is spread over GPUs.
    """

    path: Path
    weights_bytes: int
    kv_bytes_per_token: int
    max_positions: int | None
    stop_ids: tuple[int, ...]
    chat_template: Path | None
    has_template: bool
    sampling: dict[str, float] = field(default_factory=dict)
    quantization: str | None = None
    shape: ServedShape = ServedShape(0, 0, 0, 0, 0)
    generation: dict[str, Any] | None = None


def read_model(path: Path, *, trust_remote_code: bool = False) -> ModelFacts:
    """Read the facts of a model folder.

    Raises:
        ModelError: It is no model folder, has no chat template, or holds code or pickles that
            were not allowed.
    """
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: there is no config.json",
            expected="a folder with a model in Hugging Face format",
            hint="give the folder that holds config.json and *.safetensors",
        )
    config = _read_json(path / "config.json")
    tokenizer = _read_json(path / "tokenizer_config.json")
    generation = _read_json(path / "generation_config.json")
    _refuse_unsafe(path, config, tokenizer, trust_remote_code)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelError(
            f"{path}: there is no *.safetensors file",
            expected="a model's weights as safetensors",
            hint="export the model as safetensors",
        )
    template = path / "chat_template.jinja"
    has_template = template.is_file() or bool(tokenizer.get("chat_template"))
    if not has_template:
        raise ModelError(
            f"{path}: the tokenizer has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            hint="every chat request would be refused; set model.chat_template and train again, "
            "or put the template the model was trained with into the folder",
        )
    text = config.get("text_config") or config
    quantization = config.get("quantization_config") or {}
    stop_ids = _ids(config, text, generation)
    # vLLM reads the end ids of config.json only where there is no generation_config.json.
    lacking = (path / "generation_config.json").is_file() and set(_ids(generation)) < set(stop_ids)
    return ModelFacts(
        path=path,
        weights_bytes=sum(file.stat().st_size for file in weights),
        kv_bytes_per_token=_kv_bytes(config),
        max_positions=text.get("max_position_embeddings"),
        stop_ids=stop_ids,
        chat_template=template if template.is_file() else None,
        has_template=has_template,
        sampling={name: generation[name] for name in _SAMPLING if generation.get(name) is not None},
        quantization=quantization.get("quant_method"),
        shape=ServedShape.from_config(config),
        generation={**generation, "eos_token_id": list(stop_ids)} if lacking else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read ({error})",
            expected="a file that this user may read, of valid JSON",
            hint="mend or copy it again",
        ) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: holds {type(data).__name__}", expected="a JSON object")
    return data


def _refuse_unsafe(
    path: Path, config: dict[str, Any], tokenizer: dict[str, Any], trust_remote_code: bool
) -> None:
    problems = [f"{f.name} is a pickle" for pattern in _PICKLES for f in path.glob(pattern)]
    if not trust_remote_code:
        problems += [
            f"{name} names code to run (auto_map)"
            for name, data in (("config.json", config), ("tokenizer_config.json", tokenizer))
            if data.get("auto_map")
        ]
    if problems:
        raise ModelError(
            f"{path}: {'; '.join(problems)}",
            expected="safetensors and no code",
            hint="convert pickles to safetensors; for code that you have read set "
            "model.trust_remote_code: true",
        )


def _kv_bytes(config: dict[str, Any]) -> int:
    """Bytes that a server keeps of a token, as the plan counts them; 0 where no size is known."""
    text = config.get("text_config") or config
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    # vLLM serves float32 checkpoints in bfloat16 unless told otherwise, so never more than 2 bytes.
    element_bytes = min(2, _DTYPE_BYTES.get(dtype, 2))
    try:
        # Its vocabulary is no matter here, and may not be named.
        arch = arch_from_config({"model_type": config.get("model_type"), **text, "vocab_size": 1})
    except ModelError:
        return 0
    return arch.kv_bytes_per_token(element_bytes)


def _ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    """The end ids that any of these name."""
    found: set[int] = set()
    for value in (config.get("eos_token_id") for config in configs):
        values = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int))
    return tuple(sorted(found))


def write_generation(facts: ModelFacts, folder: Path) -> Path | None:
    """Write `facts.generation`, where there is one, into `folder`, and return that."""
    if facts.generation is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / "generation_config.json", facts.generation)
    return folder


def longest_that_fits(facts: ModelFacts, kv_bytes: int, block_tokens: int) -> int:
    """Tokens of the longest sequence whose keys and values fit into `kv_bytes`, in whole blocks."""
    if not facts.kv_bytes_per_token:
        return facts.max_positions or 0
    return math.floor(kv_bytes / facts.kv_bytes_per_token / block_tokens) * block_tokens
