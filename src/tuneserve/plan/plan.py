"""A plan's data: what a run will take, and what was chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuneserve.plan.advice import Advice
from tuneserve.plan.arch import Arch
from tuneserve.plan.later import Serving
from tuneserve.plan.machine import Machine
from tuneserve.plan.rows import DataShape
from tuneserve.plan.speed import steps_seconds
from tuneserve.plan.stageplan import StagePlan
from tuneserve.plan.times import Times
from tuneserve.plan.trainstep import Step
from tuneserve.plan.ways import Ways


@dataclass(frozen=True)
class Plan:
    """What a run will take, and what was chosen for it.

    Attributes:
        advice: What to change where training does not fit.
        left_to_do: The same for a training of which not even the last rung fits after all.
    """

    arch: Arch
    machine: Machine
    step: Step
    stages: Mapping[str, StagePlan]
    serving: Serving
    blue_green_fits: bool
    trains_while_serving: bool
    download_bytes: int
    data: DataShape | None = None
    advice: tuple[Advice, ...] = ()
    left_to_do: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    several: Ways | None = None
    steps: int | None = None
    usual_tokens: int | None = None
    times: Times = Times({})

    @property
    def train_seconds(self) -> float | None:
        """All steps of the training, with rows of their mean length; None where it is not known."""
        return steps_seconds(
            self.arch, self.step, self.machine.device, self.steps, self.usual_tokens
        )

    @property
    def disk_bytes(self) -> int:
        """All that the run leaves on disk, the base's download included."""
        return self.download_bytes + sum(stage.disk_bytes for stage in self.stages.values())

    @property
    def disk_fits(self) -> bool:
        """Whether it fits on the store's disk (not asked of a machine that is only supposed)."""
        return self.machine.supposed or self.disk_bytes <= self.machine.disk_free_bytes

    @property
    def fits(self) -> bool:
        """Whether everything fits."""
        return self.disk_fits and all(stage.fits for stage in self.stages.values())
