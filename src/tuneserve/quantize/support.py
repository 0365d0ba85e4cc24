"""Which architectures the installed GPTQModel and vLLM know, without importing either.

Importing them takes half a minute and patches other libraries; their tables are plain dict literals
at module level, so reading the source is enough. In an environment without them nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def architecture_problems(config: Mapping[str, Any]) -> list[str]:
    """Why a model of this config.json could not be quantized or served by what is installed."""
    problems = []
    model_type = str(config.get("model_type"))
    known = gptqmodel_types()
    if known and model_type not in known:
        problems.append(f"model_type {model_type!r} is not one that GPTQModel quantizes")
    served = vllm_architectures()
    names = [str(name) for name in config.get("architectures") or []]
    if served and names and not served.intersection(names):
        problems.append(f"architecture {', '.join(names)} is not one that vLLM serves")
    return problems


@cache
def gptqmodel_types() -> frozenset[str]:
    """`model_type`s in GPTQModel's `MODEL_MAP`; empty when it is not installed."""
    return _dict_keys("gptqmodel", "models/auto.py", ("MODEL_MAP",))


@cache
def vllm_architectures() -> frozenset[str]:
    """Architectures in vLLM's registry; empty when it is not installed."""
    return _dict_keys(
        "vllm",
        "model_executor/models/registry.py",
        ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"),
    )


def _dict_keys(package: str, file: str, variables: tuple[str, ...]) -> frozenset[str]:
    # On disk: a process that trains hides GPTQModel from imports (`tuneserve.lm.load`).
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    path = Path(next(iter(spec.submodule_search_locations))) / file
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    keys: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        named = any(isinstance(t, ast.Name) and t.id in variables for t in targets)
        value = getattr(node, "value", None)
        if named and isinstance(value, ast.Dict):
            keys.update(
                key.value
                for key in value.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )
    return frozenset(keys)
