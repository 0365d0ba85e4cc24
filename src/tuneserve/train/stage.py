"""Stage `train`: QLoRA, or LoRA on a 16-bit base, on exactly the ids that `validate` wrote.

Nothing heavy is imported before `run`. Everything that a library holds on to (model, optimizer,
graph) lives in `tuneserve.train.attempt`, so that an attempt which did not fit can be forgotten
whole.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import DataError
from tuneserve.lm.exhausted import is_out_of_memory, said
from tuneserve.lm.rows import Rows, read_rows
from tuneserve.plan.several import NCCL_BYTES
from tuneserve.stages import StageContext
from tuneserve.stops import ran_out_of_memory, was_stopped
from tuneserve.train import history, launch, oom
from tuneserve.train.curves import plot_loss, plot_memory, read_curve
from tuneserve.train.memory import MemoryTimeline, of_ranks
from tuneserve.train.recipe import OFFLOAD, Recipe, make_recipe

log = logging.getLogger(__name__)

_DEFAULT_MICRO_BATCH = 4


def run(context: StageContext) -> dict[str, Any]:
    """Train the adapter of `context.run` and fill `context.out`.

    An attempt that runs out of memory is followed by one with half the micro-batch, down to 1,
    then by one with gradient checkpointing, then, on a GPU, with that in host memory. Steps, rows
    and their order stay the same, and it goes on from the last complete checkpoint. So does the
    next call after a kill. The metrics name every attempt, and how it ended.

    Raises:
        DataError: The rows cannot be trained on.
        RunFileError: A module name matches nothing.
        TrainingDiverged: A loss or gradient norm was not finite.
        AdapterError: What was trained does nothing.
        OutOfMemory: Nothing on the ladder fits.
        ResourceError: There are fewer GPUs than `train.gpus`.
    """
    train = context.run.train
    launch.leave_other_launchers(train.gpus)
    prepare_libraries(train.zero > 0)
    rows, held_out = read_both(context)
    rung = _start(context, Rung(recipe_of(context, len(rows)), checkpointing_of(context)))
    if train.gpus > 1 or train.zero:
        metrics = _together(context, rung)
    else:
        metrics = _alone(context, rows, held_out, rung)
    plot_loss(read_curve(context.out / "loss.jsonl"), context.out / "loss.png")
    _copy_tokenizer(context)
    return metrics


def prepare_libraries(deepspeed: bool) -> None:
    """Settings that hold only when made before torch and peft are used."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from tuneserve.lm.load import quiet_libraries

    quiet_libraries(deepspeed=deepspeed)


def read_both(context: StageContext) -> tuple[Rows, Rows]:
    """The rows to train on and those held out.

    Raises:
        DataError: The rows cannot be trained on.
    """
    dataset = context.inputs["dataset"].path
    return _read(dataset / "train.parquet"), _read(dataset / "eval.parquet", may_be_empty=True)


def recipe_of(context: StageContext, rows: int) -> Recipe:
    """Steps and batches, with the micro-batch that the plan or the run file names."""
    train = context.run.train
    wanted = context.hints.get("micro_batch") or train.micro_batch
    micro_batch = wanted if isinstance(wanted, int) else _DEFAULT_MICRO_BATCH
    return make_recipe(train, rows, micro_batch, train.gpus)


def checkpointing_of(context: StageContext) -> bool | str:
    """Whether to recompute activations: as the run file says, else as the plan chose."""
    wanted = context.run.train.gradient_checkpointing
    if wanted != "auto":
        return wanted
    chosen: bool | str = context.hints.get("gradient_checkpointing", True)
    return chosen


