"""Blocks to results in order, in this process or in several, with a bounded number under way."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver

from tuneserve.data.engine import Engine
from tuneserve.data.readers import Block
from tuneserve.data.worker import Result, Settings, Worker
from tuneserve.errors import OutOfMemory

# Below this, starting workers costs more than they save.
_WORTH_WORKERS_BYTES = 4 * 2**20
_MOST_WORKERS = 16
# Blocks waiting per worker: enough that none idles while the parent writes, few enough to bound
# memory.
_AHEAD = 3
_worker: Worker | None = None


def process_count(total_bytes: int, wanted: int | None) -> int:
    """How many processes to use: what is wanted, else one per core for data that is worth it."""
    if wanted:
        return wanted
    if total_bytes < _WORTH_WORKERS_BYTES:
        return 1
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


def prepare_workers() -> None:
    """Start the process that workers are forked from; it imports what they need meanwhile.

    Not this process itself: a fork of a process with threads may inherit a held lock.
    """
    multiprocessing.set_forkserver_preload([__name__])
    forkserver.ensure_running()


def run_blocks(
    blocks: Iterable[Block], settings: Settings, processes: int, engine: Engine
) -> Iterator[Result]:
    """Results in the order of the blocks.

    Raises:
        OutOfMemory: A worker was killed.
    """
    # One thread a process: the processes are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if processes == 1:
        yield from map(Worker(settings, engine), blocks)
        return
    with concurrent.futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("forkserver"), _start, (settings, engine)
    ) as pool:
        waiting: deque[concurrent.futures.Future[Result]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_work, block))
                if len(waiting) >= processes * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise OutOfMemory(
                "a validation worker was killed, probably for its memory",
                expected="memory for one process a core",
                hint="close other programs, or use fewer processes",
            ) from error
        finally:
            for future in waiting:
                future.cancel()


def _start(settings: Settings, engine: Engine) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Worker(settings, engine)


def _work(block: Block) -> Result:
    assert _worker is not None
    return _worker(block)
