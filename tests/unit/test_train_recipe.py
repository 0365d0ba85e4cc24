"""Steps, batches, learning rate and row order: no torch needed."""

from __future__ import annotations

import logging
import math
from collections import Counter

import pytest

from tuneserve.config import TrainSection
from tuneserve.errors import RunFileError
from tuneserve.stages import STAGES
from tuneserve.train.recipe import Recipe, dropout_seed, make_recipe, rate_factor, training_order


def recipe_of(rows: int = 100, micro: int = 4, processes: int = 1, **train: object) -> Recipe:
    return make_recipe(TrainSection.model_validate(train), rows, micro, processes)


@pytest.mark.parametrize(
    ("rows", "epochs", "effective", "steps"),
    [
        (100, 1, 16, 7),
        (96, 1, 16, 6),
        (100, 0.5, 10, 5),
        (100, 3, 10, 30),
        (3, 0.1, 1, 1),
        (8, 1e-9, 4, 1),
    ],
)
def test_steps_cover_the_epochs(rows: int, epochs: float, effective: int, steps: int) -> None:
    assert recipe_of(rows, epochs=epochs, effective_batch=effective).steps == steps


def test_max_steps_overrides_epochs() -> None:
    assert recipe_of(epochs=9, max_steps=5).steps == 5


@pytest.mark.parametrize(
    ("effective", "limit", "micro", "accumulation"),
    [(16, 4, 4, 4), (16, 5, 4, 4), (6, 4, 3, 2), (7, 4, 1, 7), (4, 64, 4, 1)],
)
def test_micro_batch_divides_the_effective_batch(
    effective: int, limit: int, micro: int, accumulation: int
) -> None:
    recipe = recipe_of(effective_batch=effective, micro=limit)
    assert (recipe.micro_batch, recipe.accumulation) == (micro, accumulation)


def test_fewer_rows_than_a_batch_is_one_pass_a_step_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        recipe = recipe_of(rows=10, epochs=2, effective_batch=16, micro=4)
    assert (recipe.effective_batch, recipe.micro_batch, recipe.steps) == (10, 2, 2)
    assert "only 10 rows" in caplog.text and "16" in caplog.text


def test_processes_share_a_step_evenly() -> None:
    recipe = recipe_of(effective_batch=16, micro=4, processes=2)
    assert recipe.micro_batch * recipe.accumulation * recipe.processes == 16
    with pytest.raises(RunFileError, match="among 3 processes"):
        recipe_of(effective_batch=16, processes=3)


def test_few_rows_are_the_same_steps_whatever_the_number_of_processes() -> None:
    one = recipe_of(rows=6, epochs=2, effective_batch=16)
    two = recipe_of(rows=6, epochs=2, effective_batch=16, processes=2)
    assert one.shape == two.shape == {"steps": 2, "effective_batch": 6}
    with pytest.raises(RunFileError) as caught:
        recipe_of(rows=7, effective_batch=16, processes=2)
    assert "7 rows a step (there are only 7 rows)" in caught.value.message
    assert "train.effective_batch: 6" in caught.value.message
    with pytest.raises(RunFileError, match="train.gpus: 1, or more rows"):
        recipe_of(rows=1, effective_batch=16, processes=2)


def test_dropout_of_a_resumed_run_is_not_that_of_its_first_steps() -> None:
    seeds = {dropout_seed(7, rank, step) for rank in range(8) for step in range(0, 500, 50)}
    assert len(seeds) == 80 and dropout_seed(7, 0, 0) == 7


def test_order_is_whole_epochs_whatever_the_micro_batch() -> None:
    lengths = [(7 * i) % 50 + 1 for i in range(30)]
    wide = recipe_of(rows=30, epochs=2, effective_batch=6, micro=6)
    narrow = recipe_of(rows=30, epochs=2, effective_batch=6, micro=1)
    order = training_order(lengths, wide, seed=3)
    assert order == training_order(lengths, narrow, seed=3)
    assert order != training_order(lengths, wide, seed=4)
    assert Counter(order) == {row: 2 for row in range(30)}


@pytest.mark.parametrize(
    ("rows", "effective", "epochs"), [(64, 16, 3), (24, 8, 2), (10, 4, 3), (7, 5, 9), (5, 5, 4)]
)
def test_no_step_has_a_row_twice(rows: int, effective: int, epochs: int) -> None:
    """Rows of several epochs have like lengths with themselves, and would share a step."""
    lengths = [(7 * i) % 5 + 1 for i in range(rows)]
    recipe = recipe_of(rows=rows, epochs=epochs, effective_batch=effective)
    for seed in range(20):
        order = training_order(lengths, recipe, seed=seed)
        assert len(order) == recipe.steps * effective
        steps = [order[at : at + effective] for at in range(0, len(order), effective)]
        assert all(len(set(step)) == effective for step in steps)
        whole = rows // effective * effective  # before the first step of two epochs
        assert len(set(order[:whole])) == whole
        seen = Counter(order)
        assert max(seen.values()) - min(seen.values()) <= 1
        if rows % effective == 0:
            for epoch in range(epochs):
                assert set(order[epoch * rows : (epoch + 1) * rows]) == set(range(rows))


def test_an_order_belongs_to_a_version_of_the_code() -> None:
    """Another order is another adapter, and no checkpoint of this one may go on in it: whoever
    changes it raises the version, by which trainings have work folders of their own.
    """
    recipe = recipe_of(rows=5, epochs=2, effective_batch=3)
    order = training_order([1, 2, 3, 4, 5], recipe, seed=0)
    assert order == [2, 1, 0, 4, 3, 0, 3, 2, 1, 4, 1, 0]
    assert STAGES["train"].code_version == 3


def test_order_fills_the_last_step_with_rows_of_a_next_epoch() -> None:
    recipe = recipe_of(rows=10, epochs=1, effective_batch=4)
    order = training_order([1] * 10, recipe, seed=0)
    assert len(order) == 12 and set(order) == set(range(10))


def test_rows_of_like_length_share_a_step() -> None:
    lengths = [(37 * i) % 200 + 1 for i in range(200)]
    recipe = recipe_of(rows=200, effective_batch=8)
    order = training_order(lengths, recipe, seed=0)
    steps = [[lengths[row] for row in order[at : at + 8]] for at in range(0, 200, 8)]
    padded = sum(8 * max(step) for step in steps)
    assert padded < 1.05 * sum(lengths)
    assert all(step == sorted(step, reverse=True) for step in steps)
    firsts = [step[0] for step in steps]
    assert firsts != sorted(firsts) and firsts != sorted(firsts, reverse=True)


@pytest.mark.parametrize("scheduler", ["cosine", "linear", "constant"])
def test_no_step_is_spent_on_a_rate_of_zero(scheduler: str) -> None:
    recipe = recipe_of(max_steps=20, warmup_fraction=0.2)
    factors = [rate_factor(step, scheduler, recipe) for step in range(recipe.steps)]
    assert recipe.warmup_steps == 4
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert min(factors) > 0 and max(factors) == 1
    if scheduler == "cosine":
        assert factors[12] == pytest.approx(0.5 * (1 + math.cos(math.pi * 8 / 16)))
    if scheduler == "linear":
        assert factors[12] == pytest.approx(0.5)


def test_a_single_step_is_at_the_full_rate() -> None:
    recipe = recipe_of(max_steps=1, warmup_fraction=1.0)
    assert rate_factor(0, "cosine", recipe) == 1
