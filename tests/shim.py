"""Stages that behave badly in a stated way, in real child processes.

`interpreter(folder)` writes an executable that stands for ``engines.*.python``: it runs the same
child code as ever, but every stage's entry is `behave` below, which does what `settings["do"]` or
the file `behave.json` beside the data says, and notes in `executed.log` that it really ran.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import shutil
import signal
import socketserver
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuneserve.calls import StageCall, StageResult
from tuneserve.config import RunFile
from tuneserve.runfile import parse_run

_SCRIPT = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
shift 2
exec {python} {shim} "$@"
"""


def interpreter(folder: Path) -> str:
    """An executable to name in ``engines.*.python``."""
    path = folder / "python-shim"
    path.write_text(_SCRIPT.format(python=sys.executable, shim=Path(__file__).resolve()))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run_file(folder: Path, **changes: Any) -> RunFile:
    """A run file whose stages all behave as told, with its store in `folder`."""
    python = {"python": interpreter(folder)}
    engines = ("data", "train", "evaluate", "merge", "quantize", "serve")
    data = folder / "data.jsonl"
    if not data.exists():
        data.write_text('{"messages": []}\n')
    return parse_run(
        {
            "name": "shim",
            "model": {"base": str(folder)},
            "data": {"train": str(data)},
            "engines": dict.fromkeys(engines, python),
            "store": {"root": str(folder / "store")},
            **changes,
        }
    )


def executed(folder: Path) -> list[str]:
    """The stages that really ran, in order."""
    log = folder / "executed.log"
    return log.read_text().split() if log.exists() else []


def requests(folder: Path) -> list[dict[str, Any]]:
    """What each child was asked, in order."""
    return [json.loads(line) for line in (folder / "requests.log").read_text().splitlines()]


def in_process(call: StageCall) -> StageResult:
    """Run a stage as a child would, here: for tests about what comes before and after it."""
    from tuneserve import child, stages
    from tuneserve.artifacts import artifact_id

    spec = dataclasses.replace(stages.STAGES[call.stage], entry="shim:behave")
    request: dict[str, Any] = {**call.to_json(), "store": str(call.store.root), "id": None}
    request.update(key=None, sources=call.sources(), base_files=call.base_files())
    if spec.makes:
        request["key"] = call.key()
        request["id"] = artifact_id(spec.makes, request["key"])
    arguments, sys.argv = sys.argv, ["", "stage", call.stage]
    try:
        result = child._run(spec, request)
    finally:
        sys.argv = arguments
    path = str(call.store.root / request["id"]) if spec.makes else None
    return StageResult(
        call.stage, result["metrics"], request["id"], path, bool(result.get("cached")), 0.1
    )


