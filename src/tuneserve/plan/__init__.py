"""Predict what a run takes before anything is spent, from `config.json` alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuneserve.config import RunFile

log = logging.getLogger(__name__)


def plan_run(run: RunFile, *, gpu_memory_bytes: int | None = None) -> dict[str, Any]:
    """What `tuneserve plan` prints: the keys of `plan --json` and `table`, whether it fits or not.

    Only the base's small files are fetched. The rows are those of the dataset that `validate` made
    of the same data; until it did they are taken to be as long as `data.max_length`. That the
    installed torch could not use the card, that local files are not there yet, that the base's
    weights are quantized, that too few conversations are held out to decide anything, or that
    somebody else listens on `serve.port`, is a warning here, and an entry of `refused_for`; a run
    is refused for it.

    Raises:
        RunFileError: The run would fail later for reasons that show already.
        ModelError, HubError: The base's config cannot be had.
    """
    from tuneserve.checkpoint.base import peek_base
    from tuneserve.checkpoint.basecheck import check_config
    from tuneserve.ladder import check_held_out
    from tuneserve.named import check_base_place, check_named
    from tuneserve.plan.asjson import as_json
    from tuneserve.plan.build import plan_for
    from tuneserve.plan.rows import data_shape
    from tuneserve.plan.stage import card_left_idle
    from tuneserve.plan.validated import validated_dataset
    from tuneserve.release.entrance import check_early

    check_base_place(run)
    base = peek_base(run.model)
    dataset = validated_dataset(run, base)
    found = plan_for(
        run,
        base_dir=base,
        gpu_memory_bytes=gpu_memory_bytes,
        data=data_shape(dataset.path, dataset.id) if dataset else None,
    )
    refused_for = []
    if idle := card_left_idle(run, found.machine):
        log.warning("%s; %s", idle.message, idle.hint)
        refused_for.append(idle.message)
    checks: list[Callable[[], None]] = [
        lambda: check_named(run),
        lambda: check_config(base, run.model),
    ]
    if not found.machine.supposed:
        checks.insert(0, lambda: check_early(run.serve))
    if dataset:
        held_out = dataset.metrics.get("eval_conversations")
        checks.append(lambda: check_held_out(run, held_out))
    refused_for += [said for check in checks if (said := _warn_of_refusal(check))]
    return {**as_json(found), **({"refused_for": refused_for} if refused_for else {})}


def _warn_of_refusal(check: Callable[[], None]) -> str:
    """Say what a run would be refused for, and give it: a plan is asked for before all is in
    place. Empty: nothing."""
    from tuneserve.errors import TuneserveError

    try:
        check()
    except TuneserveError as error:
        log.warning("the run would be refused: %s; %s", error.message, error.hint)
        return error.message
    return ""
