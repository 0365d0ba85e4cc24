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

# How long a rank waits for the others: a checkpoint on a slow disk fits in; a rank that died is
# noticed by the launcher at once, not by this.
_PATIENCE = datetime.timedelta(minutes=30)


def join() -> None:
    """Meet the other ranks that the launcher started: NCCL between GPUs, gloo between CPUs."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=_PATIENCE, device_id=device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve
        dist.init_process_group("gloo", timeout=_PATIENCE)


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