@dataclass(frozen=True)
class Rung:
    """One rung of the memory ladder.

    What else the plan advises is no rung. A shorter row, a smaller rank or a base in 4 bits trains
    something else. `paged_adamw_8bit` is the same training, but saves the state of the adapter
    alone (78 MiB of the 6.8 GiB that a 7B with r=64 on q, k, v, o takes), and nothing behind a
    checkpoint, where a rung begins: bitsandbytes loads a paged state into ordinary GPU memory.
    """

    recipe: Recipe
    checkpointing: bool | str

    def next(self) -> Rung | None:
        """The rung below: half the micro-batch, then checkpointing, then that in host memory."""
        if self.recipe.micro_batch > 1:
            half = self.recipe.with_micro_batch(self.recipe.micro_batch // 2)
            return Rung(half, self.checkpointing)
        if not self.checkpointing:
            return Rung(self.recipe, True)
        return Rung(self.recipe, OFFLOAD) if self._may_offload() else None

    def _may_offload(self) -> bool:
        import torch

        return self.checkpointing != OFFLOAD and torch.cuda.is_available()

    def __str__(self) -> str:
        recipe = self.recipe
        text = f"micro-batch {recipe.micro_batch} x {recipe.accumulation} accumulated"
        if recipe.processes > 1:
            text += f" x {recipe.processes} processes"
        held = " in host memory" if self.checkpointing == OFFLOAD else ""
        return f"{text}, {'with' if self.checkpointing else 'without'} gradient checkpointing{held}"


Tried = Callable[[Rung], tuple[dict[str, Any] | None, str]]


def _climb_down(context: StageContext, rung: Rung, attempt_at: Tried) -> dict[str, Any]:
    """Metrics of the first rung that fits."""
    work = context.work
    while True:
        step = history.reached(work)
        goes_on = (
            f"; goes on from the checkpoint of step {step}, once it is checked" if step else ""
        )
        recipe = rung.recipe
        log.info("%d steps of %d rows: %s%s", recipe.steps, recipe.effective_batch, rung, goes_on)
        try:
            metrics, why = attempt_at(rung)
        except BaseException as error:
            history.end(work, str(rung), step, _said(error))
            raise
        history.end(work, str(rung), step, why or "trained", fits=metrics is not None)
        if metrics is not None:
            attempts = history.to_json(work)
            return {**metrics, "did_not_fit": history.did_not_fit(work), "attempts": attempts}
        below = rung.next()
        if below is None and history.reached(work) <= step:
            raise history.give_up(work, context.hints)
        log.warning("%s did not fit (%s): trying %s", rung, why, below or "it again further on")
        rung = below or rung


def _said(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return "stopped"
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _alone(context: StageContext, rows: Rows, held_out: Rows, rung: Rung) -> dict[str, Any]:
    import torch

    with MemoryTimeline(torch.cuda.is_available()) as timeline:
        metrics = _climb_down(
            context, rung, lambda at: attempt(context, rows, held_out, at, timeline)
        )
    _write_memory(context, timeline.to_json(None))
    return metrics


def _together(context: StageContext, rung: Rung) -> dict[str, Any]:
    """One process a GPU; every rung is a fresh set of processes."""
    launch.check_gpus(context.run.train.gpus)
    if context.run.train.zero:
        launch.check_deepspeed()
    memory: list[dict[str, Any]] = []

    def attempt_at(rung: Rung) -> tuple[dict[str, Any] | None, str]:
        metrics, why, found = launch.attempt(
            context,
            rung.recipe.micro_batch,
            rung.checkpointing,
            partial(_note, context, rung, "ended"),
        )
        if metrics is None:  # rank 0 could not say so: it was ended for another's sake
            _forget(context)
        memory[:] = found
        return metrics, why

    metrics = _climb_down(context, rung, attempt_at)
    together = of_ranks(memory)
    _write_memory(context, together)
    if "peak_reserved_bytes" in together:
        metrics["peak_gpu_bytes"] = together["peak_reserved_bytes"]
    return metrics


def _write_memory(context: StageContext, memory: dict[str, Any]) -> None:
    planned = context.hints.get("planned_peak_bytes")
    memory["planned_peak_bytes"] = planned if isinstance(planned, int) else None
    first = oom.read_report(context.work)
    if first:
        memory["first_oom"] = first
    write_json_atomic(context.out / "memory.json", memory)
    plot_memory(memory, context.out / "memory.png")


def attempt(
    context: StageContext, rows: Rows, held_out: Rows, rung: Rung, timeline: MemoryTimeline
) -> tuple[dict[str, Any] | None, str]:
    """Metrics, or why it did not fit. The attempt's memory is free again afterwards."""
    import torch

    from tuneserve.lm.hardware import release_memory
    from tuneserve.train.attempt import Attempt

    note = partial(_note, context, rung)
    limit = None
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        limit = limit_bytes(context, rung, total)
    attempt = Attempt(context, rows, held_out, rung.recipe, rung.checkpointing, timeline, limit)
    note("load")
    try:
        return attempt.run(note), ""
    except BaseException as error:
        if not is_out_of_memory(error):
            note("ended")  # by itself, so it was not killed for its memory
            raise
        why = said(error)
        _explain(context, timeline)
    _forget(context)  # it ended by itself, so the next call has nothing to conclude
    # Outside of the handler, or the error's traceback would keep the model alive.
    release_memory()
    return None, why


def limit_bytes(context: StageContext, rung: Rung, total_bytes: int) -> int | None:
    """What torch's allocator may take of a GPU; None at the bottom, where whatever fits is taken.

    NCCL's buffers are no part of what the allocator counts.
    """
    if rung.next() is None:
        return None
    limit = int(context.run.train.target_utilization * total_bytes)
    return limit - NCCL_BYTES if rung.recipe.processes > 1 else limit


def _explain(context: StageContext, timeline: MemoryTimeline) -> None:
    """Keep what was where, the first time; the attempt's tensors are still alive."""
    from tuneserve.train import collective

    components = context.hints.get("planned_components", {})
    points = timeline.to_json(None)["timeline"]
    report = oom.keep_report(context.work, points, components, collective.rank())
    if report:
        log.warning("memory ran out: %s", report["what"])


def _note(context: StageContext, rung: Rung, phase: str) -> None:
    """Write down how far this rung is: what is found there after a kill tells when that was."""
    from tuneserve.train import collective

    if collective.rank():
        return
    facts = {"micro_batch": rung.recipe.micro_batch, "checkpointing": rung.checkpointing}
    history.begin(context.work, str(rung), phase, **facts)


def _forget(context: StageContext) -> None:
    from tuneserve.train import collective

    if collective.rank() == 0:
        history.forget(context.work)


def _start(context: StageContext, top: Rung) -> Rung:
    """The rung to begin with: the last one tried, or one below if it was killed for its memory.

    That is noted where the kernel counts such kills; else it is concluded from a kill in the smoke
    step. One that followed a stop does not count: the step may be deaf to anything milder. At the
    bottom an attempt that came further than the one before is followed by another, and so is one of
    which memory is merely concluded: it may have been killed by hand, or with its machine.
    """
    work = context.work
    state = history.under_way(work)
    if state is None:
        return top
    recipe = top.recipe.with_micro_batch(min(top.recipe.micro_batch, int(state["micro_batch"])))
    last = Rung(recipe, state["checkpointing"] or top.checkpointing)
    phase, attempt = state["phase"], state.get("attempt", "")
    rung, since = str(state.get("rung", last)), int(state.get("from_step", 0))
    stopped = was_stopped(work, attempt)
    known = phase != "ended" and ran_out_of_memory(work, attempt)
    # A kill at another time says nothing about memory.
    if not known and (phase != "smoke" or stopped):
        if not history.is_known(work, attempt):
            how = "stopped" if stopped else "ended without a word"
            history.end(work, rung, since, how, attempt=attempt)
        return last
    how = f"killed {history.when(phase)}{', for want of memory' if known else ''}"
    history.end(work, rung, since, how, fits=False, killed=True, attempt=attempt)
    below = last.next() if phase != "load" else None  # every rung loads the same
    further = phase == "train" and history.reached(work) > since
    if below is None and (further or not (known or history.died_again(work))):
        below = last
    if below is None:
        raise history.give_up(work, context.hints)
    log.warning("the last attempt was %s (%s): trying %s", how, last, below)
    return below


def _read(path: Any, *, may_be_empty: bool = False) -> Rows:
    rows = read_rows(path)
    if not len(rows) and not may_be_empty:
        raise DataError(
            f"{path}: holds no rows",
            expected="at least one training row",
            hint="see the dataset's report",
        )
    unsupervised = [rows.sources[i] for i, n in enumerate(rows.supervised()) if n == 0]
    if unsupervised:
        raise DataError(
            f"{path}: {len(unsupervised)} rows have no supervised token: "
            + ", ".join(unsupervised[:8]),
            expected="an assistant turn in every row",
            hint="run `tuneserve validate` again, or remove these rows",
        )
    return rows


def _copy_tokenizer(context: StageContext) -> None:
    """The files that encode and render as in training, and the base's fingerprint."""
    from tuneserve.checkpoint.fingerprint import fingerprint

    for source in sorted((context.inputs["dataset"].path / "tokenizer").iterdir()):
        shutil.copyfile(source, context.out / source.name)
    assert context.base is not None
    write_json_atomic(context.out / "base_fingerprint.json", fingerprint(context.base))
