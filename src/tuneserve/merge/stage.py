"""The merge as a stage of a run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from tuneserve.errors import OutputExists
from tuneserve.merge.journal import PROOF_NAME
from tuneserve.merge.picture import PLOT_NAME, plot_change
from tuneserve.merge.proof import read_proof
from tuneserve.merge.result import MergeResult
from tuneserve.merge.run import merge_adapter
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)


def run(context: StageContext) -> dict[str, Any]:
    """Merge the run's adapter into its base; `settings["base_weights"]` is original or nf4.

    The checkpoint grows in `context.work`, where a killed attempt leaves its finished shards, and
    is moved into `context.out` when it is whole.
    """
    work = context.work / "merged"
    try:
        result = _merge(context, work)
    except OutputExists as error:
        # Left by an attempt that was killed while it moved its files, or from a base that was
        # fetched again since: the folder is this stage's own, so it may start afresh.
        log.info("starting afresh: %s", error.message)
        shutil.rmtree(work)
        result = _merge(context, work)
    proof = read_proof(work) or {}
    plot_change(proof.get("tensors", {}), work / PLOT_NAME)
    # The proof goes first: a folder without it is not taken for a finished merge.
    for path in sorted(work.iterdir(), key=lambda p: p.name != PROOF_NAME):
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


def _merge(context: StageContext, work: Path) -> MergeResult:
    assert context.base is not None
    return merge_adapter(
        context.base,
        context.inputs["adapter"].path,
        work,
        base_weights=context.settings.get("base_weights", "original"),
        max_memory_bytes=context.run.merge.max_memory,
    )
