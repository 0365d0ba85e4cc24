"""The picture of where an adapter changed the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuneserve.merge.picture import change_by_layer, plot_change


def lora(norm: float, relative: float | None) -> dict[str, Any]:
    return {"kind": "lora", "delta_norm": norm, "delta_relative": relative}


TENSORS = {
    "model.embed_tokens.weight": lora(1.0, 0.25),
    "model.norm.weight": {"kind": "copy"},
    "model.layers.0.mlp.down_proj.weight": lora(1.0, 0.02),
    "model.layers.0.self_attn.q_proj.weight": lora(1.0, 0.01),
    "model.layers.10.self_attn.q_proj.weight": lora(2.0, 0.03),
    "model.layers.10.self_attn.v_proj.weight": lora(0.0, None),  # of weights that are all zero
    # Changes of 3 and 4 on weights of 100 and 50: 5 on sqrt(100^2 + 50^2).
    "model.layers.3.mlp.experts.0.w1.weight": lora(3.0, 0.03),
    "model.layers.3.mlp.experts.17.w1.weight": lora(4.0, 0.08),
}


def test_changes_are_sorted_by_module_and_layer() -> None:
    layers, others = change_by_layer(TENSORS)
    assert list(layers) == ["self_attn.q_proj", "mlp.down_proj", "mlp.experts.w1"]
    assert layers["self_attn.q_proj"] == pytest.approx({0: 0.01, 10: 0.03})
    assert layers["mlp.experts.w1"] == pytest.approx({3: 5 / np.hypot(100, 50)})
    assert others == {"model.embed_tokens": pytest.approx(0.25)}


def test_other_families_name_their_layers_otherwise() -> None:
    layers, _ = change_by_layer({"transformer.h.7.attn.c_attn.weight": lora(1.0, 0.5)})
    assert layers == {"attn.c_attn": {7: pytest.approx(0.5)}}


def test_the_same_merge_gives_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "change.png"
    assert plot_change(TENSORS, path)
    first = path.read_bytes()
    plot_change(TENSORS, path)
    assert path.read_bytes() == first


def test_a_merge_that_changed_no_layer_has_no_picture(tmp_path: Path) -> None:
    assert not plot_change({"lm_head.weight": lora(1.0, 0.1)}, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
