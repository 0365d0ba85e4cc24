"""The settings of a run that fits: tried one after another against the plan, fastest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tuneserve.checkpoint.base import BUILTIN
from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.init.look import DataLook
from tuneserve.plan import times
from tuneserve.plan.arch import Arch
from tuneserve.plan.build import plan_for
from tuneserve.plan.checks import exportable
from tuneserve.plan.machine import GpuProcess, Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.speed import step_seconds
from tuneserve.progress import many
from tuneserve.runfile import parse_run

# In 16 bits first: on one H200 55 s a million tokens of a 7B model with all activations kept, 60 s
# in NF4 (bench/results/h200_plan_points.json). With activations recomputed both take as long, and
# 16 bits lose nothing to rounding.
_METHODS: tuple[Literal["lora", "qlora"], ...] = ("lora", "qlora")
# Below so many tokens a pass a card is not busy, and checkpointing that makes room for more is
# worth its time.
_BUSY_TOKENS = 2048
LENGTH_STEP, SHORTEST = 128, 256
_ASSUMED_LENGTH = 1024
_HELD_OUT_WANTED, _HELD_OUT_SHARE = 48, (0.02, 0.3)
_CPU_STEPS = 60
_SMALL_MODEL = 1_000_000_000
_GROUPS = (128, 64, 32, -1)
# vLLM's parser for the way in which a family writes tool calls (vLLM docs, "Tool Calling").
_TOOL_PARSERS = {
    "qwen2": "hermes",
    "qwen3": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "granite": "granite",
    "phi3": "phi4_mini_json",
}


@dataclass
class Choice:
    """What was chosen.

    Attributes:
        values: The run file as a mapping, with only the fields that are worth showing.
        run: The same, checked.
        plan: What it will take here.
        dropped: Rows longer than `data.max_length`.
        why: A sentence for fields (dotted) that need one.
        notes: What a person has to know before the run.
    """

    values: dict[str, Any]
    run: RunFile
    plan: Plan
    dropped: int = 0
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def choose(
    *, name: str, base: str, base_dir: Path, arch: Arch, data: list[str], look: DataLook | None,
    machine: Machine, folder: Path,
) -> Choice:  # fmt: skip
    """The fastest settings that fit; when none does, the smallest ones, whose plan says why.

    Args:
        name: Of the run.
        base: What the run file calls the base.
        base_dir: Folder with at least its `config.json`.
        arch: Its shape.
        data: Paths for `data.train`, as the run file will say them.
        look: What the data are like; None where there are none yet.
        machine: What there is.
        folder: The run file's, which relative paths are taken from.
    """
    draft = _draft(name, base, arch, data, look, machine)
    alone: Choice | None = None
    for length in _lengths(arch, look):
        for values in _variants(draft, length, gpu=machine.gpu is not None):
            last = _try(values, base_dir, look, machine, folder)
            if not (last.plan.fits and _busy(last, machine)):
                continue
            beside = _beside(machine, last.plan.serving.peak.needed_bytes)
            if _try(values, base_dir, look, beside, folder).plan.fits:
                return _finished(last, arch, look)
            alone = alone or last
        if alone:  # rows are not left out for the sake of the server
            return _finished(_stopping(alone, base_dir, look, machine, folder), arch, look)
    return _finished(last, arch, look)


def _stopping(
    alone: Choice, base_dir: Path, look: DataLook | None, machine: Machine, folder: Path
) -> Choice:
    """What fits alone, so that it can be repeated: what serves ends while the next run trains."""
    values = {**alone.values, "serve": {**alone.values["serve"], "while_training": "stop"}}
    beside = _beside(machine, alone.plan.serving.peak.needed_bytes)
    if _try(values, base_dir, look, beside, folder).plan.fits:
        return _try(values, base_dir, look, machine, folder)
    # Without a GPU a plan cannot tell what a server would give back.
    alone.notes.append(
        "a retrain does not fit beside the model that serves: before the next run of this file, "
        "`tuneserve down`"
    )
    return alone


def _beside(machine: Machine, served_bytes: int) -> Machine:
    """The same machine with our own server on it, as it will be when this run is repeated."""
    if machine.gpu is None:
        return replace(machine, ram_free_bytes=max(0, machine.ram_free_bytes - served_bytes))
    server = GpuProcess(0, "vllm", served_bytes, ours=True)
    free = max(0, machine.gpu.free_bytes - served_bytes)
    held = (*machine.gpu.processes, server)
    return replace(machine, gpu=replace(machine.gpu, free_bytes=free, processes=held))


def _draft(
    name: str, base: str, arch: Arch, data: list[str], look: DataLook | None, machine: Machine
) -> dict[str, Any]:
    """All that does not depend on what fits."""
    gpu = machine.gpu is not None
    rows = look.rows if look else 0
    held_out = min(max(_HELD_OUT_WANTED / max(rows, 1), _HELD_OUT_SHARE[0]), _HELD_OUT_SHARE[1])
    fraction = round(held_out, 2) if rows else 0.1
    trained = round(rows * (1 - fraction))
    batch = _effective_batch(trained) if gpu else min(8, _effective_batch(trained))
    train: dict[str, Any] = {
        "method": "qlora",
        "lora": {"r": 16, "alpha": 32},
        "gradient_checkpointing": "auto",
        "effective_batch": batch,
        "micro_batch": "auto",
        "learning_rate": 2e-4 if arch.weights > _SMALL_MODEL else 1e-3,
    }
    epochs = 3 if trained < 2000 else 2 if trained < 10_000 else 1
    if gpu or not rows or math.ceil(trained * epochs / batch) <= _CPU_STEPS:
        train["epochs"] = epochs
    else:
        train["max_steps"] = _CPU_STEPS
    if not gpu:
        train["save_steps"] = 10
    quantize: dict[str, Any] = {"methods": _methods(arch, gpu=gpu)}
    if exportable(arch):
        quantize["group_size"] = next(
            group
            for group in _GROUPS
            if group < 0 or all(t.in_features % group == 0 for t in arch.linears)
        )
        if not gpu and "gptq" in quantize["methods"]:  # it takes minutes a hundred rows there
            quantize.update(calibration_rows=32, calibration_max_tokens=128)
    serve: dict[str, Any] = {"name": name[:32].rstrip("-"), "port": 8080}
    if look and look.tool_calls:
        parser = "hermes" if base == BUILTIN else _TOOL_PARSERS.get(arch.model_type, "hermes")
        serve["tool_parser"] = parser
    return {
        "name": name,
        "model": {"base": base},
        "data": {"train": data[0] if len(data) == 1 else data, "eval_fraction": fraction},
        "train": train,
        "quantize": quantize,
        "serve": serve,
    }


def _methods(arch: Arch, *, gpu: bool) -> list[str]:
    """The ladder of exports. Small models lose much to 4 bits: SmolLM2-135M 0.24 nats a token of
    chats on which a short training had gained 0.06, and the gates refused that rightly.
    """
    if not exportable(arch):
        return ["none"]
    if arch.weights > _SMALL_MODEL:
        return ["gptq"]
    return ["gptq", "none"] if gpu else ["none"]


def _effective_batch(rows: int) -> int:
    """Large enough to be steady, small enough that there are steps."""
    return next((batch for least, batch in ((512, 16), (128, 8), (1, 4)) if rows >= least), 16)


def _lengths(arch: Arch, look: DataLook | None) -> Iterator[int]:
    """Limits on a row's tokens to try: all rows first, then shorter ones."""
    longest = look.longest if look else _ASSUMED_LENGTH
    length = max(SHORTEST, -(-longest // LENGTH_STEP) * LENGTH_STEP)
    length = min(length, arch.context)
    yield length
    while length > SHORTEST:
        length = max(SHORTEST, length // 2 // LENGTH_STEP * LENGTH_STEP)
        if look is None or look.within(length):
            yield length


def _variants(draft: dict[str, Any], length: int, *, gpu: bool) -> Iterator[dict[str, Any]]:
    for chats in (8, 4, 2) if gpu else (4, 2):
        for method in _METHODS:
            for rollout in ("blue_green", "hold"):
                yield {
                    **draft,
                    "data": {**draft["data"], "max_length": length},
                    "train": {**draft["train"], "method": method},
                    "serve": {
                        **draft["serve"],
                        "max_concurrent_chats": chats,
                        "rollout": rollout,
                    },
                }


def _try(
    values: dict[str, Any], base_dir: Path, look: DataLook | None, machine: Machine, folder: Path
) -> Choice:
    run = parse_run(values, source="init", folder=folder)
    length = run.data.max_length
    shape = look.shape(length) if look else None
    notes: list[str] = []
    try:
        plan = plan_for(run, base_dir=base_dir, data=shape, machine=machine)
    except RunFileError as error:
        # What depends on the amount of data cannot be mended by settings: it is said instead.
        plan = plan_for(run, base_dir=base_dir, machine=machine)
        notes += error.details["problems"]
    dropped = len(look.lengths) - len(look.within(length)) if look else 0
    return Choice(values, run, plan, dropped=dropped, notes=notes)


def _busy(choice: Choice, machine: Machine) -> bool:
    """Whether a pass gives a card enough to do, or could not give it more.

    The candidate must be switched as the plan says: two servers at once only where both fit.
    """
    step, run = choice.plan.step, choice.run
    switches = choice.plan.blue_green_fits == (run.serve.rollout == "blue_green")
    if machine.gpu is None:
        return switches
    if run.train.method == "qlora":
        return switches
    enough = step.tokens >= _BUSY_TOKENS or step.accumulation == 1
    return enough and switches and step.checkpointing != "offload"


def _finished(choice: Choice, arch: Arch, look: DataLook | None) -> Choice:
    """Comments on what was chosen, and what is to be known."""
    run, plan, step = choice.run, choice.plan, choice.plan.step
    why = choice.why
    why["model.base"] = f"{arch.weights / 1e9:.2f} billion parameters"
    if look is None:
        why["data.max_length"] = "tokens; longer rows are left out and counted"
        why["data.eval_fraction"] = "share of the conversations that is held out to measure with"
    else:
        about = "has" if look.counted else "is estimated at"
        kept = (
            "no row is longer"
            if not choice.dropped
            else (f"{choice.dropped} of {len(look.lengths)} rows are longer and left out")
        )
        why["data.max_length"] = f"tokens; the longest row {about} {look.longest}, {kept}"
        held = round(look.rows * run.data.eval_fraction)
        why["data.eval_fraction"] = f"about {held} conversations are held out to measure with"
    why["train.method"] = (
        "the base stays in 16 bits: there is room, and nothing is lost to 4 bits"
        if run.train.method == "lora"
        else "the base in 4 bits (NF4), the adapter in 16"
    )
    why["train.gradient_checkpointing"] = {
        False: "the plan keeps all activations: there is room",
        True: "the plan recomputes activations: less memory, more time",
        "offload": "the plan recomputes activations and keeps their inputs in host memory",
    }[step.checkpointing]
    why["train.micro_batch"] = (
        f"the plan takes {many(step.micro_batch, 'row')} a pass, "
        f"{many(step.accumulation, 'pass')} a step"
    )
    why.update(_length_of_training(run, look))
    if look and (seconds := _train_seconds(choice, look)):
        length = "train.max_steps" if run.train.max_steps else "train.epochs"
        why[length] += f", predicted to take about {times.about(seconds)}"
    choice.notes += [said for said in plan.warnings if said.startswith("quantize.methods")]
    if look is not None:
        choice.notes += _too_few_held_out(run, round(look.rows * run.data.eval_fraction))
    if (cards := plan.machine.gpus or 1) > 1:
        choice.notes.append(
            f"this machine shows {cards} GPUs and the run uses one; train.gpus: {cards} shares "
            "each step among all"
        )
    why["train.save_steps"] = "a run that was killed goes on from the last checkpoint"
    if run.train.learning_rate > 2e-4:
        why["train.learning_rate"] = "small models learn at higher rates than large ones"
    if not exportable(arch):
        why["quantize.methods"] = "16 bits: no 4-bit export of this family and these sizes is known"
    elif run.quantize.methods == ["none"]:
        why["quantize.methods"] = "16 bits: small models lose to 4 bits what they learned; or gptq"
    elif "none" in run.quantize.methods:
        why["quantize.methods"] = "4 bits, or 16 bits where a small model loses too much to 4"
    if run.quantize.group_size != 128:
        why["quantize.group_size"] = "128 does not divide every layer of this model"
    why["serve.rollout"] = (
        "the next model starts beside the one that serves: two fit"
        if run.serve.rollout == "blue_green"
        else "two servers do not fit: requests wait while one takes the other's place"
    )
    if run.serve.while_training == "stop":
        why["serve.while_training"] = "downtime in the next run: it does not fit beside what serves"
    why["serve.max_concurrent_chats"] = (
        f"room for so many chats of {plan.serving.max_model_len:,} tokens at once"
    )
    if run.serve.tool_parser:
        why["serve.tool_parser"] = "the data has tool calls; this reads them back"
    return choice


def _train_seconds(choice: Choice, look: DataLook) -> float | None:
    """Of all steps; with rows of which only a part was counted, or none, as the longest."""
    run, plan = choice.run, choice.plan
    if plan.train_seconds and run.train.max_steps:
        return plan.train_seconds
    trained = 1 - run.data.eval_fraction
    if plan.train_seconds:  # of all rows that were read
        return plan.train_seconds * trained / look.share
    if (one := step_seconds(plan.arch, plan.step, plan.machine.device)) is None:
        return None
    rows = plan.step.micro_batch * plan.step.accumulation
    steps = run.train.max_steps or look.rows * trained / rows * run.train.epochs
    return one * math.ceil(steps)


def _too_few_held_out(run: RunFile, held: int) -> list[str]:
    """Said with a margin: a hash decides who is held out, so the number varies."""
    least = run.gates.min_conversations
    if not run.gates.enabled or run.gates.allow_undecided or held >= 1.25 * least:
        return []
    return [
        f"about {held} conversations will be held out, and the gates need {least} to decide "
        "anything: add data, name a held-out file in data.eval, or set gates.allow_undecided"
    ]


def _length_of_training(run: RunFile, look: DataLook | None) -> dict[str, str]:
    train = run.train
    if train.max_steps:
        return {
            "train.max_steps": f"of {train.effective_batch} rows; a CPU is slow: raise it later"
        }
    if look is None:
        return {"train.epochs": "passes over the training rows"}
    rows = look.rows * (1 - run.data.eval_fraction)
    steps = math.ceil(rows * train.epochs / train.effective_batch)
    return {"train.epochs": f"passes over about {rows:.0f} rows: about {steps} steps"}
