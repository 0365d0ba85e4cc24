"""The ladder of exports: quantize, release, and when a gate refuses, the next of
`quantize.methods`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuneserve.calls import StageCall, StageResult
from tuneserve.checkpoint.basecheck import read_config
from tuneserve.config import RunFile
from tuneserve.errors import (
    GateRefused,
    OutOfMemory,
    QuantizeError,
    RunFileError,
    ServerError,
    StageKilled,
    TuneserveError,
)
from tuneserve.plan.arch import Arch, arch_from_config
from tuneserve.plan.checks import known_to_fail

log = logging.getLogger(__name__)

Execute = Callable[[StageCall], StageResult]

# What is given up in turn when a quantization does not fit. Weights of finished and of coming
# layers lie on disk all the time.
_SMALLER: tuple[dict[str, Any], ...] = (
    {"calibration_batch": 1},
    {"calibration_batch": 1, "offload": True},
)

_REPORTED = ("report_folder", "losses", "gates")


def check_held_out(run: RunFile, held_out: int | None) -> None:
    """Refuse before anything is spent a run whose gates could not decide in the end.

    Args:
        run: The run file.
        held_out: Held-out conversations, of which each may be several rows; None: not known.

    Raises:
        RunFileError: Fewer conversations are held out than `gates.min_conversations`.
    """
    gates = run.gates
    most = min(gates.eval_rows, held_out if held_out is not None else gates.eval_rows)
    if not gates.enabled or gates.allow_undecided or most >= gates.min_conversations:
        return
    few = f"gates.eval_rows is {most}"
    more = f"raise gates.eval_rows to at least {gates.min_conversations}"
    if held_out == most:
        few = f"{held_out} conversation{'s are' if held_out != 1 else ' is'} held out"
        more = "raise data.eval_fraction or name data.eval"
    raise RunFileError(
        f"{few}, and the gates decide nothing on fewer than {gates.min_conversations} "
        "conversations (gates.min_conversations)",
        expected="enough held-out conversations to judge the result",
        hint=f"{more}; or set gates.allow_undecided to promote without a decision",
    )


def quantize(
    run: RunFile, base: Path, made: Mapping[str, str], method: str, execute: Execute
) -> StageResult:
    """Quantize; when it does not fit, again with smaller batches, then with more offloaded.

    Raises:
        OutOfMemory: Nothing fits.
        StageKilled: A signal ended every attempt: most often the kernel, for want of memory.
        TuneserveError: Whatever else the stage reports.
    """
    call = StageCall("quantize", run, base, made, settings={"method": method}).limited()
    tries = [{}, *_SMALLER]
    while True:
        hints = tries.pop(0)
        try:
            return execute(replace(call, hints=hints))
        except (OutOfMemory, StageKilled) as error:
            if isinstance(error, OutOfMemory):  # smaller batches were tried in the process itself
                tries = tries[-1:] if "offload" not in hints else []
            if not tries:
                raise
            log.warning("quantizing did not fit (%s); again with %s", error.message, tries[0])


def release_best(
    run: RunFile,
    base: Path,
    artifacts: dict[str, str],
    execute: Execute,
    hints: Mapping[str, Any],
) -> dict[str, Any]:
    """Go down `quantize.methods` until one is promoted; a method that is known to fail for the
    base's architecture is passed over.

    Args:
        run: The run file.
        base: The base model's folder.
        artifacts: Of the run so far; the export that is promoted is added as `quantized`.
        execute: Runs a stage.
        hints: For the release.

    Returns:
        The release's metrics; `rungs` says what became of each export that was tried.

    Raises:
        GateRefused: Every rung was refused, by a gate or as an export that cannot be made or
            served; what was serving goes on serving.
        TuneserveError: The only failure, or the first that another attempt may mend: a server, the
            memory, a process that was killed. Its details hold `rungs`.
    """
    inputs = {name: artifacts[name] for name in ("merged", "dataset", "evaluation")}
    made = {name: artifacts[name] for name in ("merged", "dataset")}
    rungs: list[dict[str, str]] = []
    refusals: list[TuneserveError] = []
    arch = _arch(base)
    for method in run.quantize.methods:
        offered = dict(inputs)
        try:
            if arch and (reason := known_to_fail(arch, method)):
                raise QuantizeError(reason)
            if method != "none":
                found = quantize(run, base, made, method, execute).artifact
                assert found is not None
                offered["quantized"] = found
            told = {**hints, "rungs": rungs, "methods": list(run.quantize.methods)}
            call = StageCall("release", run, base, offered, hints=told)
            metrics = dict(execute(call).metrics)
        except (QuantizeError, GateRefused, ServerError, OutOfMemory, StageKilled) as error:
            if len(run.quantize.methods) > 1:  # of one alone the run's own error says it all
                log.warning("`%s` of quantize.methods was refused: %s", method, error)
            refusals.append(error)
            rungs.append(_rung(method, error))
            continue
        artifacts.update(offered)
        passed = {"method": method, "decision": "passed", "reason": "", "would_pass": ""}
        return {**metrics, "rungs": [*rungs, passed]}
    raise _all_refused(run, refusals, rungs)


def _arch(base: Path) -> Arch | None:
    try:
        return arch_from_config(read_config(base))
    except TuneserveError:  # a stage that reads it says more; nothing is known to fail
        return None


def _rung(method: str, error: TuneserveError) -> dict[str, str]:
    settings = error.details.get("would_pass") or []
    return {
        "method": method,
        "decision": "refused" if isinstance(error, GateRefused) else "failed",
        "reason": error.message.splitlines()[0],
        "would_pass": ", ".join(map(str, settings)),
    }


def _all_refused(
    run: RunFile, refusals: list[TuneserveError], rungs: list[dict[str, str]]
) -> TuneserveError:
    last = refusals[-1]
    if len(refusals) == 1:
        return last
    for error in refusals:
        if not isinstance(error, (GateRefused, QuantizeError)):
            error.details["rungs"] = rungs  # the others were refused, but this one may yet pass
            return error
    judged = [error for error in refusals if isinstance(error, GateRefused)]
    lines = [f"{r['method']}: {r['decision']}: {r['reason']}" for r in rungs]
    passing = [f"{r['method']} with {r['would_pass']}" for r in rungs if r["would_pass"]]
    if "none" not in run.quantize.methods:
        passing.append("perhaps the 16-bit model: add none to quantize.methods")
    would = f"; what would have passed: {'; '.join(passing)}" if passing else ""
    return GateRefused(
        "every export of quantize.methods was refused:\n    " + "\n    ".join(lines),
        expected=last.expected,
        hint=f"what was serving goes on serving{would}",
        details={
            # The last report that was written, for pages and notifications.
            **{k: judged[-1].details[k] for k in _REPORTED if judged and k in judged[-1].details},
            "refused": [error.message for error in refusals],
            "rungs": rungs,
            "would_pass": passing,
        },
    )
