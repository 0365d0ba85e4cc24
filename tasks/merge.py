"""Merge the adapter into the base."""

from __future__ import annotations

from tasks.stage import stage_task

merge = stage_task(
    "merge",
    retries=2,
    description="Merge; a killed attempt resumes at its last shard.",
)
