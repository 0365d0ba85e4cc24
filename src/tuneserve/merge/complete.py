"""What an adapter's config says was trained, and the adapter holds nothing of.

An adapter of a smaller base, one that was cut short, or one saved without its embeddings: PEFT
merges what is there and at most warns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tuneserve.merge.adapter import Adapter
from tuneserve.merge.names import module_paths


def is_loaded(model_config: Mapping[str, Any], embedding: str) -> Callable[[str], bool]:
    """Whether the model that trains has a tensor of this name.

    Heads that predict further tokens are stored with some models, but the model that trains does
    not load them: layers after the last one, and modules called mtp.

    Args:
        model_config: Says how many layers there are, on top or in its text_config.
        embedding: The input embedding's weight: the text model's layers lie beside it.
    """
    text = model_config.get("text_config")
    parts = (model_config, text if isinstance(text, Mapping) else {})
    count = next((n for p in parts if isinstance(n := p.get("num_hidden_layers"), int)), None)
    stem = embedding.removesuffix(".weight").rpartition(".")[0]
    layer = re.compile(rf"{re.escape(f'{stem}.' if stem else '')}layers\.(\d+)\.")

    def check(name: str) -> bool:
        place = layer.match(name)
        beyond = count is not None and place is not None and int(place[1]) >= count
        return not beyond and not any(part.startswith("mtp") for part in name.split("."))

    return check


def missing_parts(
    adapter: Adapter,
    shapes: Mapping[str, tuple[int, ...]],
    updated: Collection[str],
    saved: Collection[str],
    pair: Collection[str],
    running: Callable[[str], str],
) -> list[str]:
    """What is missing, each kind in a sentence; empty when nothing is.

    Args:
        adapter: The adapter.
        shapes: Of the merged checkpoint's tensors that the model that trains has.
        updated: Those with a low-rank update.
        saved: Those that come from the adapter whole.
        pair: Embedding and head, which names of targets may mean without finding them.
        running: What the running model calls a tensor.
    """
    weights = [
        n for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2 and n not in pair
    ]
    biases = [n for n, s in shapes.items() if n.endswith(".bias") and len(s) == 1]
    found = (
        (
            "targets {} modules of the base",
            untouched_targets([n for n in weights if n not in updated], adapter, running),
        ),
        ("saves {} modules of the base", unsaved_modules(shapes, saved, adapter)),
        ("trains {} biases", unsaved_biases(biases, saved, updated, adapter)),
    )
    return [
        f"the adapter {what.format(len(missing))} for which it has nothing: "
        f"{', '.join(missing[:5])}"
        for what, missing in found
        if missing
    ]


def untouched_targets(
    names: Iterable[str], adapter: Adapter, running: Callable[[str], str]
) -> list[str]:
    """Which weights without an update are on modules that PEFT would have given one.

    Some models store every expert, and hold them as one tensor when they run: no module is there
    for PEFT to find. So experts are missed only where others have updates.
    """
    targets = target_matcher(adapter.config)
    if targets is None:
        return []
    has_experts = any(_EXPERT.search(module) for module in adapter.loras)
    modules = ((n, running(n).removesuffix(".weight")) for n in names)
    return [n for n, m in modules if targets(m) and (has_experts or not _EXPERT.search(m))]


_EXPERT = re.compile(r"\.experts\.\d+\.")


def target_matcher(config: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Whether PEFT would put an adapter on a module path; None where that needs the model.

    As `check_target_module_exists` decides it (PEFT 0.21).
    """
    targets: str | list[str] = config.get("target_modules") or []
    if targets == "all-linear":
        return None
    excluded = config.get("exclude_modules") or []
    saved = [re.escape(name) for name in config.get("modules_to_save") or []]
    within_saved = re.compile(rf"(.*\.)?({'|'.join(saved)})($|\..*)") if saved else None

    def matches(module: str) -> bool:
        if _named(excluded, module) or (within_saved and within_saved.match(module)):
            return False
        if isinstance(targets, str) or module in targets:
            return _named(targets, module)
        return _named(targets, module) and _in_layers(config, module)

    return matches


def _named(names: str | list[str], module: str) -> bool:
    """By a regular expression for the whole path, or by the path's end."""
    if isinstance(names, str):
        return bool(re.fullmatch(names, module))
    return any(module == n or module.endswith(f".{n}") for n in names)


def _in_layers(config: Mapping[str, Any], module: str) -> bool:
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module):
            return int(found["layer"]) in (layers if isinstance(layers, list) else [layers])
    return False


def unsaved_modules(names: Iterable[str], saved: Collection[str], adapter: Adapter) -> list[str]:
    """Modules that were trained whole, and of which nothing was saved.

    Args:
        names: Of the merged checkpoint's tensors.
        saved: Those that come from the adapter.
        adapter: The adapter.
    """
    return [
        module
        for module, below in module_paths(names).items()
        if adapter.saves_module(module) and not any(name in saved for name in below)
    ]


def unsaved_biases(
    names: Iterable[str], saved: Collection[str], updated: Collection[str], adapter: Adapter
) -> list[str]:
    """Biases that were trained and not saved: all, or those of the updated layers.

    Args:
        names: Of the merged checkpoint's biases.
        saved: Tensors that come from the adapter.
        updated: Weights with a low-rank update.
        adapter: The adapter.
    """
    kind = adapter.config.get("bias")
    if kind not in ("all", "lora_only"):
        return []
    weights = {n: f"{n.removesuffix('bias')}weight" for n in names}
    return [n for n, w in weights.items() if n not in saved and (kind == "all" or w in updated)]
