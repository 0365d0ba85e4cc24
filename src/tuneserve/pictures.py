"""What all pictures have in common: they are for looking, and never end the work they show."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

log = logging.getLogger(__name__)


def optional(draw: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Let a failed drawing be a warning: hours of work are worth more than their picture."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return draw(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a plotting library raises
            log.warning("%s: the picture could not be drawn: %r", draw.__name__, error)
            return None

    return drawn
