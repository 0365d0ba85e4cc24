"""A whole run as schedules need it: alone, within its budget, recorded, and heard of."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuneserve.calls import StageCall, StageResult, open_store
from tuneserve.config import RunFile
from tuneserve.devices import visible_gpus
from tuneserve.errors import GateRefused, TuneserveError
from tuneserve.named import check_named, check_tools
from tuneserve.notify import notify, run_command
from tuneserve.pipeline import Execute, PipelineResult, finetune_to_serve
from tuneserve.runlock import hold
from tuneserve.runs import RunRecord, Runs, in_one_line, now, reason, summary
from tuneserve.unchanged import inputs_digest, nothing_to_do, serving_now
from tuneserve.variables import check_variables

log = logging.getLogger(__name__)


def retrain(
    run: RunFile,
    execute: Execute,
    *,
    run_id: str = "",
    force: bool = False,
    link: str = "",
    within: AbstractContextManager[Any] | None = None,
    on_stale: Callable[[list[RunRecord]], None] = lambda stale: None,
) -> PipelineResult:
    """Do what the run file asks for, unless nothing changed since it was last done.

    Args:
        run: The run file.
        execute: Runs one stage.
        run_id: What others are told who holds the locks; a random one when empty.
        force: Run also when nothing changed.
        link: Where people see the run; part of notifications.
        within: Entered once this machine's locks are held: what must be held elsewhere.
        on_stale: Told of runs of this machine that were killed.

    Raises:
        DeviceBusy: Another run holds the served name or a card (see `overlap`).
        BudgetSpent: The run's budget was used up.
        GateRefused: Every export was refused, now or by the last run where nothing changed since;
        what was serving goes on serving.
        TuneserveError: A stage failed.
    """
    run_id = run_id or uuid.uuid4().hex[:12]
    runs = Runs()
    config = run.model_dump(mode="json")
    record = RunRecord(run_id, run.name, run.serve.name, config=config, link=link)

    def clear() -> None:
        stale = runs.mark_stale()
        for other in stale:
            notify(run.notify, "failed", summary(other))
        on_stale(stale)

    try:
        with contextlib.ExitStack() as held:
            clear()
            record.gpus = len(visible_gpus())
            _check_first(run, runs, record)
            held.enter_context(hold(run, run_id, now()))
            clear()  # the run that we waited for may have been killed
            held.enter_context(within or contextlib.nullcontext())
            record.started = now()
            held.enter_context(runs.recording(record))
            return _watched(run, execute, runs, record, force=force)
    except GateRefused:
        raise  # it was told with what the gates found
    except Exception as error:
        # Whatever it was, and also where it kept the record from being written.
        record.state = "failed" if record.state == "running" else record.state
        record.error = _said(error)
        _tell(run, record, {}, event="failed")
        raise


def _check_first(run: RunFile, runs: Runs, record: RunRecord) -> None:
    """What can be seen at once, before others are waited for: variables, and what is local."""
    try:
        check_variables(run, os.environ)
        check_named(run)
        check_tools(run)
    except TuneserveError as error:
        record.started, record.state, record.error = now(), "failed", str(error)
        with runs.recording(record):
            raise


def _watched(
    run: RunFile, execute: Execute, runs: Runs, record: RunRecord, *, force: bool
) -> PipelineResult:
    def unchanged(base: Path) -> PipelineResult | None:
        last = runs.last_settled(run.serve.name)
        record.inputs = inputs_digest(run, base)
        runs.save(record)
        note = "" if force else nothing_to_do(run, open_store(run), last, record.inputs)
        if not note or last is None:
            return None
        record.used, record.artifacts, record.release = last.used, last.artifacts, last.release
        if last.state == "refused":
            raise refused_before(last, note)
        log.info("%s", note)
        known = last.result or {"endpoint": "", "model": run.serve.name, "release": ""}
        serving = serving_now(run.serve.name)[0]
        told = {"outcome": "unchanged", "note": note, "serving": serving or ""}
        return PipelineResult(**{**known, **told})

    try:
        result = finetune_to_serve(run, _accounted(run, execute, runs, record), unchanged)
        if result.outcome == "promoted":
            # A run that was killed, or failed, after the switch told nobody: it is this one's to.
            again = result.metrics.get("reused") and runs.is_settled(result.release)
            record.release, record.artifacts = result.release, result.artifacts
            runs.save(record)
            if again:
                result.outcome = "unchanged"
                result.note = f"{result.release} serves this model already"
            elif run.notify.promoted_command:
                _command(run, result)
            record.state = "confirmed" if again else "promoted"
        else:
            record.state = result.outcome
    except GateRefused as error:
        again = "refused_by" in error.details
        record.state, record.error = "still refused" if again else "refused", str(error)
        # A refusal is told once; each later run only says that nothing changed.
        _tell(run, record, error.details, event="unchanged" if again else "refused")
        raise
    except Exception as error:
        record.state, record.error = "failed", _said(error)
        raise
    except BaseException as error:
        record.state = "cancelled"  # by a person, or because the machine goes down
        stopped = (128 + signal.SIGTERM, 128 + signal.SIGINT)
        if isinstance(error, SystemExit) and error.code not in stopped:
            record.state, record.error = "failed", "whoever started this run is gone"
            _tell(run, record, {})
        raise
    record.release, record.artifacts = result.release or None, result.artifacts
    record.result = result.to_json()
    _tell(run, record, {**result.metrics, "note": result.note}, event=result.outcome)
    return result


def _command(run: RunFile, result: PipelineResult) -> None:
    model = result.artifacts.get("quantized") or result.artifacts["merged"]
    folder = open_store(run).root / model
    run_command(run.notify.promoted_command, folder, result.release, run.serve.name)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, TuneserveError) else f"{type(error).__name__}: {error}"


def refused_before(last: RunRecord, note: str) -> GateRefused:
    """What a run says that would only be refused again."""
    return GateRefused(
        f"{note}; it was refused because: {in_one_line(reason(last))}",
        expected="other data, another setting, or another threshold than then",
        hint="change one of them, or judge the same model again with --force",
        details={"refused_by": last.id, "note": note},
    )


def _accounted(run: RunFile, execute: Execute, runs: Runs, record: RunRecord) -> Execute:
    """`execute` within the budget, noting what each stage gave and took."""
    limits = [run.budget.max_seconds]
    if run.budget.max_gpu_hours is not None and record.gpus:
        limits.append(run.budget.max_gpu_hours * 3600 / record.gpus)
    known = [limit for limit in limits if limit is not None]
    deadline = time.time() + min(known) if known else None

    def accounted(call: StageCall) -> StageResult:
        record.stage = call.stage
        runs.save(record)
        started = time.monotonic()
        try:
            result = execute(replace(call.limited(), deadline=deadline))
        finally:
            spent = time.monotonic() - started
            record.seconds[call.stage] = round(record.seconds.get(call.stage, 0.0) + spent, 3)
        if result.artifact:
            record.artifacts[str(call.spec.makes)] = result.artifact
            record.used.append(result.artifact)
        runs.save(record)
        return result

    return accounted


def _tell(run: RunFile, record: RunRecord, details: dict[str, Any], *, event: str = "") -> None:
    found = {key: details[key] for key in ("losses", "gates", "rungs", "note") if details.get(key)}
    notify(run.notify, event or record.state, {**summary(record), **found})
