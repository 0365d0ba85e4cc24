"""One attempt at training: load, prove with a smoke step that it fits, train, save, prove again.

Engine file: imports torch, transformers, peft and trl.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, set_seed

from tuneserve.checkpoint.basecheck import read_config
from tuneserve.errors import AdapterError, ModelError, OutOfMemory, RunFileError
from tuneserve.lm import hardware
from tuneserve.lm.load import load_base, nf4_settings, quantized_modules
from tuneserve.lm.loss import row_losses
from tuneserve.lm.rows import Rows, check_ids
from tuneserve.plan import calibrate
from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.machine import first_gpu
from tuneserve.plan.speed import model_flops, peak_flops
from tuneserve.plan.steps import trained_step
from tuneserve.plan.trainstep import Step
from tuneserve.progress import Progress, human_bytes
from tuneserve.stages import StageContext
from tuneserve.train import adapter as adapters
from tuneserve.train import checkpoints, collective
from tuneserve.train.best import Best
from tuneserve.train.curves import read_curve, rewind_curve
from tuneserve.train.memory import MemoryTimeline
from tuneserve.train.recipe import Recipe, dropout_seed, training_order
from tuneserve.train.trackers import need_trackers, place_trackers
from tuneserve.train.trainer import PAD_MULTIPLE, RowTrainer
from tuneserve.train.watch import Watch, diverged
from tuneserve.train.watching import StallGuard

log = logging.getLogger(__name__)

CURVE = "loss.jsonl"
SIDECAR = "training.json"


@dataclass(frozen=True)
class Attempt:
    """What is tried: the context, the rows, and a rung of the memory ladder.

    `limit_bytes` is how much of the GPU the smoke step may take; None where there is no rung below.
    """

    context: StageContext
    rows: Rows
    held_out: Rows
    recipe: Recipe
    checkpointing: bool | str
    timeline: MemoryTimeline
    limit_bytes: int | None = None

    def run(self, note: Callable[[str], None]) -> dict[str, Any]:
        """Train and fill the output folder; returns metrics.

        Args:
            note: Called with ``smoke`` before the step that shows whether this rung fits, and with
                ``train`` after it.

        Raises:
            TuneserveError: See `tuneserve.train.stage`.
            torch.OutOfMemoryError: It does not fit.
        """
        train = self.context.run.train
        set_seed(train.seed)
        device = hardware.device()
        model, dtype = self._load(device)
        quantized = quantized_modules(model) if train.method == "qlora" else []
        model = adapters.add_adapter(model, train.lora, hardware.adapter_dtype(dtype))
        order = training_order(self.rows.lengths.tolist(), self.recipe, train.seed)
        with Progress("train", total=self.recipe.steps) as progress:
            watch = Watch(self.rows, order, self.recipe, self.context.work / CURVE, progress)
            trainer = self._trainer(model, order, watch, dtype)
            watch.loss_scale, watch.shape = trainer.loss_scale, trainer.shape
            best = Best(self.context.work / "best") if train.keep == "best" else None
            if train.eval_steps and len(self.held_out):
                watch.evaluate = (
                    train.eval_steps,
                    lambda step: self._held_out_loss(model, step, watch.beat),
                )
            if best and collective.rank() == 0:
                watch.best = lambda step, loss: best.offer(model, step, loss)
            self.timeline.phase("smoke")
            collective.wait_for_all()  # so that no rank is in another phase than is noted
            note("smoke")
            log.info(
                "trying the longest rows once, to see that they fit (as long as a step may take; "
                "the first is slower)"
            )
            named = train.lora.target_modules
            smoke_step(
                trainer,
                self.rows,
                self.recipe,
                self.checkpointing,
                self.timeline.phase,
                named=[] if isinstance(named, str) else named,
            )
            check_room(self.limit_bytes)
            collective.wait_for_all()
            trainer.agree_on_scale()
            note("train")
            with StallGuard(train.stall_seconds) as watch.guard:
                self._train(trainer, watch)
        if torch.cuda.is_available() and self.recipe.processes == 1:
            try:
                self._leave_point()
            except (OSError, ModelError) as error:  # a trained adapter is worth more than a point
                log.info("no point is left for plan --calibrate (%s)", error)
        self.timeline.phase("evaluate")
        loss = self._held_out_loss(model, self.recipe.steps) if len(self.held_out) else None
        self.timeline.phase("save")
        if collective.rank():
            return {}  # rank 0 writes, and speaks for all
        kept = best.restore(model, loss) if best and loss is not None else None
        self._save(model, dtype, quantized, loss)
        loss = kept[1] if kept else loss
        trained = adapters.trainable_parameters(model)
        metrics = {**self._metrics(watch, loss), "trainable_parameters": trained}
        return {**metrics, "best_step": kept[0]} if kept else metrics

    def _load(self, device: torch.device) -> tuple[Any, torch.dtype]:
        run, base = self.context.run, self.context.base
        assert base is not None
        dtype = hardware.model_dtype(device, base)
        if dtype == torch.float16 and run.train.zero:
            raise RunFileError(
                f"train.zero: {run.train.zero} on a GPU without bfloat16",
                expected="train.zero: 0 where the products are float16",
                hint="remove train.zero; every GPU then holds the whole optimizer",
            )
        model = load_base(
            base,
            device=device,
            dtype=dtype,
            nf4=run.train.method == "qlora",
            attention=run.train.attention,
            trust_remote_code=run.model.trust_remote_code,
        )
        vocabulary = model.get_input_embeddings().weight.shape[0]
        for name, rows in (("train", self.rows), ("eval", self.held_out)):
            check_ids(rows, vocabulary, f"{name}.parquet")
        return model, dtype

    def _trainer(
        self, model: Any, order: Sequence[int], watch: Watch, dtype: torch.dtype
    ) -> RowTrainer:
        need_trackers(self.context.run.train.report_to)
        place_trackers(self.context.run.name)
        tokenizer = AutoTokenizer.from_pretrained(self.context.inputs["dataset"].path / "tokenizer")
        return RowTrainer(
            model,
            self.rows,
            order,
            self.recipe,
            self.context.run.train,
            self.context.work,
            tokenizer,
            checkpointing=self.checkpointing,
            callback=watch,
            computes=dtype,
        )

    def _train(self, trainer: RowTrainer, watch: Watch) -> None:
        found = collective.once(lambda: self._checkpoint(trainer.shape))
        resume, step = found if found else (None, 0)
        collective.once(lambda: rewind_curve(watch.curve, step))
        if found:
            log.info("going on from the checkpoint of step %d", step)
        watch.begin(step)
        self.timeline.phase("train")
        seed = self.context.run.train.seed
        set_seed(dropout_seed(seed, collective.rank(), step))  # what a rank draws is its own
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)

    def _checkpoint(self, shape: Mapping[str, int | str]) -> tuple[Path, int] | None:
        found = checkpoints.latest_whole(self.context.work)
        if found:
            checkpoints.check_shape(found[0], shape)
        return found

    def _held_out_loss(
        self, model: Any, step: int, beat: Callable[[], None] = lambda: None
    ) -> float:
        """Mean nats per supervised token after `step`; `beat` is called after every batch.

        Raises:
            TrainingDiverged: It is not finite, on every rank alike.
        """
        count = min(len(self.held_out), self.context.run.gates.eval_rows)
        mine = range(collective.rank(), count, collective.ranks())
        training = model.training
        model.eval()
        try:
            found = row_losses(model, self.held_out, mine, done=lambda rows: beat())
        finally:
            model.train(training)
        bad = np.zeros(count)
        bad[list(mine)] = ~np.isfinite(found.sums)
        nats, tokens, *bad_anywhere = collective.totals(
            [found.sums.sum(), found.counts.sum(), *bad.tolist()]
        )
        if any(bad_anywhere):
            rows = np.flatnonzero(bad_anywhere).tolist()
            raise diverged(
                step,
                f"the loss of {len(rows)} of {count} held-out rows is not finite:",
                [self.held_out.sources[row] for row in rows],
                expected="a finite loss of every held-out row",
                half=any(p.dtype == torch.float16 for p in model.parameters()),
            )
        return nats / tokens

    def _save(
        self, model: Any, dtype: torch.dtype, quantized: list[str], eval_loss: float | None
    ) -> None:
        run, out = self.context.run, self.context.out
        base = run.model.base
        adapters.save_adapter(model, out, Path(base).name if Path(base).is_absolute() else base)
        adapters.prove_trained(model, out / adapters.WEIGHTS)
        points = read_curve(self.context.work / CURVE)
        if eval_loss is not None:
            points.append({"step": self.recipe.steps, "eval_loss": eval_loss})
        (out / CURVE).write_text("".join(json.dumps(p) + "\n" for p in points), encoding="utf-8")
        qlora = run.train.method == "qlora"
        sidecar = {
            "method": run.train.method,
            "quantization": nf4_settings(dtype) if qlora else None,
            "quantized_modules": quantized,
            "compute_dtype": hardware.dtype_name(dtype),
            "steps": self.recipe.steps,
            "effective_batch": self.recipe.effective_batch,
            "seed": run.train.seed,
            "versions": _versions(),
        }
        text = json.dumps(sidecar, indent=1, sort_keys=True) + "\n"
        (out / SIDECAR).write_text(text, encoding="utf-8")

    def _metrics(self, watch: Watch, eval_loss: float | None) -> dict[str, Any]:
        points = [p for p in read_curve(watch.curve) if "loss" in p]
        losses = [p["loss"] for p in points]
        trained = np.asarray(watch.order)
        supervised = int(self.rows.supervised()[trained].sum())
        seconds = watch.seconds
        metrics: dict[str, Any] = {
            "steps": len(losses),
            "first_loss": losses[0] if losses else None,
            "final_loss": losses[-1] if losses else None,
            "eval_loss": eval_loss,
            "supervised_tokens_seen": supervised,
            "tokens_per_second": round(watch.tokens / sum(seconds), 1) if seconds else None,
            "seconds_per_step": round(statistics.median(seconds), 4) if seconds else None,
            "effective_batch": self.recipe.effective_batch,
            "micro_batch": self.recipe.micro_batch,
            "gradient_accumulation": self.recipe.accumulation,
            "gradient_checkpointing": self.checkpointing,
            "gpus": self.recipe.processes,
        }
        if watch.loss_scale() is not None:
            metrics["skipped_steps"] = sum("skipped" in p for p in points)
        if torch.cuda.is_available():
            metrics["peak_gpu_bytes"] = torch.cuda.max_memory_reserved()
            metrics["model_flop_utilization"] = self._utilization(watch)
        if len(losses) != self.recipe.steps:
            raise AdapterError(
                f"{len(losses)} of {self.recipe.steps} steps were trained",
                expected="all steps",
                hint="run the same command again: it goes on from the last checkpoint",
            )
        return metrics

    def _leave_point(self) -> None:
        """Leave this training's peak for `plan --calibrate`."""
        step, config = self._as_planned()
        process = first_gpu()
        mine = [p.used_bytes for p in process.processes if p.pid == os.getpid()] if process else []
        peak = torch.cuda.max_memory_reserved()
        outside = mine[0] - torch.cuda.memory_reserved() if mine else 0  # the context and libraries
        calibrate.record(config, step, peak, peak + outside if outside > 0 else None)

    def _as_planned(self) -> tuple[Step, dict[str, Any]]:
        """The step as the plan has it, and the base's config."""
        assert self.context.base is not None
        config = read_config(self.context.base)
        longest = -(-int(self.rows.lengths.max()) // PAD_MULTIPLE) * PAD_MULTIPLE
        step = trained_step(
            self.context.run,
            arch_from_config(config),
            longest=longest,
            micro_batch=self.recipe.micro_batch,
            accumulation=self.recipe.accumulation,
            checkpointing=self.checkpointing,  # type: ignore[arg-type]
            capability=torch.cuda.get_device_capability(),
        )
        return step, config

    def _utilization(self, watch: Watch) -> float | None:
        """Share of the card's peak rate that went into the model; None on an unknown card."""
        peak = peak_flops(torch.cuda.get_device_name())
        if peak is None or not watch.seconds:
            return None
        step, config = self._as_planned()
        length = int(np.mean(self.rows.lengths[np.asarray(watch.order)]))
        flops = model_flops(arch_from_config(config), replace(step, length=length))
        return round(flops / statistics.median(watch.seconds) / peak, 4)


def smoke_step(
    trainer: RowTrainer,
    rows: Rows,
    recipe: Recipe,
    checkpointing: bool | str,
    phase: Callable[[str], None] = lambda name: None,
    *,
    named: Sequence[str] = (),
) -> None:
    """Forward, backward and optimizer on the longest rows; weights and random state stay.

    `phase` is told which of these begins; `named` are the run file's `target_modules`.

    Raises:
        AdapterError: No gradient reaches the adapter, or a target that was named.
        torch.OutOfMemoryError: It did not fit.
    """
    model = trainer.model
    longest = np.argsort(-rows.lengths, kind="stable")[: recipe.micro_batch].tolist()
    place = next(model.parameters()).device
    batch = {k: v.to(place) for k, v in trainer.pad(longest).items()}
    if checkpointing:
        model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    model.train()
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        overflowed = True
        while overflowed:  # so that no step of the training is lost to a scale that is too large
            phase("smoke: forward")
            loss = trainer.compute_loss(model, batch)
            phase("smoke: backward")
            trainer.scaled(loss).backward()
            overflowed = trainer.lower_scale(loss)
        if bool(loss.isfinite()):
            adapters.check_gradients(model, named)
        if place.type == "cuda" and not trainer.shares_optimizer:
            phase("smoke: optimizer")
            _idle_optimizer_step(trainer)
    model.zero_grad(set_to_none=True)


def check_room(limit_bytes: int | None) -> None:
    """Say how much of the GPU the smoke step took.

    Raises:
        OutOfMemory: More than the limit: other rows or a fragmented heap would not fit later.
    """
    if not torch.cuda.is_available():
        return
    reserved = torch.cuda.max_memory_reserved()
    log.info("the smoke step took %s of GPU memory", human_bytes(reserved))
    if limit_bytes is not None and reserved > limit_bytes:
        raise OutOfMemory(
            f"{human_bytes(reserved)} of GPU memory in the smoke step",
            expected=f"at most {human_bytes(limit_bytes)} (train.target_utilization)",
        )


def _idle_optimizer_step(trainer: RowTrainer) -> None:
    """Make the optimizer allocate its state, and throw it away; at rate 0 no weight changes."""
    optimizer = trainer.create_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()  # 0 times a gradient that is not finite would reach the weights
    optimizer.step()
    trainer.optimizer = None


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "peft", "trl")}
