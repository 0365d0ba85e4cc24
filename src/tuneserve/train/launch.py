"""Train with several processes of this machine, one a GPU, each rung of the memory ladder anew.

torchrun's agent starts the ranks, watches them, and ends all of them when one dies. A rank that
runs out of memory, or meets an error, writes it down before it goes; what is raised here is that
error, not that of a peer which lost its connection because of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import (
    DiskFull,
    ResourceError,
    StageCrashed,
    StageKilled,
    TuneserveError,
)
from tuneserve.stages import StageContext
from tuneserve.train.rank import job_of

log = logging.getLogger(__name__)

_FOLDER = "ranks"
_RANK = ("-m", "tuneserve.train.rank")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A rank waiting for a peer that is gone does not react to SIGTERM in every library.
_TERM_SECONDS = 5


def check_gpus(wanted: int) -> None:
    """Refuse more processes than there are GPUs. Without any GPU they share the CPU.

    Raises:
        ResourceError: There are GPUs, but fewer.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < wanted:
        raise ResourceError(
            f"train.gpus: {wanted}, and {torch.cuda.device_count()} can be seen here",
            expected="one GPU a process",
            hint="lower train.gpus, or check CUDA_VISIBLE_DEVICES and nvidia-smi",
        )


def attempt(
    context: StageContext, micro_batch: int, checkpointing: bool | str
) -> tuple[dict[str, Any] | None, str, list[dict[str, Any]]]:
    """Train on `train.gpus` processes.

    Returns:
        Rank 0's metrics, or None and why it did not fit; and each rank's memory timeline.

    Raises:
        TuneserveError: What a rank reported; StageKilled when a signal ended one.
    """
    count = context.run.train.gpus
    folder = context.work / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    facts = {
        "launcher": os.getpid(),
        "micro_batch": micro_batch,
        "checkpointing": checkpointing,
        "threads": _threads(count),
    }
    write_json_atomic(folder / "job.json", job_of(context, **facts))
    died = _run_ranks(count, folder)
    outcomes = _outcomes(folder, count)
    memory = [outcomes[rank]["memory"] for rank in sorted(outcomes) if "memory" in outcomes[rank]]
    if not died:
        return outcomes[0]["metrics"], "", memory
    for rank, outcome in outcomes.items():
        if "did_not_fit" in outcome:
            return None, f"rank {rank}: {outcome['did_not_fit']}", memory
    raise _error(outcomes, died)


def _threads(count: int) -> int:
    """Threads a rank on a CPU; 0 leaves it to torch."""
    import torch

    if torch.cuda.is_available():
        return 0
    return max(1, len(os.sched_getaffinity(0)) // count)


def _run_ranks(count: int, folder: Path) -> dict[int, int]:
    """Start the ranks and wait; exit status of those that died first, empty when all went well."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_agent()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        role="train",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_TERM_SECONDS)
    try:
        with _signals_restored():
            elastic_launch(config, sys.executable)(*_RANK, str(folder))
    except ChildFailedError as error:
        return {failed.local_rank: failed.exitcode for failed in error.failures.values()}
    except SignalException as error:
        # As if the agent had not caught it: whoever waits for us sees the signal.
        os.kill(os.getpid(), error.sigval)
        raise
    return {}


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent replaces the process's signal handlers and leaves them so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _quiet_agent() -> None:
    """Its warnings tell of processes by number; what happened is raised as an error of ours."""
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401 - makes loggers

    logging.getLogger("torchelastic-events-null").propagate = False
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _outcomes(folder: Path, count: int) -> dict[int, dict[str, Any]]:
    """What the ranks wrote, by rank; the one that wrote first, first."""
    found: dict[int, dict[str, Any]] = {}
    for rank in range(count):
        with contextlib.suppress(OSError, ValueError):
            found[rank] = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    return dict(sorted(found.items(), key=lambda item: float(item[1]["at"])))


def _error(outcomes: Mapping[int, Mapping[str, Any]], died: Mapping[int, int]) -> TuneserveError:
    """The error to raise: one that names its cause before one that may follow from another's."""
    for outcome in outcomes.values():
        if "error" in outcome:
            return TuneserveError.from_json(outcome["error"])
    for rank, outcome in outcomes.items():
        if outcome.get("errno") in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(
                f"rank {rank}: the disk is full",
                hint="free some space and run the same command again",
            )
    for rank, status in sorted(died.items()):
        if status < 0 and status != -signal.SIGTERM:  # by which the agent ends the others
            return StageKilled(
                f"rank {rank} of the training was killed by signal {-status}; the others were "
                "ended",
                hint="signal 9 is often the kernel's answer to too little memory; run the same "
                "command again: it goes on from the last checkpoint",
            )
    for rank, outcome in outcomes.items():
        if "crash" in outcome:
            return StageCrashed(
                f"rank {rank} of the training ended with {outcome['crash']}",
                hint="read the lines above; if they do not help, report them",
            )
    return StageCrashed(f"ranks of the training ended without a result: {dict(died)}")
