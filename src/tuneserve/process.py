"""Run a stage in a child process: its memory ends with it, and nothing of it outlives us.

The child is a session of its own. It holds the reading end of a pipe whose writing end only we
hold: when we are gone, however we went, the pipe closes and the child ends its whole group. On
cancel, time-out or error we end the group ourselves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuneserve.artifacts import Artifact, artifact_id
from tuneserve.calls import StageCall, StageResult, open_remote
from tuneserve.errors import (
    BudgetSpent,
    InputError,
    StageCrashed,
    StageKilled,
    StageTimeout,
    TuneserveError,
)
from tuneserve.remote import RemoteStore
from tuneserve.runlock import held_descriptors
from tuneserve.stagelog import kept_log, to_stderr
from tuneserve.stops import kernel_kills, name_of, new_attempt, note_memory, note_stop
from tuneserve.train import history

log = logging.getLogger(__name__)

PARENT_PIPE_VARIABLE = "TUNESERVE_PARENT_PIPE"
HELD_LOCKS_VARIABLE = "TUNESERVE_HELD_LOCKS"
_TERM_SECONDS = 10.0
# A release that is cancelled in the middle of a switch first puts the champion back.
_RELEASE_TERM_SECONDS = 180.0
_TAIL_LINES = 30
# What others send to end a process; every other signal a process brings upon itself, again each
# time.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_stage(
    call: StageCall,
    *,
    log_line: Callable[[str], None] | None = None,
    timeout_seconds: float | None = None,
) -> StageResult:
    """Give the stage's artifact from the store, or make it in a child process.

    A training that the kernel killed for want of memory goes on at once, with less of it in use,
    as long as it comes further: on to another rung of its ladder, or another checkpoint.

    Args:
        call: The stage and all that decides its result.
        log_line: Gets each line of the child's log; None sends them to our own stderr.
        timeout_seconds: End the stage after this long, all its attempts together; None:
            `engines.*.max_seconds`.

    Raises:
        OutOfMemory: A training was killed for want of memory `history.MOST_FRUITLESS` times
        without coming further.
        TuneserveError: What the child reported, `StageTimeout`, or `StageCrashed` with its last
        lines.
    """
    call = call.limited(timeout_seconds)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def log_file() -> Callable[[str], None]:
            """One log of all attempts, begun with the first: a result that is there has none."""
            return stack.enter_context(kept_log(call.run.name, call.stage, log_line))

        while True:
            try:
                return _run_once(call, log_file, timeout_seconds)
            except StageKilled as error:
                if call.stage != "train" or not error.details.get("out_of_memory"):
                    raise
                what = "going on with less in use"
                if error.details["fruitless"]:
                    what = "it had come no further, and is tried once more"
                log_file()(f"the kernel killed the training for want of memory: {what}")


def _run_once(
    call: StageCall,
    log_file: Callable[[], Callable[[str], None]],
    timeout_seconds: float | None,
) -> StageResult:
    store, remote = call.store, open_remote(call.run)
    store.note_use(*call.inputs.values())
    id, key, attempt = None, None, {}
    if call.spec.makes:
        key = call.key()
        id = artifact_id(call.spec.makes, key)
        attempt = new_attempt(store.work(id))
        store.note_use(id)  # first, so that nobody sweeps it away between
    if remote:
        _say_needs(remote, call, id)
    if id:
        found = store.find(id) or (remote.pull(store, id) if remote else None)
        if found is not None:
            if remote:
                remote.push(found)
            return _from_artifact(call.stage, found, cached=True)
    if remote:
        for needed in call.inputs.values():
            if store.find(needed) is None:
                remote.pull(store, needed)
    limit, over = _time_left(call, timeout_seconds)
    request = {
        **call.to_json(),
        "store": str(store.root),
        "id": id,
        "key": key,
        "stamps": call.stamps(),  # before the hashes of sources
        "sources": call.sources(),
        "base_files": call.base_files(),
    }
    started, kills = time.monotonic(), kernel_kills()
    with tempfile.TemporaryDirectory(prefix="tuneserve-") as folder:
        request_path, result_path = Path(folder) / "request.json", Path(folder) / "result.json"
        request_path.write_text(json.dumps(request), encoding="utf-8")
        command = [call.interpreter(), "-m", "tuneserve", "stage", call.stage]
        try:
            status, tail = run_child(
                [*command, str(request_path), str(result_path)],
                log_line=log_file(),
                timeout_seconds=limit,
                environment=attempt,
                on_stop=lambda: note_stop(attempt),
                term_seconds=_RELEASE_TERM_SECONDS if call.stage == "release" else _TERM_SECONDS,
            )
        except StageTimeout as error:
            raise over from error
        try:
            result = _read_result(call.stage, result_path, status, tail)
        except StageKilled as error:
            _note_kill(call, attempt, id, error, counted=kernel_kills() > kills)
            raise
    if id:
        made = store.find(id)
        if made is None:
            raise StageCrashed(
                f"stage {call.stage} reported artifact {id}, but the store does not have it"
            )
        if remote:
            remote.push(made)
        return _from_artifact(call.stage, made, cached=bool(result.get("cached")))
    return StageResult(call.stage, result["metrics"], seconds=time.monotonic() - started)


def _say_needs(remote: RemoteStore, call: StageCall, id: str | None) -> None:
    """Tell the object store what this machine needs, this stage included, before it is made."""
    from tuneserve.gc import needed_by
    from tuneserve.places import home

    remote.note_needs({*needed_by(home(), call.store), *call.inputs.values(), *filter(None, [id])})


def _note_kill(
    call: StageCall,
    attempt: Mapping[str, str],
    id: str | None,
    error: StageKilled,
    *,
    counted: bool,
) -> None:
    """Complete the error of a child that a signal ended, and note it for the next attempt.

    Args:
        call: The stage.
        attempt: As `new_attempt` gave it.
        id: Of the artifact that was to be made.
        error: Its details get `out_of_memory`, and of a training `fruitless`, attempts in a row
            that were killed without coming further, and whether another `may_pass`.
        counted: Whether the kernel counted a kill for want of memory meanwhile.

    Raises:
        OutOfMemory: A training was, `history.MOST_FRUITLESS` times in a row.
    """
    number = int(error.details.get("signal", 0))
    if counted := counted and number == signal.SIGKILL:
        error.hint = (
            "the kernel counted a kill for want of memory meanwhile: free some, or give the stage "
            "less to do, then run it again"
        )
        error.details["out_of_memory"] = True
        note_memory(attempt)
    if call.stage != "train":
        return
    assert id is not None
    work = call.store.work(id)
    count = history.note_kill(work, name_of(attempt), number, for_memory=counted)
    error.details |= {"fruitless": count, "may_pass": count < history.MOST_FRUITLESS}
    if counted and count >= history.MOST_FRUITLESS:
        raise history.give_up(work, call.hints) from error


def _time_left(
    call: StageCall, timeout_seconds: float | None
) -> tuple[float | None, TuneserveError]:
    """Seconds that are left to the stage (None: as many as it takes), and the error when they are
    over.

    Raises:
        StageTimeout: None are left of the stage's own limit: earlier attempts took them.
        BudgetSpent: Nor of the run's budget.
    """
    limit, now = timeout_seconds or call.engine.max_seconds, time.time()
    own = None if call.ends is None else call.ends - now
    budget = None if call.deadline is None else call.deadline - now
    over: TuneserveError = StageTimeout(
        f"stage {call.stage} took longer than {limit or 0:.0f} s, all its attempts together, and "
        "was ended",
        expected=f"the stage within engines.{call.spec.engine}.max_seconds",
        hint="raise the limit, or make the stage smaller"
        + ("; a training resumes at its last checkpoint" if call.stage == "train" else ""),
    )
    left = own
    if budget is not None and (own is None or budget < own):
        left, over = budget, _budget_spent(call.stage)
    if left is not None and left <= 0:
        raise over
    return left, over


def _budget_spent(stage: str) -> BudgetSpent:
    return BudgetSpent(
        f"the run's budget was used up in stage {stage}, which was ended",
        expected="all stages within budget.max_gpu_hours and budget.max_seconds",
        hint="raise the budget and run again: finished stages are kept, and a training run "
        "resumes at its last checkpoint",
    )


def run_child(
    command: list[str],
    *,
    log_line: Callable[[str], None] | None = None,
    timeout_seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    term_seconds: float = _TERM_SECONDS,
    on_stop: Callable[[], None] = lambda: None,
) -> tuple[int, list[str]]:
    """Run a command as a session of its own that cannot outlive us.

    `on_stop` is called before we send it a signal, and when one that is not SIGKILL ended it.

    Returns:
        Its exit status (negative: the signal that ended it) and the last lines it wrote.

    Raises:
        StageTimeout: It ran longer than `timeout_seconds`; its group has been ended.
    """
    sink = log_line or to_stderr
    tail: list[str] = []
    reading, writing = os.pipe()
    try:
        env = {
            # Libraries' notes to their own developers; what a user can mend is logged as such.
            "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
            **os.environ,
            **(environment or {}),
            PARENT_PIPE_VARIABLE: str(reading),
            HELD_LOCKS_VARIABLE: ",".join(map(str, held_descriptors())),
        }
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(reading, *held_descriptors()),
            env=env,
            text=True,
            errors="replace",
        )
    except OSError as error:
        os.close(reading)
        os.close(writing)
        raise InputError(
            f"{command[0]} cannot be started ({error.strerror})",
            expected="a Python interpreter",
            hint="check engines.*.python in the run file",
        ) from error
    os.close(reading)

    def pump() -> None:
        assert child.stdout is not None
        heard = True
        for line in child.stdout:
            line = line.rstrip("\n")
            tail.append(line)
            del tail[:-_TAIL_LINES]
            try:
                if heard:
                    sink(line)
            except (OSError, ValueError):
                # Whoever read our log is gone (a closed terminal, `| head`). The child must not
                # stop on a full pipe because of that.
                heard = False

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    try:
        status = child.wait(timeout_seconds)
        if _signal_number(status) not in (0, signal.SIGKILL):
            on_stop()
    except subprocess.TimeoutExpired as error:
        raise StageTimeout(
            f"{' '.join(command[:5])} took longer than {timeout_seconds:.0f} s and was ended",
            hint="raise the limit, or make the stage smaller",
        ) from error
    finally:
        end_group(child, term_seconds, on_stop)
        os.close(writing)
        reader.join(timeout=5)
    return child.returncode, tail


def end_group(
    child: subprocess.Popen[str], term_seconds: float, on_stop: Callable[[], None]
) -> None:
    """End a child's whole process group: TERM while the child lives, then KILL whatever is left."""
    if child.poll() is None:
        on_stop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(term_seconds)
        if child.returncode is None:
            on_stop()  # it may have gone on, and have left something only then
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _from_artifact(stage: str, artifact: Artifact, *, cached: bool) -> StageResult:
    return StageResult(
        stage,
        artifact.metrics,
        artifact=artifact.id,
        path=str(artifact.path),
        cached=cached,
        seconds=float(artifact.manifest["seconds"]),
    )


def _read_result(stage: str, path: Path, status: int, tail: list[str]) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        number = _signal_number(status)
        how = f"was killed by {_signal(number)}" if number > 0 else f"ended with status {status}"
        hint = "signal 9 is often the kernel's answer to too little memory" if number == 9 else ""
        kind = StageKilled if number in FROM_OUTSIDE else StageCrashed
        raise kind(
            f"stage {stage} {how} without a result; its last lines:\n    "
            + "\n    ".join(tail[-12:]),
            hint=hint or "read the lines above; if they do not help, report them",
            details={"signal": number} if kind is StageKilled else {},
        ) from error
    if "error" in result:
        raise TuneserveError.from_json(result["error"])
    return dict(result)


def _signal_number(status: int) -> int:
    """The signal that ended a process, as its exit status says; 0: none did."""
    if status < 0:
        return -status
    # As shells and our SIGTERM handler say it; 255 is what a broken wrapper ends with.
    return status - 128 if status - 128 in signal.valid_signals() else 0


def _signal(number: int) -> str:
    """A signal for people: ``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
