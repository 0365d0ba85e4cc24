"""What gates are shown in their tests: losses and distances of models on twenty conversations."""

from __future__ import annotations

import numpy as np

from tuneserve.release.gates import Evidence

SOURCES = [f"chats.jsonl:{i}" for i in range(20)]


def evidence(count: int = 20, spread: float = 0.1, **means: float) -> Evidence:
    """Ten tokens a row; rows are harder and easier by turns, for all models alike."""
    tokens = np.full(count, 10.0)
    turns = np.where(np.arange(count) % 2, spread, -spread)
    nats = {name: tokens * (mean + turns) for name, mean in means.items() if "_" not in name}
    kl = {n[3:]: tokens * (m + turns / 100) for n, m in means.items() if n.startswith("kl_")}
    flip = {n[6:]: tokens * m for n, m in means.items() if n.startswith("flips_")}
    return Evidence(SOURCES[:count], tokens, nats, kl, flip)
