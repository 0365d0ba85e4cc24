"""What the processes of one training agree on. Alone, a process is rank 0 of one.

Engine file: imports torch.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

# Waiting for the others ends so much later than a step that hangs, which can say where it does. A
# rank that died is noticed by the launcher at once, not by this.
_LATER_SECONDS = 300


def join(stall_seconds: float) -> None:
    """Meet the other ranks that the launcher started: NCCL between GPUs, gloo between CPUs.

    A first sum over all of them makes NCCL take its buffers now, while the GPU is still empty:
    what is tried later is tried beside them.

    Args:
        stall_seconds: Of the run file: how long nothing may happen.
    """
    patience = datetime.timedelta(seconds=stall_seconds + _LATER_SECONDS)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=patience, device_id=device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve
        dist.init_process_group("gloo", timeout=patience)
    totals([1.0])


def leave() -> None:
    """Take leave of the others."""
    if _together():
        dist.destroy_process_group()


def rank() -> int:
    """Which of the processes this is."""
    return dist.get_rank() if _together() else 0


def ranks() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _together() else 1


def wait_for_all() -> None:
    """Go on when every rank is here."""
    if _together():
        dist.barrier()


def once(action: Callable[[], T]) -> T:
    """Do something on rank 0 alone; every rank gets the result, and goes on after it is done."""
    if not _together():
        return action()
    box = [action() if rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def totals(numbers: Sequence[float]) -> list[float]:
    """Each number summed over the ranks, in float64."""
    if not _together():
        return list(numbers)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    summed = torch.tensor(numbers, dtype=torch.float64, device=place)
    dist.all_reduce(summed)
    return [float(number) for number in summed.tolist()]


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
