"""What every test folder shares."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load_pico() -> ModuleType:
    """`tests/pico.py` as module `pico`, so that tests can say ``from pico import make_pico``."""
    spec = importlib.util.spec_from_file_location("pico", Path(__file__).with_name("pico.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pico"] = module
    spec.loader.exec_module(module)
    return module


_pico = _load_pico()


@pytest.fixture(scope="session")
def pico_model() -> Path:
    """A tiny trained Llama on disk, for reading only; `make_pico` of `pico` writes others."""
    return Path(_pico.cached_pico())
