"""What every test folder shares."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    """`tests/NAME.py` as module NAME, so that tests can say ``from pico import make_pico``."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_pico = _load("pico")
_load("shim")
_load("prefect_worker")
_load("train_rows")


@pytest.fixture(scope="session")
def pico_model() -> Path:
    """A tiny trained Llama on disk, for reading only; `make_pico` of `pico` writes others."""
    return Path(_pico.cached_pico())
