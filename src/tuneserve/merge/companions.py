"""The small files of a merged folder: config, tokenizer, chat template, generation config.

Weights decide nothing here. The config comes from the base, with what the merge changed; tokenizer,
template and generation config come from the training output as a set, because ids were rendered
with them; where the training output has none (an adapter from elsewhere) the base's are taken, and
it is said.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneserve.errors import AdapterError, ModelError

log = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATE_FOLDER = "additional_chat_templates"

# Of the base, what a loader needs beside the weights, and what its licence asks to keep.
_BASE_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)

# A generation config that samples nothing must not set these (transformers,
# GenerationConfig.validate).
_SAMPLING_FIELDS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_BEAM_FIELDS = {"early_stopping": False, "length_penalty": 1.0}


@dataclass(frozen=True)
class Companions:
    """Files to write beside the weights, by relative name, and what had to be said about them."""

    files: Mapping[str, bytes]
    tokenizer_from: str
    notes: tuple[str, ...]


def collect(
    base: Path,
    config: Mapping[str, Any],
    config_changes: Mapping[str, Any],
    adapter: Path,
    tokenizer_from: Path | None,
) -> Companions:
    """Read everything; nothing is written.

    Args:
        base: The base model's folder.
        config: Its config.json.
        config_changes: What the merge changes in it.
        adapter: The training output.
        tokenizer_from: A folder whose tokenizer is taken instead.
    """
    notes: list[str] = []
    files: dict[str, bytes] = {}
    for pattern in _BASE_FILES:
        files.update({p.name: p.read_bytes() for p in sorted(base.glob(pattern)) if p.is_file()})
    files["config.json"] = _config(base, config, config_changes)
    source = tokenizer_from or adapter
    tokenizer = _tokenizer(source)
    if not tokenizer and tokenizer_from is None:
        notes.append("the adapter's folder holds no tokenizer: the base's is taken")
        source, tokenizer = base, _tokenizer(base)
    if not tokenizer:
        notes.append("no tokenizer was found: the merged folder has none")
    files.update(tokenizer)
    generation = _generation_config((source, adapter, base), base, config, notes)
    if generation is not None:
        files["generation_config.json"] = generation
    origin = "base" if source == base else "adapter" if source == adapter else str(source)
    return Companions(files, origin, tuple(notes))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder.

    Raises:
        ModelError: It cannot be read.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error})", expected="JSON, as transformers saves it"
        ) from error
    if not isinstance(data, dict):
        raise ModelError(
            f"{path}: holds a JSON {type(data).__name__}, not an object",
            expected="an object, as transformers saves it",
        )
    return data


def check_vocabulary(companions: Companions, rows: int | None, adapter: Path) -> None:
    """A tokenizer must not know ids for which the merged embedding has no row.

    Raises:
        AdapterError: It does: new tokens were added in training, but their rows were not saved.
    """
    highest = _highest_id(companions.files.get("tokenizer.json"))
    if rows is None or highest is None or highest < rows:
        return
    raise AdapterError(
        f"{adapter}: its tokenizer knows ids up to {highest}, the merged embedding has {rows} rows",
        expected="a row for every token",
        hint="rows of new tokens were never saved: train with modules_to_save or "
        "trainable_token_indices for the embedding",
        details={"highest_id": highest, "rows": rows},
    )


def _highest_id(tokenizer: bytes | None) -> int | None:
    try:
        data = json.loads(tokenizer or b"null")
        vocabulary = data["model"]["vocab"]
        ids = [int(entry["id"]) for entry in data.get("added_tokens", [])]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(vocabulary, dict):
        ids += [int(i) for i in vocabulary.values()]
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    return max(ids, default=None)


def _config(base: Path, config: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """The base's config.json, byte for byte where nothing changed."""
    if not changes:
        return (base / "config.json").read_bytes()
    changed = dict(config)
    text = config.get("text_config")
    for name, value in changes.items():
        if isinstance(text, dict) and name in text:
            changed["text_config"] = text = {**text, name: value}
            if name in config:
                changed[name] = value
        else:
            changed[name] = value
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def _tokenizer(folder: Path) -> dict[str, bytes]:
    found = {n: (folder / n).read_bytes() for n in _TOKENIZER_FILES if (folder / n).is_file()}
    if not found.keys() - {"chat_template.jinja", "chat_template.json"}:
        return {}
    for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja")):
        found[f"{_TEMPLATE_FOLDER}/{path.name}"] = path.read_bytes()
    return found


def _generation_config(
    folders: tuple[Path, ...], base: Path, config: Mapping[str, Any], notes: list[str]
) -> bytes | None:
    """The training output's generation config, else the base's, made valid and with all end ids."""
    path = next(
        (f / "generation_config.json" for f in folders if (f / "generation_config.json").is_file()),
        None,
    )
    if path is None:
        return None
    raw = path.read_bytes()
    try:
        generation = json.loads(raw)
        assert isinstance(generation, dict)
    except (ValueError, AssertionError):
        notes.append("generation_config.json is not a JSON object: left out")
        return None
    repaired = _with_all_ends(_valid(generation, notes), base, config, notes)
    if repaired == generation:
        return raw
    return (json.dumps(repaired, indent=2, ensure_ascii=False) + "\n").encode()


def _valid(generation: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Repair what transformers refuses when it saves such a config, hours later.

    Sampling fields without `do_sample` mean sampling; with an explicit `do_sample: false` they are
    dead.
    """
    repaired = dict(generation)
    sampling = [
        name
        for name, default in _SAMPLING_FIELDS.items()
        if repaired.get(name) is not None and repaired[name] != default
    ]
    if sampling and repaired.get("do_sample") is None:
        repaired["do_sample"] = True
        notes.append(f"generation config sets {', '.join(sampling)}: do_sample set to true")
    elif sampling and repaired["do_sample"] is not True:
        for name in sampling:
            del repaired[name]
        notes.append(f"generation config does not sample: {', '.join(sampling)} removed")
    if repaired.get("num_beams") in (None, 1):
        beams = [
            name
            for name, default in _BEAM_FIELDS.items()
            if repaired.get(name) is not None and repaired[name] != default
        ]
        for name in beams:
            del repaired[name]
        if beams:
            notes.append(f"generation config uses one beam: {', '.join(beams)} removed")
    pad = repaired.get("pad_token_id")
    if isinstance(pad, int) and pad < 0:
        del repaired["pad_token_id"]
        notes.append("generation config had a negative pad_token_id: removed")
    return repaired


def _with_all_ends(
    generation: dict[str, Any], base: Path, config: Mapping[str, Any], notes: list[str]
) -> dict[str, Any]:
    """Every end id that the base stops at stays one: losing one makes a served model run on."""
    ends = _as_list(generation.get("eos_token_id"))
    known = _as_list(config.get("eos_token_id"))
    path = base / "generation_config.json"
    if path.is_file():
        known += _as_list(read_json(path).get("eos_token_id"))
    missing = [i for i in dict.fromkeys(known) if i not in ends]
    if not missing:
        return generation
    notes.append(f"generation config lacked the base's end ids {missing}: added")
    return {**generation, "eos_token_id": [*ends, *missing]}


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
