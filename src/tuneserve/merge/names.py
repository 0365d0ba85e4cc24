"""Names: of the running model's parameters in the base's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.merge.adapter import Adapter

# What transformers calls the bare model inside of a causal language model (base_model_prefix).
_BARE_MODELS = frozenset({"model", "transformer", "gpt_neox", "backbone", "rwkv"})


def locator(base: Checkpoint, adapter: Adapter) -> Callable[[str], str]:
    """How names of the running model are spelled in the base's files.

    A checkpoint of the bare model lacks the first part of the running model's names
    (``transformer.h.0`` is stored as ``h.0``), and the reverse happens too, where the adapter is
    not one of a causal language model. One rule must hold for all. Any other first part is a
    foreign one: PEFT would leave such tensors out.
    """
    wanted = [f"{m}.weight" for m in (*adapter.loras, *adapter.tokens)] + list(adapter.saved)
    stored = {name.partition(".")[0] for name in base.tensors} & _BARE_MODELS
    rules: list[Callable[[str], str]] = [lambda name: name]
    if not stored:
        rules.append(_without_bare)
    elif adapter.config.get("task_type") is None:
        rules.extend(map(_with_prefix, sorted(stored)))
    best = max(rules, key=lambda rule: sum(rule(name) in base.tensors for name in wanted))

    def locate(name: str) -> str:
        spelled = best(name)
        return spelled if spelled in base.tensors else name

    return locate


def runner(pairs: Iterable[tuple[str, str]]) -> Callable[[str], str]:
    """What the running model calls the tensors of the base's files: the rule of `locator` again.

    Args:
        pairs: Names of the running model, each with the one that `locator` found for it.
    """
    for name, stored in pairs:
        if name.endswith(f".{stored}"):
            return _with_prefix(name.removesuffix(f".{stored}"))
        if stored.endswith(f".{name}"):
            begin = stored.removesuffix(name)
            return lambda name: name.removeprefix(begin)
    return lambda name: name


def _with_prefix(prefix: str) -> Callable[[str], str]:
    return lambda name: f"{prefix}.{name}"


def _without_bare(name: str) -> str:
    first, _, rest = name.partition(".")
    return rest if first in _BARE_MODELS else name


def module_paths(names: Iterable[str]) -> dict[str, list[str]]:
    """The parameters below every module: of ``a.b.weight`` the modules are ``a.b`` and ``a``."""
    found: dict[str, list[str]] = {}
    for name in names:
        path = name.rpartition(".")[0]
        while path:
            found.setdefault(path, []).append(name)
            path = path.rpartition(".")[0]
    return found
