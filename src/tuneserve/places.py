"""Where things live on this machine: the store, the run state and the cache of converted models."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`TUNESERVE_HOME`, or `.tuneserve` in the working directory; absolute."""
    return Path(os.environ.get("TUNESERVE_HOME") or ".tuneserve").absolute()


def store_root(configured: str | None = None) -> Path:
    """The artifact store: the run file's `store.root`, or `store` in `home()`."""
    return Path(configured).absolute() if configured else home() / "store"


def run_root() -> Path:
    """Sockets, releases and logs of the servers of this `home()`."""
    return home() / "run"


def model_cache() -> Path:
    """Converted base models, shared by all projects of the user."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tuneserve"
