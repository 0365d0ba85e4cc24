"""The inside of a stage's child process: ``python -m tuneserve stage NAME REQUEST.json
RESULT.json``.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuneserve.artifacts import Artifact, Store, write_json_atomic
from tuneserve.calls import StageCall
from tuneserve.config import RunFile
from tuneserve.devices import visible_gpus
from tuneserve.errors import DiskFull, OutOfMemory, TuneserveError
from tuneserve.process import HELD_LOCKS_VARIABLE, PARENT_PIPE_VARIABLE
from tuneserve.stages import STAGES, StageContext, StageSpec
from tuneserve.stops import note_stop
from tuneserve.versions import package_versions

log = logging.getLogger(__name__)


def run_request(name: str, request_path: Path, result_path: Path) -> int:
    """Do what the request asks of stage `name`, write the result file, return the exit status."""
    end_with_parent()
    _log_to_stderr()
    try:
        result = _run(STAGES[name], json.loads(request_path.read_text(encoding="utf-8")))
    except TuneserveError as error:
        write_json_atomic(result_path, {"error": error.to_json()})
        return error.exit_status
    except MemoryError as error:
        return _fail(
            result_path,
            OutOfMemory(
                f"out of memory ({error})",
                expected="as much memory as the plan counts",
                hint="see `tuneserve plan`",
            ),
        )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        return _fail(
            result_path,
            DiskFull(
                f"the disk is full{where}",
                expected="as much free disk as the plan counts",
                hint="free some space and run the same command again",
            ),
        )
    except RuntimeError as error:
        if not _is_device_out_of_memory(error):
            raise
        traceback.print_exc()
        return _fail(
            result_path,
            OutOfMemory(
                f"out of device memory: {str(error).splitlines()[0]}",
                expected="as much GPU memory as the plan counts",
                hint="see `tuneserve plan`",
            ),
        )
    write_json_atomic(result_path, result)
    return 0


def end_with_parent() -> None:
    """End our whole process group when the parent is gone: its end of the pipe then closes."""
    # We keep the run's locks as long as we live; a server that we start must not.
    for held in filter(None, os.environ.pop(HELD_LOCKS_VARIABLE, "").split(",")):
        with contextlib.suppress(OSError):  # an interpreter's wrapper may have closed it
            os.set_inheritable(int(held), False)
    text = os.environ.pop(PARENT_PIPE_VARIABLE, "")
    if not text:
        return
    descriptor = int(text)
    os.set_inheritable(descriptor, False)  # what we start must not keep the pipe

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        note_stop()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _run(spec: StageSpec, request: dict[str, Any]) -> dict[str, Any]:
    run = RunFile.model_validate(request["run"])
    store = Store(Path(request["store"]))
    if not spec.makes:
        with tempfile.TemporaryDirectory(prefix="tuneserve-") as folder:
            scratch = Path(folder)
            context = _context(request, run, store, scratch, scratch)
            return {"metrics": _entry(spec)(context)}
    id = request["id"]
    with store.lock(id):
        found = store.find(id)
        if found is not None:  # made by another run while this one waited
            return {"artifact": id, "metrics": found.metrics, "cached": True}
        with store.draft(id) as draft:
            started, clock = datetime.now(UTC), time.monotonic()
            context = _context(request, run, store, draft.path, draft.work)
            call = StageCall.from_json(request)
            if spec.checks_first:
                call.check_unchanged(request)
            metrics = _entry(spec)(context)
            if not spec.checks_first:
                call.check_unchanged(request)
            metrics["peak_rss_bytes"] = peak_rss_bytes()
            facts = {
                "key": request["key"],
                "inputs": request["inputs"],
                "sources": request["sources"],
                "base": run.model.base,
                "run": run.name,
                "config": request["run"],
                "versions": package_versions(sys.executable, ("tuneserve", *spec.packages)),
                "metrics": metrics,
                "gpus": len(visible_gpus()),
                "started": started.isoformat(timespec="seconds"),
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - clock, 3),
            }
            artifact = store.commit(draft, spec.name, facts)
    return {"artifact": artifact.id, "metrics": metrics, "cached": False}


def _context(
    request: dict[str, Any], run: RunFile, store: Store, out: Path, work: Path
) -> StageContext:
    inputs: dict[str, Artifact] = {name: store.get(id) for name, id in request["inputs"].items()}
    base = Path(request["base"]) if request["base"] else None
    return StageContext(run, base, inputs, out, work, request["settings"], request["hints"])


def _entry(spec: StageSpec) -> Any:
    module, _, function = spec.entry.partition(":")
    return getattr(importlib.import_module(module), function)


def peak_rss_bytes() -> int:
    """Peak resident memory of this process and of the largest child it waited for (VmHWM,
    `getrusage`).
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss survives exec, so a process that a large parent forked starts high: VmHWM does not.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                own = int(line.split()[1])
    return 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _is_device_out_of_memory(error: RuntimeError) -> bool:
    """torch.OutOfMemoryError without importing torch where it is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _fail(result_path: Path, error: TuneserveError) -> int:
    # A full disk must not hide why: the result file is small, and /tmp may be another disk.
    try:
        write_json_atomic(result_path, {"error": error.to_json()})
    except OSError:
        log.error("%s", error)
    return error.exit_status


def _log_to_stderr() -> None:
    # No time here: whoever shows the lines (a terminal, an orchestrator's log) adds its own.
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Words between library developers: extensions of other cards, how an enum is registered, and
    # that a kernel from the hub, which we never ask, is not there: bitsandbytes' own is.
    for noisy in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.module != "real_accelerator")
