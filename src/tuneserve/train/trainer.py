"""TRL's trainer, made to train on given rows in a given order.

Engine file: imports torch, transformers and trl.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from tuneserve.config import TrainSection
from tuneserve.lm import fused_head, hardware
from tuneserve.lm.fuse import fuse
from tuneserve.lm.loss import pad_rows
from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.train import collective, zero
from tuneserve.train.adapter import (
    WEIGHTS,
    join_types,
    load_adapter,
    may_be_unused,
    unify_dtype,
)
from tuneserve.train.flat import can_be_flat, flat_optimizer
from tuneserve.train.recipe import OFFLOAD, Recipe, rate_factor
from tuneserve.train.recompute import draws, recompute_blocks
from tuneserve.train.trackers import guard_trackers
from tuneserve.train.watching import LEAST_LOSS_SCALE

log = logging.getLogger(__name__)

PAD_MULTIPLE = 8
"""Widths in multiples of it keep matrix units busy; the tokens added count for nothing."""
# An adapter's gradients are exchanged at once, after the backward pass: that takes milliseconds.
# Smaller buckets travel during it, on multiprocessors that its matrix products then wait for.
_BUCKET_MB = 1024

# The longest rows overflow last, since each of their tokens weighs least.
_SCALE_ROOM = 4.0


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
        computes: Type of the frozen layers' products. With float16 the loss is scaled, so that
            small gradients do not vanish, and a step whose gradients overflowed is skipped.
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
        computes: torch.dtype | None = None,
    ) -> None:
        # Routers of experts balance over the tokens that are not padding.
        config = model.config.get_text_config()
        # Where positions are a table, the one behind its end is no position.
        self._rows, self._positions = rows, getattr(config, "max_position_embeddings", None)
        self._routes = bool(getattr(config, "output_router_logits", False))
        self._recipe, self._scheduler, self._zero = recipe, train.lr_scheduler, train.zero > 0
        dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
        self._half = computes == torch.float16
        options = _arguments(train, recipe, work, checkpointing=bool(checkpointing))
        options["fp16"] = self._half
        options["ddp_find_unused_parameters"] = may_be_unused(model)
        if checkpointing:
            # Without dropout nothing random happens in a block, and no state is kept for it.
            random = draws(model)
            # Several processes exchange gradients as they come, and count what brings them; so
            # does DeepSpeed, also where there is one.
            whole = not random and collective.ranks() == 1 and not self._zero
            recompute_blocks(model, offload=checkpointing == OFFLOAD, whole=whole)
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
            data_collator=lambda items: self.pad([item["row"] for item in items]),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        # TRL made the adapter of a quantized base bf16, also where the CPU has no bf16 arithmetic.
        unify_dtype(self.model, dtype)
        # TRL's head also computes entropy and accuracy, which nobody reads here.
        base = self.model.get_base_model()
        fused_head.add_fused_head(base, float32=self._half and _trains_head(base))
        self._loss_only = fused_head.add_head_loss(base)
        if self._half:
            join_types(self.model, torch.float16)
            self._add_scaler()
        self.fused = fuse(self.model)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        hardware.release_memory()  # what loading and looking took, before lasting things are made
        from transformers.trainer_callback import PrinterCallback

        self.remove_callback(PrinterCallback)
        guard_trackers(self.callback_handler)

    def _add_scaler(self) -> None:
        """Accelerate makes a scaler on GPUs alone; a CPU's does the same."""
        if self.accelerator.scaler is None:
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler(self.accelerator.device.type)

    def loss_scale(self) -> float | None:
        """What the loss is multiplied with before the way back; None where it is not."""
        scaler = self.accelerator.scaler
        return None if scaler is None else float(scaler.get_scale())

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as the way back begins with it."""
        scaler = self.accelerator.scaler
        return loss if scaler is None else scaler.scale(loss)

    def lower_scale(self, loss: torch.Tensor) -> bool:
        """Halve the loss scale if the gradients overflowed though the loss did not.

        Returns:
            Whether it did; then the gradients are gone, and worth another try.
        """
        scale = self.loss_scale()
        if scale is None or scale <= LEAST_LOSS_SCALE or not bool(loss.isfinite()):
            return False
        found = [p.grad for p in self._trained if p.grad is not None]
        if bool(torch.nn.utils.get_total_norm(found).isfinite()):
            return False
        self.accelerator.scaler.update(scale / 2)
        self.model.zero_grad(set_to_none=True)
        return True

    def agree_on_scale(self) -> None:
        """Begin with rank 0's loss scale on every rank, less some room for other rows."""
        scale = collective.once(self.loss_scale)
        if scale is not None:
            scale = max(scale / _SCALE_ROOM, LEAST_LOSS_SCALE)
            self.accelerator.scaler.update(scale)
            log.info("float16: the loss is scaled by %g at first", scale)

    def pad(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """These rows as one batch, as wide as a step takes them."""
        return pad_rows(self._rows, indices, PAD_MULTIPLE, self._positions)

    @property
    def shape(self) -> dict[str, int | str]:
        """What a run that goes on from one of its checkpoints has to share."""
        # The optimizer's state beside a scaler is that of many tensors; else of one.
        products = "float16" if self._half else "bfloat16 or float32"
        return {**self._recipe.shape, "products": products}

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
        # A scaler looks at the gradients before a step gathers them.
        flat = not self._zero and not self._half and can_be_flat(self.model)
        if self.optimizer is None and flat:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            settings = {**settings, "weight_decay": self.args.weight_decay}
            self.optimizer = flat_optimizer(kind, settings, self._trained)
            return self.optimizer
        return super().create_optimizer(model)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Of what is trained; the library walks through the frozen weights as well."""
        return self.accelerator.clip_grad_norm_(self._trained, self.args.max_grad_norm)

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
        if self._half:  # the weights are float16 already
            arguments["kwargs_handlers"].append(AutocastKwargs(enabled=False))
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

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.accelerator.scaler is not None:  # one of a card that needed it has no use here
            super()._load_scaler(checkpoint)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Checkpoints need none."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # The library's way loads into float32 and ignores tensors that are missing.
        load_adapter(self.model, Path(resume_from_checkpoint) / WEIGHTS)


def _trains_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and any(p.requires_grad for p in head.parameters())


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