def behave(context: Any) -> dict[str, Any]:
    """Do what was asked; the metrics hold what the pipeline reads of any stage."""
    from tuneserve.errors import DataError, GateRefused, HubError

    settings, folder, stage = context.settings, Path(context.run.store.root).parent, sys.argv[2]
    sys.stderr.write(f"{stage} at work\n")
    with (folder / "executed.log").open("a") as log:
        log.write(f"{stage}{':' + settings['method'] if 'method' in settings else ''}\n")
    if len(sys.argv) > 3:  # a child: what it was asked, of which the stage sees a part
        with (folder / "requests.log").open("a") as log:
            log.write(json.dumps(json.loads(Path(sys.argv[3]).read_text())) + "\n")
    asked = folder / "behave.json"
    told = json.loads(asked.read_text()) if asked.exists() else {}
    match settings.get("do") or told.get(stage, "write"):
        case "write":
            (context.out / "result.txt").write_text(settings.get("text", "done"))
        case "data error":
            (context.out / "half").write_text("half")
            raise DataError("data.jsonl:1:1: found x", expected="y", hint="mend it")
        case "show":
            _show(context, stage)
            return _SHOWN
        case "refuse":
            raise GateRefused("served loss 9.0", expected="below 1.0", hint="see the report")
        case "worse":
            gate = {"passed": False, "found": "2.5", "wanted": "below 1.0", "decision": "refused"}
            details: dict[str, Any] = {
                "losses": {"base": 3.0, "served": 2.5},
                "gates": [{"name": "loss", **gate}],
            }
            report = folder / "report"
            report.mkdir(exist_ok=True)
            (report / "gates.md").write_text("# Release r9 is refused")
            (report / "kl.png").write_bytes(_PIXEL)
            details["report_folder"] = str(report)
            raise GateRefused("served loss 2.5", expected="below 1.0", hint="-", details=details)
        case "promote":
            return _promote(context)
        case "refuse gptq":
            if "gptq" in context.inputs["quantized"].manifest["key"]["settings"].values():
                raise GateRefused("gptq is worse", hint="see the report")
        case "hub error":
            raise HubError("the hub did not answer", hint="wait")
        case "disk full":
            (context.out / "half").write_text("half")
            with open("/dev/full", "w") as stream:
                stream.write("x" * 10_000)
        case "out of memory":
            raise MemoryError("cannot allocate 1 TiB")
        case "bug":
            raise KeyError("our bug")
        case "killed":
            sys.stderr.write("last words\n")
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed and counted":
            _count_kill(folder / "vmstat")
            os.kill(os.getpid(), signal.SIGKILL)
        case "change":  # as a delivery that is copied meanwhile
            changed = Path(settings["file"])
            old = changed.read_bytes() if changed.exists() else b"1"
            changed.write_bytes(old[:-1] + bytes([old[-1] ^ 1]))
            (context.out / "result.txt").write_text("done")
        case "raise signal":
            sys.stderr.write("last words\n")
            os.kill(os.getpid(), settings["signal"])
        case "talk":  # more than any pipe holds
            for number in range(20_000):
                sys.stderr.write(f"line {number}\n")
            (context.out / "result.txt").write_text("done")
        case "hang":
            _hang(settings)
        case "smoke step":
            _smoke_step(context)
        case "kernel":
            return _killed_by_the_kernel(context)
        case "script":
            return _killed_as_told(context, folder)
        case "hang with a child":
            _hang_with_a_child(folder / "hanging.json")
        case "wait":
            (folder / "waiting").touch()
            while not (folder / "go").exists():
                time.sleep(0.1)
            (context.out / "result.txt").write_text("done")
        case "hang alone":
            signal.pause()
    return {
        "rows": 3,
        "path": context.run.model.base,
        "hints": {"train": {"micro_batch": 2}, "release": {}},
        "merged_loss": 1.0,
        "endpoint": "http://127.0.0.1:1/v1",
        "model": "default",
        "release": "r1",
    }


# One transparent point, as PNG (RFC 2083).
_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000a49444154789c63000100000500010d0a2db40000000049454e44ae426082"
)
_SHOWN: dict[str, Any] = {
    "rows": 3,
    "reasons": {"ROLE": 2, "EMPTY": 1},
    "hints": {"train": {}, "release": {}},
    "stages": {"train": {"peak_bytes": 2**30, "available_bytes": 2**34, "fits": True}},
    "path": "",
    "merged_loss": 1.0,
    "endpoint": "http://127.0.0.1:1/v1",
    "model": "default",
    "release": "r1",
    "gates": [{"name": "loss", "passed": True, "found": "0.5", "wanted": "below 1.0"}],
}


def _show(context: Any, stage: str) -> None:
    """Progress lines and a plot, as real stages have them."""
    for step in (1, 2, 4):
        sys.stderr.write(f"{stage}: {step}/4 steps, 1 s left\n")
    (context.out / "loss.png").write_bytes(_PIXEL)


def _promote(context: Any) -> dict[str, Any]:
    """Switch the served name to a new release, in the real release state."""
    from tuneserve.release import state
    from tuneserve.release.layout import layout, point

    places, name = layout(), context.run.serve.name
    model = context.inputs.get("quantized") or context.inputs["merged"]
    with state.change(places) as known:
        record = known.find(name, model.id) or known.add(name, model.id, str(model.path), model.id)
        reused = known.names.get(name, state.Name()).active == record.id
        record.proven = True
        record.report = {"losses": {"base": 3.0, "served": 0.5}, "gates": []}
        entry = known.names.setdefault(name, state.Name())
        if entry.active and not reused:
            until = {"since": entry.since, "until": state.now()}
            entry.history.append({"release": entry.active, **until})
        if not reused:
            entry.active, entry.since, known.default = record.id, state.now(), name
    point(places.name_link(name), f"../r/{record.id}")
    gate = {"name": "loss", "passed": True, "found": "0.5", "wanted": "below 1.0"}
    return {
        "endpoint": "http://127.0.0.1:1/v1",
        "model": name,
        "release": record.id,
        "losses": {"base": 3.0, "served": 0.5},
        "gates": [{**gate, "decision": "passed"}],
        "reused": reused,
    }


class _Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Tuneserve-Release", self.server.release)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    def address_string(self) -> str:
        return "socket"

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def healthy_server(release: str) -> Iterator[None]:
    """Answer /health at the socket of a release of this TUNESERVE_HOME."""
    from tuneserve.release.layout import layout

    path = layout().socket(release)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socketserver.ThreadingUnixStreamServer(str(path), _Health) as server:
        server.release = release  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()
    shutil.rmtree(path.parent)


