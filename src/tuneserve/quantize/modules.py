"""What GPTQModel said about each module: losses as numbers, and which of them refuse an export."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from tuneserve.errors import QuantizeError

log = logging.getLogger(__name__)

# GPTQModel's own limit below which it would round to nearest instead: share of calibration tokens.
LEAST_COVERAGE = 0.005
# What GPTQModel logs as the loss of a module whose Hessian it could not use (`gptq.py::quantize`).
_NO_LOSS = 999999999


@dataclass(frozen=True)
class ModuleLog:
    """What GPTQModel said about one module; `loss` and `damp` are None where it has none."""

    layer: int
    module: str
    loss: float | None
    samples: int
    damp: float | None
    fallback: bool = False

    @property
    def name(self) -> str:
        """As people say it: ``3.mlp.down_proj``."""
        return f"{self.layer}.{self.module}"


def module_logs(entries: list[dict[str, Any]]) -> list[ModuleLog]:
    """GPTQModel's log rows as numbers, in the order of the layers."""
    found = []
    for entry in entries:
        text = str(entry.get("loss", ""))
        found.append(
            ModuleLog(
                layer=int(entry["layer"]),
                module=str(entry["module"]),
                loss=_number(text),
                samples=int(float(entry.get("samples") or 0)),
                damp=_number(str(entry.get("damp", ""))),
                fallback="fallback" in text or (_number(text) or 0) >= _NO_LOSS,
            )
        )
    return sorted(found, key=lambda m: (m.layer, m.module))


def judge(
    modules: list[ModuleLog], tokens: int, engine_log: str, *, allow_fallback: bool
) -> list[str]:
    """Refuse losses that are not finite, and quiet rounding to nearest; else say what was odd.

    Raises:
        QuantizeError: Names every such module.
    """
    if not modules:
        raise QuantizeError("GPTQModel quantized no module at all")
    bad = [m.name for m in modules if m.loss is not None and not math.isfinite(m.loss)]
    if bad:
        raise QuantizeError(
            f"the quantization loss is not finite in {', '.join(bad[:10])}",
            hint="calibrate with more rows, or add awq or none to quantize.methods",
            details={"modules": bad},
        )
    weak = [
        m.name for m in modules if m.fallback or (m.samples and m.samples < LEAST_COVERAGE * tokens)
    ]
    # Only its log tells that a module was redone with an identity Hessian after a NaN.
    retried = engine_log.count("use mock quantization retry")
    if (weak or retried) and not allow_fallback:
        raise QuantizeError(
            f"{len(weak) + retried} modules were rounded to nearest, because calibration barely "
            f"reached them: {', '.join(weak[:10]) or 'see the log'}",
            expected=f"at least {LEAST_COVERAGE:.1%} of {tokens} calibration tokens in each module",
            hint="raise quantize.calibration_rows, or set quantize.allow_fallback",
            details={"modules": weak},
        )
    notes = [f"rounded to nearest: {name}" for name in weak]
    lowest = min((m.damp for m in modules if m.damp is not None), default=None)
    notes += [
        f"{m.name}: damping rose to {m.damp:g}"
        for m in modules
        if m.damp is not None and lowest is not None and m.damp > lowest
    ]
    for note in notes:
        log.warning("%s", note)
    return notes


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
