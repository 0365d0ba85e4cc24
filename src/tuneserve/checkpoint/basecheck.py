"""What a base model's files show to be wrong, before hours are spent on it.

Pickled weights are refused by `headers`; here come remote code, quantized weights, a missing
tokenizer or chat template, and a head that is nowhere stored.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.generation import valid_generation_config
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.checkpoint.quantized import packed_by, quantized_by
from tuneserve.checkpoint.ties import is_tied
from tuneserve.config import ModelSection
from tuneserve.errors import ModelError

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
# Modules that are output heads: of nearly all models, of GPT-NeoX, BioGPT, RWKV and XLNet.
_HEADS = ("lm_head", "embed_out", "output_projection", "head", "lm_loss")
# Ends of the names of classes that write no text.
_NO_GENERATORS = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForRewardModeling",
)


def check_config(folder: Path, model: ModelSection) -> None:
    """Refuse a model for what its config shows, before its weights are here.

    Raises:
        ModelError: Lists all reasons.
    """
    problems = _config_problems(read_config(folder), model)
    if problems:
        raise _refusal(folder, problems)


def check_base(folder: Path, model: ModelSection) -> None:
    """Refuse a folder that cannot be tuned, quantized or served, for every reason its files show.

    Raises:
        ModelError: Lists all reasons.
    """
    config = read_config(folder)
    problems = _config_problems(config, model)
    problems += _tokenizer_problems(folder, config, model)
    try:
        tensors = Checkpoint.open(folder).tensors
    except ModelError as error:
        problems.append(error.message)
    else:
        problems += _head_problems(set(tensors), config)
        packed = packed_by(folder, tensors.values())
        if packed and not quantized_by(config):
            problems.append(_quantized(packed))
    if problems:
        raise _refusal(folder, problems)
    for note in valid_generation_config(generation_config(folder))[1]:
        log.warning("the base's %s (mended in what we write)", note)


def _refusal(folder: Path, problems: list[str]) -> ModelError:
    return ModelError(
        f"{folder} cannot be used as a base model:\n  " + "\n  ".join(problems),
        expected="config.json, 16-bit safetensors, a tokenizer and a chat template",
        hint="mend what is listed, or choose another model.base",
        details={"problems": problems},
    )


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's `config.json`.

    Raises:
        ModelError: There is no such folder, no config in it, or it is not a JSON object.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: there is no such folder",
            expected="a directory with a model, org/name of a hub, or builtin:smollm2-135m",
            hint="mend model.base",
        )
    if not path.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise ModelError(
            f"{folder}: has no config.json" + (", but is a LoRA adapter" if adapter else ""),
            expected="a model as save_pretrained of transformers writes it",
            hint="name its base model instead" if adapter else "mend model.base",
        )
    return _json(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error})", expected="JSON, as transformers saves it"
        ) from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: holds {type(data).__name__}", expected="a JSON object")
    return data


def _config_problems(config: dict[str, Any], model: ModelSection) -> list[str]:
    problems = []
    if not config.get("model_type"):
        problems.append("config.json has no model_type")
    if "auto_map" in config and not model.trust_remote_code:
        problems.append(
            "it comes with Python code of its own (auto_map); read it, then set "
            "model.trust_remote_code"
        )
    if method := quantized_by(config):
        problems.append(_quantized(method))
    named = config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if names and all(name.endswith(_NO_GENERATORS) for name in names):
        problems.append(f"{names[0]} is no causal language model, and writes no answers")
    elif config.get("is_encoder_decoder") is True:
        problems.append("it is an encoder and a decoder; causal language models alone are trained")
    return problems


def _quantized(method: str) -> str:
    return f"its weights are already quantized ({method}); merging needs the 16-bit original"


def _tokenizer_problems(folder: Path, config: dict[str, Any], model: ModelSection) -> list[str]:
    problems = []
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES) and not (
        (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    ):
        problems.append("it has no tokenizer (tokenizer.json or tokenizer.model)")
    if model.chat_template:
        if not Path(model.chat_template).is_file():
            problems.append(f"model.chat_template: {model.chat_template} does not exist")
    elif not has_chat_template(folder):
        problems.append(
            "its tokenizer has no chat template, so a server would refuse every chat; use the "
            "instruct variant or set model.chat_template"
        )
    rows = config.get("vocab_size")
    path = folder / "tokenizer.json"
    if path.is_file() and isinstance(rows, int) and (largest := _largest_id(path)) >= rows:
        problems.append(
            f"its tokenizer has ids up to {largest}, its embedding only {rows} rows; resize it"
        )
    return problems


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer files hold a chat template, in any of the three places it may be in."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_json(path).get("chat_template"))


def _largest_id(path: Path) -> int:
    data = _json(path)
    ids = [int(token["id"]) for token in data.get("added_tokens") or []]
    vocab = (data.get("model") or {}).get("vocab") or {}
    ids.append(max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1)
    return max(ids)


def _head_problems(tensors: set[str], config: dict[str, Any]) -> list[str]:
    """A head neither stored nor tied would start random; one both stored and tied is ignored.

    A model with code of its own may call its head as it likes, unless its class says CausalLM.
    """
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in tensors}
    stored = not modules.isdisjoint(_HEADS) or "output.weight" in tensors  # of InternLM2
    tied = is_tied(config, stored)
    causal = "CausalLM" in str(config.get("architectures"))
    if not tied and not stored and (causal or "auto_map" not in config):
        settings = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        is_said = any("tie_word_embeddings" in part for part in settings)
        said = "false" if is_said else "not set, which here means false"
        return [f"tie_word_embeddings is {said}, but there is no lm_head.weight"]
    if tied and stored:
        log.warning("lm_head.weight is stored although tied to the embedding; it is not used")
    return []


def generation_config(folder: Path) -> dict[str, Any]:
    """The base's `generation_config.json`; empty when it has none."""
    path = folder / "generation_config.json"
    return _json(path) if path.is_file() else {}