class Webhook:
    """An HTTP server that keeps what was posted to it; `status` is what it answers."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.heard.append(json.loads(body))
                self.send_response(hook.status)
                for name, value in {"Content-Length": "0", **hook.headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/s3cret"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _hang(settings: Any) -> None:
    """Wait for ever with a grandchild; both hold the pipe `fifo` open: its reader sees them go."""
    stream = open(settings["fifo"], "w")  # noqa: SIM115
    grandchild = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[stream.fileno()]
    )
    stream.write(json.dumps([os.getpid(), grandchild.pid]) + "\n")
    stream.flush()
    while True:
        signal.pause()


def _smoke_step(context: Any) -> None:
    """Be in the step that shows whether a training fits, and take SIGTERM as told."""
    # The real one imports torch.
    sys.modules["tuneserve.train.collective"] = types.SimpleNamespace(rank=lambda: 0)  # type: ignore[assignment]
    from tuneserve.train import stage

    stage._note(context, stage.Rung(stage.recipe_of(context, 64), True), "smoke")
    takes = {"dies": signal.SIG_DFL, "deaf": signal.SIG_IGN}  # deaf: as in a long computation
    if context.settings["takes"] in takes:
        signal.signal(signal.SIGTERM, takes[context.settings["takes"]])
    _hang(context.settings)


def _killed_by_the_kernel(context: Any) -> dict[str, Any]:
    """Train; whatever has more than one row a pass is killed, which the kernel counts; without a
    phase before anything is noted.
    """
    sys.modules["tuneserve.train.collective"] = types.SimpleNamespace(rank=lambda: 0)  # type: ignore[assignment]
    from tuneserve.train import stage

    rung = stage._start(context, stage.Rung(stage.recipe_of(context, 64), True))
    if context.settings["phase"]:
        stage._note(context, rung, context.settings["phase"])
        with Path(context.settings["tried"]).open("a") as log:
            log.write(f"{rung.recipe.micro_batch}\n")
    if rung.recipe.micro_batch > 1:
        _count_kill(Path(context.settings["vmstat"]))
        os.kill(os.getpid(), context.settings.get("signal", signal.SIGKILL))
    (context.out / "result.txt").write_text("done")
    return {"micro_batch": rung.recipe.micro_batch}


def _count_kill(counted: Path) -> None:
    """As the kernel does in /proc/vmstat."""
    counted.write_text(f"oom_kill {int(counted.read_text().split()[1]) + 1}\n")


def _killed_as_told(context: Any, folder: Path) -> dict[str, Any]:
    """Train by a script with an entry for each attempt: the phase that it comes to (empty: killed
    before it noted any), the step of a checkpoint that it leaves (0: none), and how it ends:
    ``oom`` (a kill that the kernel counts), ``kill`` (one that it does not), ``hang``, ``done``.
    """
    sys.modules["tuneserve.train.collective"] = types.SimpleNamespace(rank=lambda: 0)  # type: ignore[assignment]
    from tuneserve.train import checkpoints, history, stage

    script = context.settings["script"]
    phase, step, end = script[min(len(executed(folder)), len(script)) - 1]
    rung = stage._start(context, stage.Rung(stage.recipe_of(context, 64), True))
    if phase:
        with Path(folder / "tried.log").open("a") as log:
            log.write(f"{rung.recipe.micro_batch}\n")
        stage._note(context, rung, "load")
        stage._note(context, rung, phase)
    if step:
        checkpoint = context.work / f"checkpoint-{step}"
        checkpoint.mkdir()
        checkpoints.seal(checkpoint)
    if end == "hang":
        signal.pause()
    if end != "done":
        if end == "oom":
            _count_kill(Path(context.settings["vmstat"]))
        os.kill(os.getpid(), signal.SIGKILL)
    (context.out / "result.txt").write_text("done")
    return {"attempts": history.to_json(context.work)}


def _hang_with_a_child(note: Path) -> None:
    """Wait for ever with a grandchild; `note` holds the ids of both."""
    grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    provisional = note.with_suffix(".new")
    provisional.write_text(json.dumps([os.getpid(), grandchild.pid]))
    provisional.rename(note)
    while True:
        signal.pause()


if __name__ == "__main__":
    from tuneserve import stages
    from tuneserve.__main__ import main

    sys.modules["shim"] = sys.modules["__main__"]
    for _name, _spec in stages.STAGES.items():
        stages.STAGES[_name] = dataclasses.replace(_spec, entry="shim:behave")
    main()
