"""Experiment trackers: where they write, and that their outage does not end a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from tuneserve.errors import RunFileError
from tuneserve.places import run_root

log = logging.getLogger(__name__)

_INTEGRATIONS = "transformers.integrations"


def place_trackers(name: str) -> None:
    """Let TensorBoard write where a person finds it after the run, not beside the checkpoints."""
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_root() / "trackers" / name))


def missing_trackers(names: Sequence[str]) -> list[str]:
    """Those that this interpreter cannot import."""
    other = {"tensorboard": "tensorboardX"}  # which does as well
    return [name for name in names if not any(map(find_spec, {name, other.get(name, name)}))]


def need_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed here; the plan cannot always ask this interpreter.

    Raises:
        RunFileError: Some are not.
    """
    if wanted := missing_trackers(names):
        raise RunFileError(
            f"train.report_to: {', '.join(wanted)} cannot be imported by {sys.executable}",
            expected="trackers that are installed beside the trainer",
            hint=f"{sys.executable} -m pip install {' '.join(wanted)}, or leave them out",
        )


class Guarded:
    """A tracker's callback whose first error is said, and which is left alone from then on."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._failed = inner, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._guard(found) if name.startswith("on_") and callable(found) else found

    def _guard(self, event: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._failed:
                return None
            try:
                return event(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  (a tracker's library may raise anything)
                self._failed = True
                kind = type(self._inner).__name__
                log.warning("%s failed (%s): training goes on without it", kind, error)
                return None

        return guarded


def guard_trackers(handler: Any) -> None:
    """Guard all trackers among a trainer's callbacks."""
    handler.callbacks = [
        Guarded(callback) if type(callback).__module__.startswith(_INTEGRATIONS) else callback
        for callback in handler.callbacks
    ]
