"""The merged folder's generation config: valid for transformers, and with every end id."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.generation import as_ids, valid_generation_config

NAME = "generation_config.json"


def generation_config(
    folders: Iterable[Path],
    base: Path,
    config: Mapping[str, Any],
    tokenizer_ends: list[int],
    notes: list[str],
) -> bytes | None:
    """The first folder's generation config that can be read, made valid and with all end ids.

    Args:
        folders: Where to look for one, in this order.
        base: The base model's folder.
        config: Its config.json.
        tokenizer_ends: End ids of the tokenizers of training.
        notes: Takes what was repaired.

    Returns:
        None where no folder has one and config.json names every end id.
    """
    raw, generation = _first(folders, notes)
    ends = _ends_of(config)
    if raw is None:
        if set(tokenizer_ends) <= set(ends):
            return None  # a loader makes one of config.json, which is whole
        names = ("bos_token_id", "pad_token_id")
        generation = {n: config[n] for n in names if config.get(n) is not None}
    _, of_base = _first([base], [])
    ends += _ends_of(of_base)
    repaired, mended = valid_generation_config(generation)
    notes += mended
    repaired = _with_all_ends(repaired, [*ends, *tokenizer_ends], notes)
    if raw is not None and repaired == generation:
        return raw
    return (json.dumps(repaired, indent=2, ensure_ascii=False) + "\n").encode()


def _first(folders: Iterable[Path], notes: list[str]) -> tuple[bytes | None, dict[str, Any]]:
    """The first file that holds a JSON object, and what it holds; what is none is said."""
    for path in (folder / NAME for folder in dict.fromkeys(folders)):
        if not path.is_file():
            continue
        raw = path.read_bytes()
        try:
            generation = json.loads(raw)
        except ValueError:
            generation = None
        if isinstance(generation, dict):
            return raw, generation
        notes.append(f"{path} is not a JSON object: left out")
    return None, {}


def _with_all_ends(
    generation: dict[str, Any], known: list[int], notes: list[str]
) -> dict[str, Any]:
    """Every id that the base or the tokenizer of training ends at stays one: losing one makes a
    served model run on.
    """
    given = generation.get("eos_token_id")
    ends = [i for i in as_ids(given) if i >= 0]
    if given is not None and ends != (given if isinstance(given, list) else [given]):
        notes.append(f"generation config has the end ids {given}: those that are no ids removed")
        generation = {n: v for n, v in generation.items() if n != "eos_token_id"}
        generation |= {"eos_token_id": ends} if ends else {}
    missing = [i for i in dict.fromkeys(known) if i not in ends]
    if not missing:
        return generation
    notes.append(f"generation config lacked the base's or the tokenizer's end ids {missing}: added")
    return {**generation, "eos_token_id": [*ends, *missing]}


def _ends_of(config: Mapping[str, Any]) -> list[int]:
    """End ids of a config, also of one that nests its text model's."""
    text = config.get("text_config")
    nested = as_ids(text.get("eos_token_id")) if isinstance(text, Mapping) else []
    return [*as_ids(config.get("eos_token_id")), *nested]
