"""Follows a training step by step, and stops it at the first bad number.

Engine file: imports torch and transformers.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from tuneserve.errors import TrainingDiverged
from tuneserve.lm.load import not_finite
from tuneserve.lm.rows import Rows
from tuneserve.progress import Progress, human_bytes
from tuneserve.train import collective
from tuneserve.train.checkpoints import seal
from tuneserve.train.curves import keep_curve
from tuneserve.train.memory import held_bytes
from tuneserve.train.recipe import Recipe
from tuneserve.train.watching import Skips, StallGuard, flat, hungry

log = logging.getLogger(__name__)


@dataclass
class Watch(TrainerCallback):
    """Follows the steps: progress lines, the loss curve, checkpoints' seals, the first bad number.

    Attributes:
        rows: The rows.
        order: Row indices in training order.
        recipe: Steps and batches.
        curve: The JSONL file of the loss curve, in the work folder.
        progress: Counts steps.
        evaluate: Held-out loss after a step, and every how many to ask for it; None: never.
        guard: Told of every step; says where one hangs.
        best: Called with step and held-out loss of every evaluation.
        loss_scale: What the loss is scaled with now, or None; see `RowTrainer`.
        skips: Steps that were skipped since their gradients overflowed.
        shape: What checkpoints are sealed with; see `RowTrainer`.
    """

    rows: Rows
    order: Sequence[int]
    recipe: Recipe
    curve: Path
    progress: Progress
    evaluate: tuple[int, Callable[[int], float]] | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    guard: StallGuard | None = None
    best: Callable[[int, float], None] | None = None
    loss_scale: Callable[[], float | None] = lambda: None
    skips: Skips = field(default_factory=Skips)
    shape: Mapping[str, int | str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)
    _began: float | None = None

    def begin(self, step: int) -> None:
        """Count from `step`, the last one that a checkpoint holds."""
        self.progress.done = step

    def beat(self) -> None:
        """Something was done, though no step."""
        if self.guard:
            self.guard.beat()

    def rows_of(self, step: int) -> list[int]:
        """Rows that step `step` (from 1) trains on."""
        size = self.recipe.effective_batch
        return list(self.order[(step - 1) * size : step * size])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, unless it has run since the step before."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        else:
            self.waited.append(now - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record a step; called before its checkpoint is written.

        Raises:
            TrainingDiverged: The loss or the gradient norm is not finite, or, where the loss is
                scaled, the gradient norm of many steps.
        """
        if not logs or "loss" not in logs:
            return
        step, loss, norm = state.global_step, float(logs["loss"]), float(logs.get("grad_norm", 0))
        rate = float(logs["learning_rate"])
        point = {"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate}
        scale = self.loss_scale() if math.isfinite(loss) and not math.isfinite(norm) else None
        if scale is not None:
            self._skip(step, scale, rate)
            point |= {"grad_norm": None, "skipped": True, "loss_scale": scale}
        elif not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(step, loss, norm, rate, kwargs.get("model"))
        else:
            self.skips.trained()
        self._write(point)
        now = time.monotonic()
        seconds = now - (self._began or now)
        self._began = now  # reading the next rows is part of their step
        self.seconds.append(seconds)
        self._look(loss, seconds)
        tokens = int(np.sum(self.rows.lengths[self.rows_of(step)]))
        self.tokens += tokens
        speed = f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
        self.progress.advance(1, f"loss {loss:.4f}, {speed}, {human_bytes(held_bytes())}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the held-out loss when it is due; the end is measured elsewhere."""
        if self.evaluate is None or state.global_step >= self.recipe.steps:
            return
        every, measure = self.evaluate
        if state.global_step % every == 0:
            paused = time.monotonic()
            loss = measure(state.global_step)
            if self._began is not None:
                self._began += time.monotonic() - paused
            self._write({"step": state.global_step, "eval_loss": loss})
            log.info("held-out loss at step %d: %.4f", state.global_step, loss)
            if self.best:
                self.best(state.global_step, loss)
            self.beat()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the checkpoint just written: only now does it count."""
        self._began = None
        collective.wait_for_all()  # each rank wrote its random state
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            keep_curve(self.curve, folder)
            seal(folder, self.shape)

    def _look(self, loss: float, seconds: float) -> None:
        """Say, once each, what a person should know while it still runs."""
        self.losses.append(loss)
        if self.guard:
            self.guard.beat(seconds)
        signs = {"flat": flat(self.losses)}
        if torch.cuda.is_available():
            signs["hungry"] = hungry(self.waited, self.seconds)
        for sign, text in signs.items():
            if text and sign not in self._said:
                self._said.add(sign)
                log.warning("%s", text)

    def _skip(self, step: int, scale: float, rate: float) -> None:
        """Go on without a step whose gradients overflowed, or say why not."""
        why = self.skips.skipped(scale)
        if why:
            raise diverged(
                step,
                f"{why}; the last rows are",
                [self.rows.sources[row] for row in self.rows_of(step)],
                expected="gradients that a smaller loss scale keeps within 65504",
                half=True,
                learning_rate=rate,
                loss_scale=scale,
            )
        log.info("step %d: gradients overflowed, skipped; loss scale now %g", step, scale)

    def _write(self, point: dict[str, Any]) -> None:
        if collective.rank():
            return
        with self.curve.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(point) + "\n")

    def _diverged(
        self, step: int, loss: float, norm: float, rate: float, model: Any
    ) -> TrainingDiverged:
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm} (loss {loss})"
        found = diverged(
            step,
            f"{what} at learning rate {rate:.3g}; rows",
            [self.rows.sources[row] for row in self.rows_of(step)],
            expected="a finite loss and gradient norm",
            half=self.loss_scale() is not None,
            learning_rate=rate,
        )
        bad = [] if model is None else not_finite(model)
        if bad:
            found.message += f"; {len(bad)} tensors of the base are not finite, first {bad[0]}"
            found.hint = "download or copy the base again, or choose another; nothing was saved"
            found.details["tensors"] = bad[:20]
        return found


def diverged(
    step: int,
    what: str,
    sources: list[str],
    *,
    expected: str,
    half: bool = False,
    **details: Any,
) -> TrainingDiverged:
    """The error of a number that is not finite, with the rows that it came from; `half`: computed
    in float16."""
    card = (
        "; a model made in bfloat16 may need more than float16's 65504: then use a GPU that has it "
        "(compute capability 8.0, Ampere or newer)"
    )
    more = f" and {len(sources) - 8} more" if len(sources) > 8 else ""
    return TrainingDiverged(
        f"step {step}: {what} {', '.join(sources[:8])}{more}",
        expected=expected,
        hint="look at these rows; if they are fine, lower train.learning_rate or raise "
        f"train.warmup_fraction{card if half else ''}; nothing was saved",
        details={"step": step, "rows": sources[:64], **details},
    )
