"""Export the 4-bit model."""

from __future__ import annotations

from tasks.stage import stage_task

quantize = stage_task(
    "quantize",
    retries=1,
    description="Quantize on the training rows; what vLLM would refuse is an error here.",
)
