"""TRL's trainer, made to train on given rows in a given order and to stop at the first bad number.

Engine file: imports torch, transformers and trl.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from tuneserve.config import TrainSection
from tuneserve.errors import TrainingDiverged
from tuneserve.lm import fused_head, hardware
from tuneserve.lm.fuse import fuse
from tuneserve.lm.loss import pad_rows
from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.progress import Progress
from tuneserve.train import collective, zero
from tuneserve.train.adapter import WEIGHTS, load_adapter, may_be_unused, unify_dtype
from tuneserve.train.checkpoints import seal
from tuneserve.train.flat import can_be_flat, flat_optimizer
from tuneserve.train.offload import hold_block_inputs
from tuneserve.train.recipe import OFFLOAD, Recipe, rate_factor
from tuneserve.train.trackers import guard_trackers
from tuneserve.train.watching import StallGuard, flat, hungry

log = logging.getLogger(__name__)

PAD_MULTIPLE = 8
"""Widths in multiples of it keep matrix units busy; the tokens added count for nothing."""
# An adapter's gradients are exchanged at once, after the backward pass: that takes milliseconds.
# Smaller buckets travel during it, on multiprocessors that its matrix products then wait for.
_BUCKET_MB = 1024


class RowTrainer(SFTTrainer):
    """`SFTTrainer` over a dataset artifact's rows: nothing is tokenized, cut, shuffled or packed.

    Args:
        model: Wrapped with an adapter.
        rows: The rows.
        order: Row indices as `training_order` gives them.
        recipe: Steps and batches.
        train: The run file's section.
        work: Where checkpoints go.
        tokenizer: Saved beside checkpoints; it tokenizes nothing.
        checkpointing: Recompute activations in the backward pass; `OFFLOAD`: what is kept for that
            lies in host memory.
        callback: Watches the steps.
    """

    optimizer: Any

    def __init__(
        self,
        model: Any,
        rows: Rows,
        order: Sequence[int],
        recipe: Recipe,
        train: TrainSection,
        work: Path,
        tokenizer: Any,
        *,
        checkpointing: bool | str,
        callback: TrainerCallback,
    ) -> None:
        # Routers of experts balance over the tokens that are not padding.
        config = model.config.get_text_config()
        self._routes = bool(getattr(config, "output_router_logits", False))
        self._recipe, self._scheduler, self._zero = recipe, train.lr_scheduler, train.zero > 0
        dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
        options = _arguments(train, recipe, work, checkpointing=bool(checkpointing))
        options["ddp_find_unused_parameters"] = may_be_unused(model)
        if checkpointing == OFFLOAD:
            hold_block_inputs(model)
        if checkpointing:
            # Without dropout nothing random happens in a block, and no state is kept for it.
            random = train.lora.dropout > 0 or bool(getattr(config, "attention_dropout", 0))
            options["gradient_checkpointing_kwargs"] |= {
                "preserve_rng_state": random,
                # The number of kept tensors is compared in any case.
                "determinism_check": "none",
            }
        if self._zero:
            options |= _zero_arguments(train, recipe, model, dtype)
        arguments = SFTConfig(**options)
        # A second GPU that the run file does not name stays idle; never DataParallel.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        # The whole run is one pass over `order`, so that no epoch's end cuts a step short.
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"row": list(order)}),
            data_collator=lambda items: pad_rows(rows, [i["row"] for i in items], PAD_MULTIPLE),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        # TRL made the adapter of a quantized base bf16, also where the CPU has no bf16 arithmetic.
        unify_dtype(self.model, dtype)
        # TRL's head also computes entropy and accuracy, which nobody reads here.
        fused_head.add_fused_head(self.model.get_base_model())
        self._loss_only = fused_head.add_head_loss(self.model.get_base_model())
        self.fused = fuse(self.model)
        hardware.release_memory()  # what loading and looking took, before lasting things are made
        from transformers.trainer_callback import PrinterCallback

        self.remove_callback(PrinterCallback)
        guard_trackers(self.callback_handler)

    @property
    def shares_optimizer(self) -> bool:
        """Whether the optimizer's state is spread over the ranks, and made by DeepSpeed alone."""
        return self._zero

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The run file's optimizer, over all factors as one tensor, however many GPUs there are.

        ZeRO-2 makes one tensor of them itself.
        """
        if self.optimizer is None and not self._zero and can_be_flat(self.model):
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            settings = {**settings, "weight_decay": self.args.weight_decay}
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = flat_optimizer(kind, settings, trained)
            return self.optimizer
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning rate by `rate_factor`."""
        if getattr(self, "lr_scheduler", None) is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer,
                lambda step: rate_factor(step, self._scheduler, self._recipe),
            )
        return self.lr_scheduler

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Summed loss over the supervised tokens of the whole effective batch.

        So a token weighs the same whatever micro-batch it is in. TRL's own method adds three device
        synchronizations a micro-batch, for metrics nobody reads here.
        """
        # Padding is on the right, where no token that counts looks: causal attention needs no mask,
        # and without one its kernel is the fast one, which shares keys among heads.
        inputs = {k: v for k, v in inputs.items() if k != "attention_mask" or self._routes}
        if self._loss_only:
            out = model(**inputs, loss_only=True)
            loss = out.loss
        else:
            out = model(**inputs, fused_lm_head=True)
            loss = -out.log_probs.sum()
        total = num_items_in_batch
        if total is None:
            total = (inputs["labels"][:, 1:] != IGNORED).sum()
        loss = loss / torch.as_tensor(total).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        hardware.drop_workspaces()
        return (loss, out) if return_outputs else loss

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        for handler in arguments["kwargs_handlers"]:  # gradients live in the buckets, once
            handler.gradient_as_bucket_view = True
        return arguments

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter on rank 0: under ZeRO-2, too, every rank has all of it."""
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._zero:
            zero.save_state(self.model, self.model_wrapped.optimizer, Path(output_dir))
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        if not self._zero or resume_from_checkpoint is None:
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        # DeepSpeed copies the weights when it wraps the model, so they are loaded before.
        self._load_from_checkpoint(resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        engine = self.model_wrapped
        steps = zero.load_state(self.model, engine.optimizer, Path(resume_from_checkpoint))
        for _ in range(steps):
            self.lr_scheduler.step()
        return prepared

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Checkpoints need none."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # The library's way loads into float32 and ignores tensors that are missing.
        load_adapter(self.model, Path(resume_from_checkpoint) / WEIGHTS)


def _arguments(
    train: TrainSection, recipe: Recipe, work: Path, *, checkpointing: bool
) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return dict(
        output_dir=str(work),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.micro_batch,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler,
        warmup_steps=recipe.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        optim=optimizer_name(train.optimizer, cuda=cuda),
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        # All weights have the type that is computed in; autocast would only cast them again.
        bf16=False,
        fp16=False,
        use_cpu=not cuda,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=train.save_steps,
        save_total_limit=2,
        eval_strategy="no",
        report_to=train.report_to or "none",
        seed=train.seed,
        data_seed=train.seed,
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
        disable_tqdm=True,
        average_tokens_across_devices=True,
        ddp_broadcast_buffers=False,  # frozen, so the same everywhere
        ddp_bucket_cap_mb=_BUCKET_MB,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def _zero_arguments(
    train: TrainSection, recipe: Recipe, model: Any, dtype: torch.dtype
) -> dict[str, Any]:
    zero.allow_cpus()
    bf16 = dtype == torch.bfloat16
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "deepspeed": zero.configuration(train, recipe, trained=trained, bf16=bf16),
        "bf16": bf16,  # has to agree with DeepSpeed's configuration
        "use_cpu": False,  # by which accelerate would leave DeepSpeed out
    }


def optimizer_name(optimizer: str, *, cuda: bool) -> str:
    """The trainer's name of an optimizer. On a CPU the 8-bit ones give way to the 32-bit one.

    There they save a few megabytes and take as long as the step itself (3.5 s for a 135M model).
    """
    if not cuda and optimizer != "adamw_torch":
        log.info("optimizer: adamw_torch instead of %s, which is made for GPUs", optimizer)
        return "adamw_torch"
    return optimizer


@dataclass
class Watch(TrainerCallback):
    """Follows the steps: progress lines, the loss curve, checkpoints' seals, the first bad number.

    Attributes:
        rows: The rows.
        order: Row indices in training order.
        recipe: Steps and batches.
        curve: The JSONL file of the loss curve, in the work folder.
        progress: Counts steps.
        evaluate: Held-out loss now, and every how many steps to ask for it; None: never.
        guard: Told of every step; says where one hangs.
        best: Called with step and held-out loss of every evaluation.
    """

    rows: Rows
    order: Sequence[int]
    recipe: Recipe
    curve: Path
    progress: Progress
    evaluate: tuple[int, Callable[[], float]] | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    guard: StallGuard | None = None
    best: Callable[[int, float], None] | None = None
    losses: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)
    _began: float | None = None

    def begin(self, step: int) -> None:
        """Count from `step`, the last one that a checkpoint holds."""
        self.progress.done = step

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
            TrainingDiverged: The loss or the gradient norm is not finite.
        """
        if not logs or "loss" not in logs:
            return
        step, loss, norm = state.global_step, float(logs["loss"]), float(logs.get("grad_norm", 0))
        rate = float(logs["learning_rate"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(step, loss, norm, rate)
        point = {"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate}
        self._write(point)
        now = time.monotonic()
        seconds = now - (self._began or now)
        self._began = now  # reading the next rows is part of their step
        self.seconds.append(seconds)
        self._look(loss, seconds)
        tokens = int(np.sum(self.rows.lengths[self.rows_of(step)]))
        self.tokens += tokens
        self.progress.advance(1, f"loss {loss:.4f}, {tokens / max(seconds, 1e-9):,.0f} tokens/s")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the held-out loss when it is due; the end is measured elsewhere."""
        if self.evaluate is None or state.global_step >= self.recipe.steps:
            return
        every, measure = self.evaluate
        if state.global_step % every == 0:
            paused = time.monotonic()
            loss = measure()
            if self._began is not None:
                self._began += time.monotonic() - paused
            self._write({"step": state.global_step, "eval_loss": loss})
            log.info("held-out loss at step %d: %.4f", state.global_step, loss)
            if self.best:
                self.best(state.global_step, loss)
            if self.guard:
                self.guard.beat()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the checkpoint just written: only now does it count."""
        self._began = None
        collective.wait_for_all()  # each rank wrote its random state
        if state.is_world_process_zero:
            seal(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.recipe.shape)

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

    def _write(self, point: dict[str, Any]) -> None:
        if collective.rank():
            return
        with self.curve.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(point) + "\n")

    def _diverged(self, step: int, loss: float, norm: float, rate: float) -> TrainingDiverged:
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm} (loss {loss})"
        sources = [self.rows.sources[row] for row in self.rows_of(step)]
        return TrainingDiverged(
            f"step {step}: {what} at learning rate {rate:.3g}; rows {', '.join(sources[:8])}"
            + (f" and {len(sources) - 8} more" if len(sources) > 8 else ""),
            expected="a finite loss and gradient norm",
            hint="look at these rows; if they are fine, lower train.learning_rate or raise "
            "train.warmup_fraction; nothing was saved",
            details={"step": step, "learning_rate": rate, "rows": sources[:64]},
        )
