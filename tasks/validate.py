"""Check the data and tokenize it once."""

from __future__ import annotations

from tasks.stage import stage_task

validate = stage_task(
    "validate",
    retries=1,
    description="Make the dataset; a data error is never tried again, it would be the same.",
)
