"""What the package logs outside its children shows in the run's log: waits, refusals, notes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

_OURS = ("tuneserve", "tasks")


class _Forward(logging.Handler):
    def __init__(self, logger: Any) -> None:
        super().__init__(logging.INFO)
        self.logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line on; its text is made here, where its arguments are at home."""
        self.logger.log(record.levelno, "%s", record.getMessage())


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
