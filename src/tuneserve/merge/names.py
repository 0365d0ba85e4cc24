"""Names: of the running model's parameters in the base's files, and of what PEFT targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.merge.adapter import Adapter


def locator(base: Checkpoint, adapter: Adapter) -> Callable[[str], str]:
    """How names of the running model are spelled in the base's files.

    A checkpoint of the bare model lacks the first part of the running model's names
    (``transformer.h.0`` is stored as ``h.0``), and the reverse happens too. One rule must hold for
    all.
    """
    wanted = [f"{m}.weight" for m in (*adapter.loras, *adapter.tokens)] + list(adapter.saved)
    prefixes = sorted({name.partition(".")[0] for name in base.tensors})
    rules: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: name.partition(".")[2],
        *((lambda name, p=prefix: f"{p}.{name}") for prefix in prefixes),
    ]
    best = max(rules, key=lambda rule: sum(rule(name) in base.tensors for name in wanted))

    def locate(name: str) -> str:
        spelled = best(name)
        return spelled if spelled in base.tensors else name

    return locate


def untouched_targets(
    names: Iterable[str],
    adapter_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    embedding: str,
) -> list[str]:
    """Which weights without an update are on modules that PEFT would have given one.

    Heads that predict further tokens are stored with some models, but the model that trains does
    not load them: layers after the last one, and modules called mtp.

    Args:
        names: Of the weights.
        adapter_config: Says which modules are targets.
        model_config: Says how many layers there are, on top or in its text_config.
        embedding: The input embedding's weight: the text model's layers lie beside it.
    """
    targets = target_matcher(adapter_config)
    if targets is None:
        return []
    text = model_config.get("text_config")
    parts = (model_config, text if isinstance(text, Mapping) else {})
    count = next((n for p in parts if isinstance(n := p.get("num_hidden_layers"), int)), None)
    stem = embedding.removesuffix(".weight").rpartition(".")[0]
    layer = re.compile(rf"{re.escape(f'{stem}.' if stem else '')}layers\.(\d+)\.")

    def is_loaded(name: str) -> bool:
        place = layer.match(name)
        beyond = count is not None and place is not None and int(place[1]) >= count
        return not beyond and not any(part.startswith("mtp") for part in name.split("."))

    return [n for n in names if is_loaded(n) and targets(n.removesuffix(".weight"))]


def target_matcher(config: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Whether PEFT would put an adapter on a module path; None where that needs the model."""
    targets = config.get("target_modules")
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return None
    if isinstance(targets, str):
        if targets == "all-linear":
            return None
        pattern = re.compile(targets)
        return lambda module: bool(pattern.fullmatch(module))
    names = list(targets or [])
    return lambda module: any(module == n or module.endswith(f".{n}") for n in names)
