"""What every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from pico import cached_pico


@pytest.fixture(scope="session")
def pico_model() -> Path:
    """A tiny trained Llama on disk, for reading only; `make_pico` of `pico` writes others."""
    return Path(cached_pico())
