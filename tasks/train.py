"""Train the adapter."""

from __future__ import annotations

from tasks.stage import stage_task

train = stage_task(
    "train",
    retries=2,
    description="Train; a killed attempt resumes at its last checkpoint.",
)
