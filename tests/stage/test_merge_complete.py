"""What was trained and is not in the adapter, and names that are not the base's, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file

from merge_house import make_adapter, rewrite
from merge_house import make_base as light_base
from merge_models import assert_same_model, gpt2, llama, load, make_base, qwen, train
from tuneserve.errors import AdapterError
from tuneserve.merge import merge_adapter
from tuneserve.merge.complete import target_matcher

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS: list[Any] = [["q_proj"], ["self_attn.q_proj"], r".*layers\.\d+\.mlp\..*", ["model.head"]]
EXCLUDED: list[Any] = [None, ["layers.1.self_attn.q_proj"], r".*\.0\..*", ["head"]]
LAYERS: list[tuple[Any, Any]] = [
    (None, None),
    (1, None),
    ([0, 2], "layers"),
    ([], None),
    ([3], "h"),
]
WHOLE: list[Any] = [None, ["mlp"], ["head"]]
MODULES = [
    "model.head",
    "q_proj",
    "model.vision.0.q_proj",
    *(f"model.layers.{n}.{m}" for n in range(4) for m in ("self_attn.q_proj", "mlp.up", "q_projx")),
    "model.layers.1.mlp.experts.3.q_proj",
]


def test_targets_are_those_of_peft() -> None:
    for targets, excluded, (layers, pattern), whole in product(TARGETS, EXCLUDED, LAYERS, WHOLE):
        if isinstance(targets, str) and layers is not None:
            continue  # PEFT refuses both together
        config: dict[str, Any] = {
            "target_modules": targets,
            "exclude_modules": excluded,
            "layers_to_transform": layers,
            "layers_pattern": pattern if layers else None,
            "modules_to_save": whole,
        }
        ours, theirs = target_matcher(config), LoraConfig(**config)
        assert ours is not None
        for module in MODULES:
            found = check_target_module_exists(theirs, module)
            is_excluded = type(found).__name__ == "_ExcludedModule"
            assert ours(module) is (bool(found) and not is_excluded), (config, module)


def drop(part: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


LOST: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "saved head": (
        llama,
        {"modules_to_save": ["lm_head"]},
        "lm_head",
        "saves 1 modules of the base for which it has nothing: lm_head",
    ),
    "saved norms": (
        llama,
        {"modules_to_save": ["input_layernorm"]},
        "layers.1.input_layernorm",
        "for which it has nothing: model.layers.1.input_layernorm",
    ),
    "token rows": (
        llama,
        {"trainable_token_indices": [3, 5]},
        "token_adapter",
        "trainable_token_indices is set, and no rows of tokens were saved",
    ),
    "a bias of all": (
        qwen,
        {"bias": "all"},
        "layers.1.self_attn.k_proj.bias",
        "trains 1 biases for which it has nothing: model.layers.1.self_attn.k_proj.bias",
    ),
    "the updated layers' biases": (
        qwen,
        {"bias": "lora_only"},
        ".bias",
        "trains 2 biases for which it has nothing: model.layers.0.self_attn.q_proj.bias, ",
    ),
    "a layer beside excluded ones": (
        lambda: llama(num_hidden_layers=3),
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        "layers.1.self_attn.q_proj",
        "targets 1 modules .* has nothing: model.layers.1.self_attn.q_proj",
    ),
    "a layer of those that were named": (
        lambda: llama(num_hidden_layers=3),
        {"layers_to_transform": [0, 1]},
        "layers.1.self_attn.q_proj",
        "targets 1 modules .* has nothing: model.layers.1.self_attn.q_proj",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_was_trained_and_not_saved_is_missed(name: str, tmp_path: Path) -> None:
    """PEFT merges the rest, and at most warns of missing keys."""
    config, lora, part, message = LOST[name]
    base = make_base(tmp_path / "base", config())
    settings = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **lora}
    adapter = tmp_path / "adapter"
    train(load(base), LoraConfig(**settings)).save_pretrained(adapter)
    rewrite(adapter, drop(part))
    with pytest.raises(AdapterError, match=message):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert not (tmp_path / "out").exists()


PREFIX = "base_model.model."


@pytest.mark.parametrize(
    "foreign",
    ["model.", "foo.", "_orig_mod.", "module.", "transformer.", "base_model.model."],
)
def test_a_foreign_prefix_is_refused(foreign: str, tmp_path: Path) -> None:
    """PEFT finds no place for such tensors, and the merged model is the base."""
    base, adapter = light_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    rewrite(
        adapter,
        lambda t: [t.update({k.replace(PREFIX, PREFIX + foreign, 1): t.pop(k)}) for k in list(t)],
    )
    with pytest.raises(AdapterError, match="layers.0.self_attn.q_proj"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert not (tmp_path / "out").exists()


def test_a_missing_prefix_is_refused_for_a_causal_language_model(tmp_path: Path) -> None:
    """It is right where the adapter was trained on the bare model, whose names lack it."""
    base, adapter = light_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    rewrite(
        adapter,
        lambda t: [t.update({k.replace(f"{PREFIX}model.", PREFIX): t.pop(k)}) for k in list(t)],
    )
    merge_adapter(base, adapter, tmp_path / "bare", sample=False)
    plain = make_adapter(tmp_path / "plain")
    merge_adapter(base, plain, tmp_path / "whole", sample=False)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "bare" / path.name).read_bytes()
    config = json.loads((adapter / "adapter_config.json").read_text())
    less = {"exclude_modules": r"layers\.1\..*"}  # by the bare model's names
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **less}))
    rewrite(adapter, lambda t: [t.pop(k) for k in list(t) if ".layers.1." in k])
    merge_adapter(base, adapter, tmp_path / "less", sample=False)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    with pytest.raises(AdapterError, match=r"the base has no layers\.0\.self_attn\.q_proj"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)


def test_a_checkpoint_of_the_bare_model_is_known_by_its_names(tmp_path: Path) -> None:
    """As the hub's gpt2 is stored: h.0 of what runs as transformer.h.0."""
    base = make_base(tmp_path / "base", gpt2())
    values = load_file(base / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in values.items()}
    save_file(bare, base / "model.safetensors", {"format": "pt"})
    settings = {"fan_in_fan_out": True, "task_type": "CAUSAL_LM", "modules_to_save": ["lm_head"]}
    settings["exclude_modules"] = ["transformer.h.0.attn.c_attn"]  # by the running model's name
    config = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], **settings)
    train(load(base), config).save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", sample=False)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {*bare, "lm_head.weight"}
    peft = PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    assert_same_model(tmp_path / "out", peft.merge_and_unload())


def test_what_opt_stores_of_its_bare_model(tmp_path: Path) -> None:
    """From 6.7B on the hub's files begin with decoder, which runs as model.decoder."""
    base, adapter = light_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    merge_adapter(base, adapter, tmp_path / "plain", sample=False)
    for path in base.glob("*.safetensors"):
        save_file({_opt(n, ""): t for n, t in load_file(path).items()}, path, {"format": "pt"})
    index = base / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] = {_opt(n, ""): file for n, file in table["weight_map"].items()}
    index.write_text(json.dumps(table))
    rewrite(adapter, lambda t: [t.update({_opt(k, "model."): t.pop(k)}) for k in list(t)])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    for path in (tmp_path / "plain").glob("*.safetensors"):
        theirs = load_file(tmp_path / "out" / path.name)
        assert all(torch.equal(t, theirs[_opt(n, "")]) for n, t in load_file(path).items())


def _opt(name: str, first: str) -> str:
    return name.replace("model.layers.", f"{first}decoder.layers.").replace(
        "model.embed_tokens.", f"{first}decoder.embed_tokens."
    )
