"""Distances between two models by their likeliest tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tuneserve.lm.scores import TOP, TopScores, divergence, flips, join_rows


def scores(*rows: dict[int, float], tokens: list[int]) -> TopScores:
    """One position a dictionary of probabilities; the likeliest first."""
    ids = np.full((len(rows), TOP), -1, np.int32)
    logs = np.full((len(rows), TOP), -np.inf, np.float32)
    actual = [math.log(row[token]) for row, token in zip(rows, tokens, strict=True)]
    for at, row in enumerate(rows):
        kept = sorted(row.items(), key=lambda pair: -pair[1])[:TOP]
        for place, (token, p) in enumerate(kept):
            ids[at, place], logs[at, place] = token, math.log(p)
    return TopScores(
        np.array([0, len(rows)]),
        np.array(tokens, np.int32),
        np.array(actual, np.float32),
        ids,
        logs,
    )


def test_divergence_of_whole_distributions_is_exact() -> None:
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.2, 2: 0.3, 3: 0.5}
    exact = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    found = divergence(scores(p, tokens=[2]), scores(q, tokens=[2]))
    assert found[0] == pytest.approx(exact, rel=1e-3)
    assert flips(scores(p, tokens=[2]), scores(q, tokens=[2])).tolist() == [True]
    assert divergence(scores(p, tokens=[2]), scores(p, tokens=[2]))[0] == pytest.approx(0, abs=1e-6)


def test_divergence_from_the_top_is_a_lower_bound_of_the_exact_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.full(300, 0.05)) + 1e-9, rng.dirichlet(np.full(300, 0.05)) + 1e-9
        q = 0.7 * p + 0.3 * q
        p, q = p / p.sum(), q / q.sum()
        token = int(rng.integers(300))
        exact = float((p * np.log(p / q)).sum())
        found = divergence(
            scores(dict(enumerate(p)), tokens=[token]), scores(dict(enumerate(q)), tokens=[token])
        )[0]
        assert 0 <= found <= exact + 1e-5


def test_divergence_without_a_common_token_is_of_the_token_and_the_rest() -> None:
    p = scores({5: 0.9, **{i: 0.1 / 30 for i in range(100, 130)}}, tokens=[5])
    q = scores({7: 0.9, **{i: 0.1 / 30 for i in range(200, 230)}, 5: 0.001}, tokens=[5])
    # two outcomes: token 5 (0.9 and 0.001), all others (0.1 and 0.999)
    exact = 0.9 * math.log(0.9 / 0.001) + 0.1 * math.log(0.1 / 0.999)
    assert divergence(p, q)[0] == pytest.approx(exact, rel=1e-3)
    with pytest.raises(ValueError, match="different tokens"):
        divergence(p, scores({6: 1.0}, tokens=[6]))


def test_scores_are_kept_and_read_back(tmp_path: Path) -> None:
    rows = join_rows([scores({1: 0.5, 2: 0.5}, tokens=[1]), scores({3: 1.0}, tokens=[3])])
    for name in ("a", "b"):
        rows.save(tmp_path / f"{name}.npz", rtn_kl=np.array([0.1, 0.2]))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    again, beside = TopScores.load(tmp_path / "a.npz")
    assert again.nats().tolist() == rows.nats().tolist() == pytest.approx([math.log(2), 0.0])
    assert beside["rtn_kl"].tolist() == [0.1, 0.2]
