"""Predict memory, disk and the micro-batch before anything is spent."""

from __future__ import annotations

from tasks.stage import stage_task

plan = stage_task(
    "plan",
    retries=1,
    description="Refuse what cannot fit before hours are spent.",
)
