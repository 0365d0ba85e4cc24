"""The merge as a stage of a run."""

from __future__ import annotations

import logging
from typing import Any

from tuneserve.merge.proof import read_proof
from tuneserve.merge.run import merge_adapter
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)


def run(context: StageContext) -> dict[str, Any]:
    """Merge the run's adapter into its base; `settings["base_weights"]` is original or nf4.

    The checkpoint grows in `context.work`, where a killed attempt leaves its finished shards, and
    is moved into `context.out` when it is whole.
    """
    assert context.base is not None
    work = context.work / "merged"
    result = merge_adapter(
        context.base,
        context.inputs["adapter"].path,
        work,
        base_weights=context.settings.get("base_weights", "original"),
        max_memory_bytes=context.run.merge.max_memory,
    )
    proof = read_proof(work) or {}
    for path in sorted(work.iterdir()):
        path.rename(context.out / path.name)  # same file system: the draft lies beside the work
    work.rmdir()
    lowest = proof.get("delta_survival", {})
    return {
        **result.to_json(),
        "base_weights": context.settings.get("base_weights", "original"),
        "counts": proof.get("counts"),
        "lowest_delta_survival": lowest.get("lowest"),
        "lowest_delta_survival_tensor": lowest.get("lowest_tensor"),
    }
