"""Importing thousands of modules without the garbage collector, which walks over them in vain."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector off what is imported meanwhile: then, later, and when Python ends.

    It saves a part of a second of importing torch, and of Python's end.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
