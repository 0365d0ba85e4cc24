"""Small files of a merged folder: which source wins, what is repaired, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuneserve.errors import AdapterError
from tuneserve.merge.companions import Companions, check_vocabulary, collect

CONFIG = {"model_type": "llama", "eos_token_id": 2, "tie_word_embeddings": True, "vocab_size": 9}


def folder(path: Path, **files: Any) -> Path:
    path.mkdir()
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / name.replace("__", ".")).write_text(text)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(
        tmp_path / "base",
        config__json=CONFIG,
        tokenizer__json="base tokenizer",
        tokenizer_config__json="{}",
        special_tokens_map__json="base only",
        chat_template__jinja="base template",
        generation_config__json={"eos_token_id": [2, 5]},
        LICENSE="licence",
        README__md="card of the base",
        modeling_x__py="code",
    )


def files(base: Path, adapter: Path, changes: dict[str, Any] | None = None) -> Companions:
    return collect(base, CONFIG, changes or {}, adapter, None)


def test_tokenizer_and_template_come_from_training_as_a_set(base: Path, tmp_path: Path) -> None:
    adapter = folder(
        tmp_path / "adapter", tokenizer__json="trained", chat_template__jinja="edited {{ x }}"
    )
    found = files(base, adapter)
    assert found.files["tokenizer.json"] == b"trained"
    assert found.files["chat_template.jinja"] == b"edited {{ x }}"
    # Files of the base's tokenizer that training did not write would mix two tokenizers.
    assert "special_tokens_map.json" not in found.files
    assert found.tokenizer_from == "adapter"
    assert found.files["LICENSE"] == b"licence" and found.files["modeling_x.py"] == b"code"
    assert "README.md" not in found.files
    assert found.files["config.json"] == (base / "config.json").read_bytes()


def test_an_adapter_from_elsewhere_gets_the_bases_tokenizer_and_it_is_said(
    base: Path, tmp_path: Path
) -> None:
    found = files(base, folder(tmp_path / "adapter"))
    assert found.files["tokenizer.json"] == b"base tokenizer"
    assert found.tokenizer_from == "base"
    assert "holds no tokenizer" in found.notes[0]


def test_config_changes_reach_nested_text_configs(base: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "text_config": {"vocab_size": 9, "tie_word_embeddings": True}}
    del config["vocab_size"]
    changes = {"vocab_size": 12, "tie_word_embeddings": False}
    found = collect(base, config, changes, folder(tmp_path / "adapter"), None)
    written = json.loads(found.files["config.json"])
    assert written["text_config"] == {"vocab_size": 12, "tie_word_embeddings": False}
    assert written["tie_word_embeddings"] is False and "vocab_size" not in written


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        # An explicit greedy config keeps being greedy; the fields that contradict it go.
        (
            {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 5]},
            {"do_sample": False, "eos_token_id": [2, 5]},
        ),
        # Sampling fields without the flag mean sampling.
        (
            {"temperature": 0.6, "eos_token_id": [2, 5]},
            {"temperature": 0.6, "eos_token_id": [2, 5], "do_sample": True},
        ),
        ({"length_penalty": 2.0, "eos_token_id": [5, 2]}, {"eos_token_id": [5, 2]}),
        ({"pad_token_id": -1, "eos_token_id": [5, 2]}, {"eos_token_id": [5, 2]}),
        # An end id of the base that training's file lost comes back.
        ({"eos_token_id": 7}, {"eos_token_id": [7, 2, 5]}),
        ({}, {"eos_token_id": [2, 5]}),
    ],
)
def test_generation_configs_are_made_valid_with_all_end_ids(
    generation: dict[str, Any], expected: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    adapter = folder(tmp_path / "adapter", tokenizer__json="t", generation_config__json=generation)
    found = files(base, adapter)
    assert json.loads(found.files["generation_config.json"]) == expected
    assert found.notes


def test_a_valid_generation_config_passes_byte_for_byte(base: Path, tmp_path: Path) -> None:
    text = '{"do_sample": true,   "temperature": 0.6, "eos_token_id": [2, 5]}'
    adapter = folder(tmp_path / "adapter", tokenizer__json="t", generation_config__json=text)
    found = files(base, adapter)
    assert found.files["generation_config.json"] == text.encode()
    assert not found.notes


def test_token_ids_without_a_row_are_refused(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 11, "content": "<x>"}],
    }
    found = Companions({"tokenizer.json": json.dumps(tokenizer).encode()}, "adapter", ())
    check_vocabulary(found, 12, tmp_path)  # padded embeddings have more rows than tokens
    with pytest.raises(AdapterError, match="ids up to 11, the merged embedding has 11 rows"):
        check_vocabulary(found, 11, tmp_path)
