"""Fields of an adapter's config that are not what PEFT's LoraConfig lets them be."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from merge_house import make_adapter
from tuneserve.errors import AdapterError
from tuneserve.merge.adapter import open_adapter, scale_of
from tuneserve.merge.fields import wrong_fields

WRONG: list[tuple[str, Any]] = [
    ("r", "8"), ("r", 0), ("r", -1), ("r", None), ("r", 8.0), ("r", True), ("r", [8]),
    ("lora_alpha", "16"), ("lora_alpha", None), ("lora_alpha", True),
    ("rank_pattern", "q_proj"), ("rank_pattern", {"q_proj": "8"}), ("rank_pattern", {"(": 8}),
    ("rank_pattern", {"q_proj": 0}), ("alpha_pattern", {"q_proj": None}),
    ("alpha_pattern", {"[": 1}),
    ("target_modules", "("), ("target_modules", 3), ("target_modules", [3]),
    ("target_modules", {"q_proj": 1}), ("exclude_modules", "("), ("modules_to_save", "lm_head"),
    ("modules_to_save", [None]), ("trainable_token_indices", 3), ("trainable_token_indices", ["a"]),
    ("trainable_token_indices", {"embed_tokens": "ab"}), ("layers_to_transform", "0"),
    ("layers_pattern", ["("]), ("use_dora", "false"), ("use_rslora", 1), ("lora_bias", "no"),
    ("fan_in_fan_out", "x"), ("ensure_weight_tying", 0), ("init_lora_weights", ["pissa"]),
    ("bias", "some"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_field_is_named_with_what_it_holds(name: str, value: Any, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", **{name: value})
    with pytest.raises(AdapterError) as caught:
        open_adapter(adapter)
    assert caught.value.message.startswith(
        f"{adapter / 'adapter_config.json'}: {name} is {value!r},"
    )
    assert len(caught.value.details["fields"]) == 1


def test_all_wrong_fields_are_named_at_once(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", r="8", use_dora="no")
    with pytest.raises(AdapterError, match="r is '8', .*; use_dora is 'no', not true or false"):
        open_adapter(adapter)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "r": 1,
            "lora_alpha": 0.5,
            "rank_pattern": {r".*\.q_proj": 3},
            "alpha_pattern": {"x": 2.5},
        },
        {"target_modules": ["a"], "exclude_modules": [], "modules_to_save": ["b"]},
        {"trainable_token_indices": {"embed_tokens": [1, 2]}, "layers_to_transform": [0]},
        {"trainable_token_indices": [5], "layers_to_transform": 3, "layers_pattern": "h"},
        {"init_lora_weights": "gaussian", "bias": "lora_only", "use_dora": True},
    ],
)
def test_what_peft_writes_is_right(fields: dict[str, Any]) -> None:
    from peft import LoraConfig

    written = json.loads(json.dumps(asdict(LoraConfig(**fields)), default=list))
    assert wrong_fields(written) == []
    assert wrong_fields(fields) == []


@pytest.mark.parametrize(
    ("config", "module", "expected"),
    [
        ({"r": 16, "lora_alpha": 16, "use_rslora": True}, "q", (16, 4.0)),  # not 1.0
        ({"r": 16, "lora_alpha": 16}, "q", (16, 1.0)),
        ({}, "q", (8, 1.0)),  # PEFT's defaults
        ({"r": 8, "lora_alpha": 8, "rank_pattern": {"k": 2}}, "m.k", (2, 4.0)),
        ({"r": 8, "lora_alpha": 8, "rank_pattern": {"k": 2}}, "m.qk", (8, 1.0)),
        ({"r": 8, "lora_alpha": 8, "alpha_pattern": {r"^m\.0\.k": 4}}, "m.0.k", (8, 0.5)),
        (
            {"r": 8, "lora_alpha": 8, "rank_pattern": {"k": 4}, "alpha_pattern": {r"0\.k": 6}},
            "m.0.k",
            (4, 1.5),
        ),
        (
            {"r": 9, "lora_alpha": 6, "use_rslora": True, "rank_pattern": {"k": 4}},
            "k",
            (4, 3.0),
        ),
    ],
)
def test_scales(config: dict[str, Any], module: str, expected: tuple[int, float]) -> None:
    assert scale_of(config, module) == expected
