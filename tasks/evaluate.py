"""Measure held-out losses before anything is quantized."""

from __future__ import annotations

from tasks.stage import stage_task

evaluate = stage_task(
    "evaluate",
    retries=1,
    description="Losses of the base, the adapter and the merged model.",
)
