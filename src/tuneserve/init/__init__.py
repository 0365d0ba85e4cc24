"""`tuneserve init`: look at the data and at the card, and write a run file that fits both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuneserve.init.make import Made


def init_run(
    data: list[str],
    out: Path,
    *,
    base: str | None = None,
    gpu_memory_bytes: int | None = None,
    force: bool = False,
) -> Made:
    """Write a commented run file.

    Args:
        data: Files, folders, globs or URLs with conversations; empty: an example file is written
            beside the run file, to be replaced.
        out: The run file to write.
        base: Hub id, folder or built-in name; None: one that suits the machine.
        gpu_memory_bytes: Suppose an empty card of this size instead of looking.
        force: Replace a run file that is there.

    Raises:
        OutputExists: `out` is there, and `force` was not given.
        DataError: The data cannot be used.
        ModelError, HubError: The base cannot be looked at.
        OutOfMemory: No setting of this base fits on the machine; nothing was written.
    """
    from tuneserve.init.make import make

    return make(data, out, base=base, gpu_memory_bytes=gpu_memory_bytes, force=force)
