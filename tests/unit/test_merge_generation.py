"""Generation configs are repaired until transformers itself, at its strictest, takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuneserve.merge.generation import NAME, generation_config

INVALID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy answers": ({"num_return_sequences": 3}, {}),
    "greedy answers, said": (
        {"num_return_sequences": 3, "do_sample": False},
        {"do_sample": False},
    ),
    "more answers than beams": ({"num_return_sequences": 3, "num_beams": 2}, {"num_beams": 2}),
    "scores": ({"output_scores": True}, {}),
    "logits": (
        {"output_logits": True, "return_dict_in_generate": False},
        {"return_dict_in_generate": False},
    ),
    "attentions": ({"output_attentions": True, "output_hidden_states": True}, {}),
    "no cache": ({"use_cache": False, "cache_implementation": "static"}, {"use_cache": False}),
    "cache of an older release": ({"cache_implementation": "sparkling"}, {}),
    "no new tokens": ({"max_new_tokens": 0}, {}),
    "fewer than none": ({"max_new_tokens": -1}, {}),
    "forced end": (
        {"forced_eos_token_id": 2, "suppress_tokens": [1, 2]},
        {"suppress_tokens": [1, 2]},
    ),
    "forced beginning": (
        {"forced_bos_token_id": [1], "suppress_tokens": [1]},
        {"suppress_tokens": [1]},
    ),
    "early stopping": ({"early_stopping": "soon", "num_beams": 2}, {"num_beams": 2}),
    "beams": ({"early_stopping": True, "length_penalty": 0.5}, {}),
    "arguments": ({"streamer": None, "compile_config": {"mode": "default"}}, {}),
    "assistant": ({"assistant_ensemble_weight": 1.5}, {}),
    "pad": ({"pad_token_id": -1}, {}),
    "sampling": ({"do_sample": False, "top_k": 7, "min_p": 0.1}, {"do_sample": False}),
    "temperature 0": ({"temperature": 0.0, "top_p": 0.9}, {"do_sample": True, "top_k": 1}),
    "temperature 0, said": (
        {"temperature": 0, "do_sample": False},
        {"do_sample": True, "top_k": 1},
    ),
    "temperature 0 beside beams": ({"temperature": 0, "num_beams": 3}, {"num_beams": 3}),
    "several": (
        {"max_new_tokens": 0, "output_scores": True, "num_return_sequences": 2, "top_p": 0.8},
        {"num_return_sequences": 2, "top_p": 0.8, "do_sample": True},
    ),
}

VALID: list[dict[str, Any]] = [
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": "never", "length_penalty": 2.0},
    {"output_scores": True, "return_dict_in_generate": True},
    {"cache_implementation": "static"},
    {"forced_eos_token_id": [2, 3], "suppress_tokens": [2]},
    {"max_new_tokens": 1, "pad_token_id": 0, "temperature": 1.0, "top_k": 50},
]


def repair(folder: Path, generation: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    (folder / NAME).write_text(json.dumps(generation))
    notes: list[str] = []
    written = generation_config([folder], folder, {}, [], notes)
    assert written is not None
    return json.loads(written), notes


def judge(generation: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    GenerationConfig(**generation).validate(strict=True)


@pytest.mark.parametrize("name", INVALID)
def test_what_transformers_refuses_is_repaired(name: str, tmp_path: Path) -> None:
    broken, expected = INVALID[name]
    if name not in ("temperature 0", "temperature 0 beside beams"):  # refused by generate() alone
        with pytest.raises((ValueError, AttributeError)):
            judge(broken)
    repaired, notes = repair(tmp_path, broken)
    assert repaired == expected
    assert notes
    judge(repaired)


@pytest.mark.parametrize("generation", VALID)
def test_what_transformers_takes_is_left_alone(generation: dict[str, Any], tmp_path: Path) -> None:
    judge(generation)
    assert repair(tmp_path, generation) == (generation, [])


NUMBERS = (
    "assistant_ensemble_weight", "num_beams", "num_return_sequences", "max_new_tokens",
    "temperature", "pad_token_id", "eos_token_id", "suppress_tokens", "forced_eos_token_id",
    "early_stopping", "cache_implementation",
)  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["3", [[1], {"a": 1}, "x"], {"a": 1}, False])
def test_values_of_no_sense_are_no_crash(name: str, value: Any, tmp_path: Path) -> None:
    """And the ends are found all the same."""
    (tmp_path / NAME).write_text(json.dumps({name: value, "forced_bos_token_id": 1}))
    notes: list[str] = []
    written = generation_config([tmp_path], tmp_path, {"eos_token_id": 2}, [7], notes)
    assert written is not None
    assert json.loads(written)["eos_token_id"] == [2, 7]


def test_ids_are_kept_beside_what_is_none(tmp_path: Path) -> None:
    repaired, _ = repair(tmp_path, {"suppress_tokens": ["x", 2], "forced_eos_token_id": 2})
    assert repaired == {"suppress_tokens": ["x", 2]}
