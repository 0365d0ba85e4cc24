"""A rank of a training that misbehaves as `RANK_SHIM` says; else the real one.

RANK_SHIM_DTYPE=float32 chooses the type that every rank computes in, whatever its processor has.

RANK_SHIM="1 error 2"   rank 1 raises a DataError when step 2 is done
RANK_SHIM="1 kill 2"    rank 1 is killed with signal 9 when step 2 is done
RANK_SHIM="1 smoke 0"   rank 1 raises a DataError in its first forward pass
RANK_SHIM="1 room 2"    a forward pass of more than 2 rows does not fit on rank 1
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def compute_in(name: str) -> None:
    """Compute in this type, as on a processor that has no other."""
    import torch

    from tuneserve.lm import hardware

    hardware.compute_dtype = lambda device: getattr(torch, name)


def misbehave(what: str, number: int) -> None:
    """Change the trainer of this process."""
    import torch

    from tuneserve.errors import DataError
    from tuneserve.train.trainer import RowTrainer
    from tuneserve.train.watch import Watch

    log, loss = Watch.on_log, RowTrainer.compute_loss

    def on_log(self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        log(self, args, state, *rest, **kwargs)
        if state.global_step == number and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == number and what == "error":
            raise DataError(f"row {number} is bad", hint="mend it")

    def compute_loss(self: Any, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        if what == "room" and len(inputs["input_ids"]) > number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if what == "smoke":
            raise DataError("the first row is bad", hint="mend it")
        return loss(self, model, inputs, *rest, **kwargs)

    Watch.on_log = on_log  # type: ignore[method-assign]
    RowTrainer.compute_loss = compute_loss  # type: ignore[method-assign]


if __name__ == "__main__":
    from tuneserve.lm.load import quiet_libraries
    from tuneserve.train import rank

    quiet_libraries()
    if dtype := os.environ.get("RANK_SHIM_DTYPE"):
        compute_in(dtype)
    who, what, number = os.environ.get("RANK_SHIM", "none of_them 0").split()
    if who == os.environ["RANK"]:
        misbehave(what, int(number))
    sys.exit(rank.main(Path(sys.argv[1])))
