"""One of several processes that train one adapter: ``python -m tuneserve.train.rank FOLDER``.

Started by `tuneserve.train.launch`, which leaves the job in `FOLDER/job.json` and reads what
became of it from `FOLDER/rank-N.json`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import TuneserveError
from tuneserve.train.job import context_of

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(folder: Path) -> int:
    """Do this rank's part of the job, write what became of it, return the exit status."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    end_with_launcher(int(job["launcher"]))
    _log_to_stderr(rank)
    try:
        outcome = _train(job, rank)
    except TuneserveError as error:
        outcome = {"error": error.to_json()}
    except Exception as error:  # noqa: BLE001 - told to the launcher, which raises it
        traceback.print_exc()
        outcome = _failed(error)
    write_json_atomic(folder / f"rank-{rank}.json", {**outcome, "at": time.time()})
    if "metrics" in outcome:
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking NCCL down could wait for peers, which wait for us.
    os._exit(1)


def end_with_launcher(launcher: int) -> None:
    """Let the kernel end this process when the launcher is gone, however it went.

    The launcher gives every rank a session of its own, so ending its group does not reach them.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it went before the line above
        os._exit(1)


def _train(job: dict[str, Any], rank: int) -> dict[str, Any]:
    from tuneserve.train import stage

    context = context_of(job)
    stage.prepare_libraries(context.run.train.zero > 0)
    import torch

    from tuneserve.train import collective
    from tuneserve.train.memory import MemoryTimeline

    torch.set_num_threads(int(job["threads"]))
    collective.join(context.run.train.stall_seconds)
    rows, held_out = stage.read_both(context)
    recipe = stage.recipe_of(context, len(rows)).with_micro_batch(int(job["micro_batch"]))
    rung = stage.Rung(recipe, job["checkpointing"])
    with MemoryTimeline(torch.cuda.is_available()) as timeline:
        metrics, why = stage.attempt(context, rows, held_out, rung, timeline)
    memory = timeline.to_json(None)
    if metrics is None:
        # Not `leave`: the others are in the middle of a step, and the launcher ends them.
        return {"did_not_fit": why, "memory": memory}
    collective.leave()
    return {"metrics": metrics, "memory": memory}


def _failed(error: Exception) -> dict[str, Any]:
    """The outcome of an error that has no class of ours; also before or after the attempt memory
    may run out, in NCCL's buffers for one.
    """
    from tuneserve.lm.exhausted import is_out_of_memory, said

    if is_out_of_memory(error):
        return {"did_not_fit": said(error)}
    number = error.errno if isinstance(error, OSError) else None
    return {"crash": f"{type(error).__name__}: {error}", "errno": number}


def _log_to_stderr(rank: int) -> None:
    """Rank 0 speaks for all; the others only of what is wrong."""
    form = "%(message)s" if rank == 0 else f"rank {rank}: %(message)s"
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=level, format=form)
    for noisy in ("httpx", "urllib3", "matplotlib", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
