"""How long a training step takes, and how much of a card it uses, by counting multiplications.

A frozen weight is multiplied twice for each token, forward and back, and once more where
activations are recomputed; its own gradient is never computed. Of a card's peak rate a step gets
about half: measured on one H200 (`bench/results/h200_plan_points.json`). A CPU is taken for what
the demo's training reached on two cores; how other numbers of cores do was not measured.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tuneserve.plan.arch import Arch, lora_weights
from tuneserve.plan.trainstep import Step

# Dense bf16 rate of the matrix units, in 1e12 operations a second, by the vendor's datasheets
# (those that list rates with sparsity alone: half of these). The first name that fits counts.
_PEAK_TERAFLOPS = (
    ("B200", 2250),
    ("GH200", 990),
    ("H200", 990),
    ("H100 PCIe", 756),
    ("H100 NVL", 835),
    ("H100", 990),
    ("H800", 990),
    ("A100", 312),
    ("A800", 312),
    ("L40S", 362),
    ("L40", 181),
    ("L4", 121),
    ("A10G", 70),
    ("A10", 125),
    ("A6000", 155),
    ("RTX 6000 Ada", 364),
    ("RTX 5090", 209),
    ("RTX 4090", 165),
    ("RTX 3090", 71),
)
# Of the same name, and slower: mobile and cut-down cards, a slice of one.
_LESS = re.compile(r"\b(?:Laptop|Max-Q|MIG|4090 D)\b")
_SHARE_OF_PEAK = 0.5
# Operations a second of two cores that multiply bfloat16: 8 rows of 77 tokens in 1.08 s (SmolLM2).
_CPU_FLOPS = 3.3e11
# Two cores without these instructions, which compute in float32: `make demo` took 12.6 minutes
# there instead of 4.1.
_CPU_SLOWNESS = 3.0
# No pass is faster than its kernels are launched: measured with a slow CPU on a 1B model.
_LAUNCH_SECONDS_PER_BLOCK = 0.006


def peak_flops(device: str) -> float | None:
    """A card's dense bf16 rate by its name; None for one that is not known, or a part of one."""
    if _LESS.search(device):
        return None
    return next(
        (rate * 1e12 for name, rate in _PEAK_TERAFLOPS if re.search(rf"\b{name}\b", device)), None
    )


def rate(step: Step, device: str) -> float | None:
    """A card's peak, or what a CPU reaches, in operations a second; None where it is not known."""
    return peak_flops(device) if step.gpu else _CPU_FLOPS / cpu_slowness(step)


def cpu_slowness(step: Step) -> float:
    """How much longer a CPU takes that does not multiply bfloat16; 1 beside a GPU."""
    return _CPU_SLOWNESS if not step.gpu and step.element_bytes == 4 else 1.0


def model_flops(arch: Arch, step: Step) -> float:
    """Operations that one optimizer step needs, nothing recomputed.

    Two for each weight and token forward, two back; the adapter's own gradients two more; attention
    under its causal mask half of the square of the length.
    """
    tokens = step.tokens * step.accumulation
    frozen = arch.linear_weights + arch.vocab * arch.hidden
    adapter = lora_weights(step.targets, step.rank)
    attention = arch.layers * arch.query * step.length  # of scores and of their product, halved
    return tokens * (4.0 * frozen + 6.0 * adapter + 2 * 3.0 * attention)


def executed_flops(arch: Arch, step: Step) -> float:
    """The same with what is recomputed: the blocks forward again, but for the down projections."""
    total = model_flops(arch, step)
    if step.checkpointing:
        tokens = step.tokens * step.accumulation
        down = arch.layers * arch.inner * arch.hidden if step.kernels == "fused" else 0
        total += tokens * (2.0 * (arch.linear_weights - down) + 2.0 * arch.layers * arch.query)
    return total


def step_seconds(arch: Arch, step: Step, device: str) -> float | None:
    """Seconds of one optimizer step, roughly; None on a card whose rate is not known."""
    speed = rate(step, device)
    if speed is None:
        return None
    if not step.gpu:
        return round(executed_flops(arch, step) / speed, 4)
    launches = _LAUNCH_SECONDS_PER_BLOCK * arch.layers * step.accumulation
    launches *= 1.5 if step.checkpointing else 1
    return round(max(executed_flops(arch, step) / (speed * _SHARE_OF_PEAK), launches), 4)


def steps_seconds(
    arch: Arch, step: Step, device: str, steps: int | None, usual_tokens: int | None
) -> float | None:
    """Seconds of so many steps, with rows of so many tokens; None where that is not known."""
    if steps is None or usual_tokens is None:
        return None
    one = step_seconds(arch, replace(step, length=usual_tokens), device)
    return None if one is None else one * steps
