"""Train with several processes of this machine, one a GPU, each rung of the memory ladder anew.

torchrun's agent starts the ranks, watches them, and ends all of them when one dies. A rank that
runs out of memory, or meets an error, writes it down before it goes; what is raised here is that
error, not that of a peer which lost its connection because of it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import logging
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import (
    DiskFull,
    ResourceError,
    RunFileError,
    StageCrashed,
    StageKilled,
    TuneserveError,
)
from tuneserve.process import FROM_OUTSIDE
from tuneserve.stages import StageContext
from tuneserve.train.job import job_of

log = logging.getLogger(__name__)

_FOLDER = "ranks"
_RANK = ("-m", "tuneserve.train.rank")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A rank waiting for a peer that is gone does not react to SIGTERM in every library. The agent would
# give it half a minute.
_TERM_SECONDS = 5
# By these another launcher (torchrun, Slurm's or MPI's) tells a process which of several it is;
# accelerate and transformers read them, and wait for the others. By the last ones `accelerate
# launch` says how to train, in another precision for example, beneath what the run file says.
_OTHERS = frozenset(
    """
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PMI_RANK PMI_SIZE
    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
    MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE
    MPI_LOCALRANKID MPI_LOCALNRANKS
    ACCELERATE_DYNAMO_BACKEND ACCELERATE_GRADIENT_ACCUMULATION_STEPS ACCELERATE_GRADIENT_CLIPPING
    ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU ACCELERATE_USE_DEEPSPEED ACCELERATE_USE_FSDP
    ACCELERATE_USE_MEGATRON_LM ACCELERATE_USE_PARALLELISM_CONFIG
    """.split()
)


def leave_other_launchers(gpus: int) -> None:
    """Forget that another launcher started this process; `train.gpus` says how many train."""
    found = {name: os.environ.pop(name) for name in sorted(_OTHERS & os.environ.keys())}
    if said := [f"{name}={value}" for name, value in found.items() if "MASTER" not in name]:
        log.warning(
            "%s: what another launcher sets is not used; the run file says how to train, and "
            "train.gpus: %d says how many processes do",
            ", ".join(said),
            gpus,
        )


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


def check_deepspeed() -> None:
    """Refuse ZeRO where this interpreter lacks DeepSpeed; a plan cannot look into another one.

    Raises:
        RunFileError: It is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise RunFileError(
            f"train.zero: 2 needs DeepSpeed, which {sys.executable} does not have",
            expected="deepspeed in the interpreter of engines.train.python",
            hint="install it there (requirements/cuda.lock names the version), or set train.zero: "
            "0",
        )


def attempt(
    context: StageContext,
    micro_batch: int,
    checkpointing: bool | str,
    ended: Callable[[], None],
) -> tuple[dict[str, Any] | None, str, list[dict[str, Any]]]:
    """Train on `train.gpus` processes.

    Args:
        context: The stage's.
        micro_batch: Rows a forward pass of one process.
        checkpointing: Whether to recompute activations.
        ended: Called when the ranks are gone for another reason than SIGKILL, before that is
            raised: how far they were then says nothing about memory.

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
    died = _run_ranks(count, folder, ended)
    outcomes = _outcomes(folder, count)
    memory = [outcomes[rank]["memory"] for rank in sorted(outcomes) if "memory" in outcomes[rank]]
    if not died:
        return outcomes[0]["metrics"], "", memory
    for rank, outcome in outcomes.items():
        if "did_not_fit" in outcome:
            return None, f"rank {rank}: {outcome['did_not_fit']}", memory
    error = _error(outcomes, died)
    signals = {-status for status in died.values()} & set(FROM_OUTSIDE)
    if not isinstance(error, StageKilled) or signals != {signal.SIGKILL}:
        ended()  # whoever sends another signal asks for an end: that is not the kernel's way
    raise error


def _threads(count: int) -> int:
    """Threads a rank: the ranks share this machine's cores, whatever else they compute on."""
    return max(1, len(os.sched_getaffinity(0)) // count)


def _run_ranks(count: int, folder: Path, ended: Callable[[], None]) -> dict[int, int]:
    """Start the ranks and wait; exit status of those that died first, empty when all went well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
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
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "agent")),  # else a new one in /tmp
    )
    first: dict[int, int] = {}
    try:
        with _signals_restored(), _ended_soon(first):
            elastic_launch(config, sys.executable)(*_RANK, str(folder))
    except ChildFailedError as error:
        return first or {rank.local_rank: rank.exitcode for rank in error.failures.values()}
    except SignalException as error:
        ended()
        # As if the agent had not caught it: whoever waits for us sees the signal.
        os.kill(os.getpid(), error.sigval)
        raise
    return {}


@contextlib.contextmanager
def _ended_soon(first: dict[int, int]) -> Iterator[None]:
    """Put into `first` who died before the agent ended the others, and shorten how it does that.

    The agent itself tells neither apart, nor has it an option for the time.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    close = SubprocessContext._close

    def note_and_close(ranks: Any, death_sig: signal.Signals, timeout: int = 30) -> None:
        if not first:  # it closes them again at the end
            statuses = {n: rank.proc.poll() for n, rank in ranks.subprocess_handlers.items()}
            first.update({n: status for n, status in statuses.items() if status})
        close(ranks, death_sig, min(timeout, _TERM_SECONDS))

    SubprocessContext._close = note_and_close
    try:
        yield
    finally:
        SubprocessContext._close = close


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
    """The error to raise: one that names its cause before one that may follow from another's.

    Args:
        outcomes: What ranks wrote before they went, the first one first.
        died: How those went that were gone before the others were ended.
    """
    for outcome in outcomes.values():
        if "error" in outcome:
            return TuneserveError.from_json(outcome["error"])
    for rank, outcome in outcomes.items():
        if outcome.get("errno") in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(
                f"rank {rank}: the disk is full",
                expected="free disk for checkpoints",
                hint="free some space and run the same command again",
            )
    for rank, status in sorted(died.items()):
        if -status in FROM_OUTSIDE:  # and not by the agent, which had ended nobody yet
            kernel = "signal 9 is often the kernel's answer to too little memory; "
            return StageKilled(
                f"rank {rank} of the training was killed by signal {-status}; the others were "
                "ended",
                hint=(kernel if status == -signal.SIGKILL else "")
                + "run the same command again: it goes on from the last checkpoint",
                details={"signal": -status},
            )
    for rank, status in sorted(died.items()):
        if status < 0:
            shared = "/dev/shm is full or too small (in a container: --shm-size, or --ipc=host)"
            return StageCrashed(
                f"rank {rank} of the training crashed with signal {-status} "
                f"({signal.strsignal(-status) or 'unknown'}); the others were ended",
                hint=f"most often {shared}: free it, then run the same command again"
                if status == -signal.SIGBUS
                else "read the lines above; if they do not help, report them",
            )
    for rank, outcome in outcomes.items():
        if "crash" in outcome:
            return StageCrashed(
                f"rank {rank} of the training ended with {outcome['crash']}",
                hint="read the lines above; if they do not help, report them",
            )
    return StageCrashed(f"ranks of the training ended without a result: {dict(died)}")
