"""The run's log: what the package says outside its children, errors in words, no reader needed."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

from tuneserve.errors import TuneserveError

_OURS = ("tuneserve", "tasks")
# Where Prefect logs an error that ends a task, a flow, and the process of a run.
_THEIRS = ("prefect.task_runs", "prefect.flow_runs", "prefect.engine")
_told: weakref.WeakSet[TuneserveError] = weakref.WeakSet()


class _Forward(logging.Handler):
    def __init__(self, logger: Any) -> None:
        super().__init__(logging.INFO)
        self.logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line on; its text is made here, where its arguments are at home."""
        self.logger.log(record.levelno, "%s", record.getMessage())


def outlive_the_reader() -> None:
    """Let the run go on when whoever reads our output is gone, such as a killed worker.

    Prefect logs through rich, whose console ends the process at a broken pipe; the run's log on
    the server is not touched by this.
    """
    names = [None, *logging.root.manager.loggerDict]
    for handler in [handler for name in names for handler in logging.getLogger(name).handlers]:
        console = getattr(handler, "console", None)
        if console is not None:
            console.on_broken_pipe = functools.partial(setattr, console, "quiet", True)


def say_errors_once() -> None:
    """Let an error of ours be logged in its own words, once: where it was, what to do.

    Prefect logs it with the traceback, which leads through Prefect's own code, and again for each
    of task, flow and process that it ends.
    """
    for name in _THEIRS:
        logging.getLogger(name).addFilter(_once_in_words)


def _once_in_words(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if not isinstance(error, TuneserveError):
        return True
    if error in _told:
        return False
    _told.add(error)
    record.msg, record.args = record.getMessage().replace(repr(error), str(error)), ()
    record.exc_info = record.exc_text = None
    return True


@contextlib.contextmanager
def shown_in(logger: Any) -> Iterator[None]:
    """Forward our loggers' lines to a run's logger while the body runs."""
    handler = _Forward(logger)
    before = {name: logging.getLogger(name).level for name in _OURS}
    for name in _OURS:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(level)
