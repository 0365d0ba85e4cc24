"""How many steps of how many rows in which order: decided before anything is loaded."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuneserve.config import TrainSection
from tuneserve.errors import RunFileError

log = logging.getLogger(__name__)

OFFLOAD = "offload"
"""Gradient checkpointing whose checkpoints lie in host memory."""

# Rows of like length are brought together within this many steps' worth of rows: wide enough that
# padding nearly vanishes, narrow enough that the order stays well mixed over an epoch.
_GROUPED_STEPS = 50


@dataclass(frozen=True)
class Recipe:
    """The run's shape. ``micro_batch * accumulation * processes == effective_batch``."""

    rows: int
    steps: int
    effective_batch: int
    micro_batch: int
    accumulation: int
    warmup_steps: int
    processes: int = 1

    @property
    def shape(self) -> dict[str, int]:
        """What decides which rows a step sees; the same for all that goes on from a checkpoint."""
        return {"steps": self.steps, "effective_batch": self.effective_batch}

    def with_micro_batch(self, limit: int) -> Recipe:
        """The same steps with the largest micro-batch up to `limit` that divides evenly."""
        share = self.effective_batch // self.processes
        micro = max(n for n in range(1, min(limit, share) + 1) if share % n == 0)
        return replace(self, micro_batch=micro, accumulation=share // micro)


def make_recipe(train: TrainSection, rows: int, micro_batch: int, processes: int = 1) -> Recipe:
    """Decide steps and batches.

    Every step sees exactly `effective_batch` rows; the last step fills up with rows of a next
    epoch. With fewer rows than `effective_batch`, a step is one pass over all rows, however many
    processes there are: their number decides nothing but the time.

    Args:
        train: The run file's section.
        rows: Training rows there are, at least one.
        micro_batch: Most rows a forward pass; the largest divisor of the effective batch is taken.
        processes: Processes that share a step.

    Raises:
        RunFileError: The effective batch cannot be shared evenly among the processes.
    """
    effective = train.effective_batch
    if rows < effective:
        effective = rows
        log.warning(
            "train.effective_batch is %d, but there are only %d rows: each step takes %d",
            train.effective_batch,
            rows,
            effective,
        )
    problem = uneven(train, rows, processes)
    if problem:
        raise RunFileError(problem, expected=f"a multiple of {processes}")
    steps = train.max_steps or steps_of(train.epochs, rows, effective)
    warmup = min(math.ceil(train.warmup_fraction * steps), steps - 1)
    recipe = Recipe(rows, steps, effective, 1, effective // processes, warmup, processes)
    return recipe.with_micro_batch(micro_batch)


def steps_of(epochs: float, rows: int, effective_batch: int) -> int:
    """Optimizer steps of so many epochs, the last one filled up; at least one."""
    return max(1, math.ceil(round(epochs * rows / effective_batch, 6)))


def uneven(train: TrainSection, rows: int, processes: int) -> str:
    """Why a step cannot be shared evenly among the processes, and what would do; else empty."""
    effective = min(train.effective_batch, rows)
    if effective % processes == 0:
        return ""
    few = f" (there are only {rows} rows)" if rows < train.effective_batch else ""
    largest = effective - effective % processes
    other = f"train.effective_batch: {largest}" if largest else "more rows"
    return (
        f"train.gpus: {effective} rows a step{few} cannot be shared evenly among {processes} "
        f"processes; set train.gpus: 1, or {other}"
    )


def dropout_seed(seed: int, rank: int, step: int) -> int:
    """Where a rank's dropout begins when it goes on after `step`.

    Not where an earlier step began: with another number of processes than before, whose random
    states are then of no use, the masks of the first steps would come again.
    """
    return seed + rank + 1000 * step


def rate_factor(step: int, scheduler: str, recipe: Recipe) -> float:
    """Learning rate of step `step` (from 0) as a share of the peak.

    It rises in equal parts over the warm-up, none of it zero, then falls to just above zero at the
    last step, or stays: no step is spent on a rate of zero, which matters in runs of some tens of
    steps.
    """
    if step < recipe.warmup_steps:
        return (step + 1) / (recipe.warmup_steps + 1)
    done = (step - recipe.warmup_steps) / max(recipe.steps - recipe.warmup_steps, 1)
    if scheduler == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return max(1 - done, 0.0) if scheduler == "linear" else 1.0


def training_order(lengths: Sequence[int], recipe: Recipe, seed: int) -> list[int]:
    """Row indices in the order they are trained on: ``steps * effective_batch`` of them.

    Each epoch is a shuffle of all rows, and no row is in a step twice. Within windows of some steps
    of one epoch, rows of like length are put into the same step, longest first within a step, and
    the steps of a window are shuffled again. The order depends on `lengths`, the recipe's steps and
    effective batch, and `seed`; never on the micro-batch, so a run that goes on with a smaller one
    sees the same rows in the same steps.
    """
    rng = random.Random(seed)
    size = recipe.effective_batch
    wanted = recipe.steps * size
    stream: list[int] = []
    while len(stream) < wanted:
        begun = len(stream) % size  # rows of a step that ends in the next epoch
        stream += _epoch(len(lengths), stream[len(stream) - begun :], size, rng)
    del stream[wanted:]
    order: list[int] = []
    for begin, end in _windows(recipe):
        # Stable: rows of equal length keep their shuffled order.
        rows = sorted(stream[begin:end], key=lambda row: -lengths[row])
        steps = [rows[at : at + size] for at in range(0, len(rows), size)]
        rng.shuffle(steps)
        order += [row for step in steps for row in step]
    return order


def _epoch(rows: int, before: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """All rows, shuffled; those in the step that `before` begins are others than these."""
    epoch = list(range(rows))
    rng.shuffle(epoch)
    missing = size - len(before) if before else 0
    taken = set(before)
    others = (at for at in range(missing, rows) if epoch[at] not in taken)
    for at in range(missing):
        if epoch[at] in taken:
            other = next(others)  # there are as many: a step has no more rows than an epoch
            epoch[at], epoch[other] = epoch[other], epoch[at]
    return epoch


def _windows(recipe: Recipe) -> list[tuple[int, int]]:
    """Begins and ends of what is grouped by length: steps within one epoch, each step that has rows
    of two epochs alone. Rows of several epochs would come together with themselves.
    """
    size = recipe.effective_batch
    found: list[tuple[int, int]] = []
    alone = True  # whether the last window takes no step more
    for begin in range(0, recipe.steps * size, size):
        two = begin // recipe.rows != (begin + size - 1) // recipe.rows
        full = bool(found) and begin - found[-1][0] >= _GROUPED_STEPS * size
        if alone or two or full or begin % recipe.rows == 0:
            found.append((begin, begin + size))
        else:
            found[-1] = (found[-1][0], begin + size)
        alone = two
    return found
