"""Which architectures the GPTQModel and the vLLM of an interpreter know, without importing either.

Importing them takes half a minute and patches other libraries; their tables are plain dict literals
at module level, so reading the source is enough. Where they are not installed, or an interpreter
does not answer, nothing is said.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_ASK_SECONDS = 30


def architecture_problems(
    config: Mapping[str, Any], quantizer: str | None = None, server: str | None = None
) -> list[str]:
    """Why a model of this config.json could not be quantized or served by what is installed.

    Args:
        config: As in config.json.
        quantizer: The interpreter that has GPTQModel; None: this one.
        server: The interpreter that has vLLM; None: this one.
    """
    problems = []
    model_type = str(config.get("model_type"))
    known = gptqmodel_types(quantizer or sys.executable)
    if known and model_type not in known:
        whose = f" of {quantizer}" if quantizer else ""
        problems.append(f"model_type {model_type!r} is not one that GPTQModel{whose} quantizes")
    served = vllm_architectures(server or sys.executable)
    names = [str(name) for name in config.get("architectures") or []]
    if served and names and not served.intersection(names):
        whose = f" of {server}" if server else ""
        problems.append(f"architecture {', '.join(names)} is not one that vLLM{whose} serves")
    return problems


@cache
def gptqmodel_types(python: str = sys.executable) -> frozenset[str]:
    """`model_type`s in the `MODEL_MAP` of an interpreter's GPTQModel; empty without it."""
    return _dict_keys(python, "gptqmodel", "models/auto.py", ("MODEL_MAP",))


@cache
def vllm_architectures(python: str = sys.executable) -> frozenset[str]:
    """Architectures in the registry of an interpreter's vLLM; empty without it."""
    return _dict_keys(
        python,
        "vllm",
        "model_executor/models/registry.py",
        ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"),
    )


def _folder(python: str, package: str) -> Path | None:
    """Where an interpreter has a package; None without it, or where it cannot be asked."""
    if python == sys.executable:
        # On disk: a process that trains hides GPTQModel from imports (`tuneserve.lm.load`).
        spec = PathFinder.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec else []
    else:
        code = (
            "from importlib.util import find_spec\n"
            f"spec = find_spec({package!r})\n"
            "print(*(spec.submodule_search_locations or () if spec else ()), sep='\\n')"
        )
        try:
            done = subprocess.run(
                [python, "-c", code],
                capture_output=True,
                text=True,
                timeout=_ASK_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return None
        places = done.stdout.split("\n")
    return next((Path(place) for place in places if place and Path(place).is_dir()), None)


def _dict_keys(python: str, package: str, file: str, variables: tuple[str, ...]) -> frozenset[str]:
    folder = _folder(python, package)
    if folder is None:
        return frozenset()
    try:
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
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
