"""The 4-bit export as a stage of a run."""

from __future__ import annotations

from typing import Any

from tuneserve.quantize.export import export
from tuneserve.stages import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Quantize the merged model as `settings["method"]` says (gptq or awq)."""
    result = export(
        context.inputs["merged"].path,
        str(context.settings.get("method", "gptq")),
        context.inputs["dataset"].path,
        context.out,
        context.work,
        context.run.quantize,
        trust_remote_code=context.run.model.trust_remote_code,
        batch_size=context.hints.get("calibration_batch"),
        offload=bool(context.hints.get("offload")),
        tensor_parallel_size=context.run.serve.tensor_parallel,
        server=context.run.engines.serve.python,
    )
    return result.to_json()
