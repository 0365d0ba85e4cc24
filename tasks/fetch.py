"""Bring the base model to this machine."""

from __future__ import annotations

from tasks.stage import stage_task

fetch = stage_task(
    "fetch",
    retries=3,
    description="Download or convert the base model; a hub that does not answer is asked again.",
)
