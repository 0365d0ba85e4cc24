"""Start, prove and promote the candidate."""

from __future__ import annotations

from tasks.stage import stage_task

release = stage_task(
    "release",
    retries=1,
    description="Release; a refused candidate leaves what serves untouched.",
)
