"""Fit the plan's constants to this machine, from trainings that ran on it.

Every training on a GPU leaves one line with its setting and its measured peak; `fit` moves the two
constants of the allocator's slack and the CUDA context to where they meet these best. The rest of a
peak is counted, not fitted, and is the same on every card.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import ModelError, RunFileError
from tuneserve.places import home
from tuneserve.plan.arch import Arch, arch_from_config
from tuneserve.plan.constants import DEFAULT, Constants
from tuneserve.plan.memory import train_peak
from tuneserve.plan.trainstep import Step

log = logging.getLogger(__name__)

_FITTED = ("fused_slack_bytes", "fused_slack_tensors", "cuda_context_bytes")
# The shipped constants count as much as so many of the machine's own points: one run alone, with
# rows of one length, cannot tell a constant from what grows with the rows.
_PRIOR_POINTS = 1.0


@dataclass(frozen=True)
class Point:
    """A training's peak: `reserved_bytes` by torch's allocator, `process_bytes` by the driver."""

    arch: Arch
    step: Step
    reserved_bytes: int
    process_bytes: int | None

    @property
    def hidden_bytes(self) -> int:
        """One hidden state of a micro-batch."""
        return self.step.tokens * self.arch.hidden * self.step.element_bytes

    def planned_bytes(self, constants: Constants) -> int:
        """What the plan says the allocator reserves."""
        parts = train_peak(self.arch, self.step, constants).components
        return sum(size for name, size in parts.items() if name != "CUDA context")


def points_file() -> Path:
    """Where trainings leave their lines."""
    return home() / "plan" / "points.jsonl"


def constants_file() -> Path:
    """What was fitted on this machine."""
    return home() / "plan" / "constants.json"


def record(
    config: Mapping[str, Any], step: Step, reserved_bytes: int, process_bytes: int | None
) -> None:
    """Leave a line for a training that ended. `config` is the base's `config.json`."""
    line = {
        "config": dict(config),
        "step": {**asdict(step), "targets": [target.name for target in step.targets]},
        "reserved_bytes": reserved_bytes,
        "process_bytes": process_bytes,
    }
    path = points_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def read_points(path: Path) -> list[Point]:
    """The lines that can be read; those of another version of the plan are left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            saved = json.loads(line)
            arch = arch_from_config(saved["config"])
            names = saved["step"].pop("targets")
            targets = tuple(linear for linear in arch.linears if linear.name in names)
            step = Step(targets=targets, **saved["step"])
            found.append(Point(arch, step, saved["reserved_bytes"], saved["process_bytes"]))
        except (ValueError, KeyError, TypeError, ModelError) as error:
            log.info("a line of %s is left out (%s)", path, error)
    return [point for point in found if point.step.kernels == "fused" and point.step.gpu]


def fit(points: Sequence[Point], start: Constants = DEFAULT) -> Constants:
    """Constants that meet the points best, by relative error, and stay near `start` for few."""
    import numpy as np

    bare = replace(start, fused_slack_bytes=0, fused_slack_tensors=0.0)
    rows, wanted = [], []
    for point in points:
        weight = 1 / point.reserved_bytes
        rows.append([weight, weight * point.hidden_bytes])
        wanted.append(weight * (point.reserved_bytes - point.planned_bytes(bare)))
    typical = statistics.median(point.reserved_bytes for point in points)
    hidden = statistics.median(point.hidden_bytes for point in points)
    prior = _PRIOR_POINTS**0.5 / typical
    rows += [[prior, 0.0], [0.0, prior * hidden]]
    wanted += [prior * start.fused_slack_bytes, prior * hidden * start.fused_slack_tensors]
    slack, tensors = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    contexts = [p.process_bytes - p.reserved_bytes for p in points if p.process_bytes]
    return replace(
        start,
        fused_slack_bytes=max(0, int(slack)),
        fused_slack_tensors=max(0.0, float(tensors)),
        cuda_context_bytes=int(statistics.median(contexts))
        if contexts
        else start.cuda_context_bytes,
    )


def calibrate() -> dict[str, Any]:
    """Fit to this machine's trainings and keep the result; what `plan --calibrate` prints.

    Raises:
        RunFileError: No training on a GPU has ended here yet.
    """
    path = points_file()
    points = read_points(path)
    if not points:
        raise RunFileError(
            f"{path}: no training on a GPU has ended here yet",
            expected="at least one, better several of different lengths and batches",
            hint="train first; `tuneserve plan` works with the shipped constants until then",
        )
    fitted = fit(points)
    write_json_atomic(constants_file(), {name: getattr(fitted, name) for name in _FITTED})
    return {
        "points": len(points),
        "before": _errors(points, DEFAULT),
        "after": _errors(points, fitted),
        "constants": {name: getattr(fitted, name) for name in _FITTED},
        "file": str(constants_file()),
    }


def _errors(points: Sequence[Point], constants: Constants) -> dict[str, float]:
    relative = [abs(p.planned_bytes(constants) / p.reserved_bytes - 1) for p in points]
    return {"mape": round(statistics.fmean(relative), 4), "worst": round(max(relative), 4)}


def machine_constants() -> Constants:
    """The constants fitted here, or the shipped ones."""
    try:
        saved = json.loads(constants_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return DEFAULT
    known = {field.name for field in fields(Constants)} & set(_FITTED)
    return replace(DEFAULT, **{name: saved[name] for name in known if name in saved})
