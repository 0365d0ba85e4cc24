"""Stages that behave badly in a stated way, in real child processes.

`interpreter(folder)` writes an executable that stands for ``engines.*.python``: it runs the same
child code as ever, but every stage's entry is `behave` below, which does what `settings["do"]` or
the file `behave.json` beside the data says, and notes in `executed.log` that it really ran.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def behave(context: Any) -> dict[str, Any]:
    """Do what was asked; the metrics hold what the pipeline reads of any stage."""
    from tuneserve.errors import DataError, GateRefused, HubError

    settings, folder, stage = context.settings, Path(context.run.store.root).parent, sys.argv[2]
    sys.stderr.write(f"{stage} at work\n")
    with (folder / "executed.log").open("a") as log:
        log.write(f"{stage}{':' + settings['method'] if 'method' in settings else ''}\n")
    asked = folder / "behave.json"
    told = json.loads(asked.read_text()) if asked.exists() else {}
    match settings.get("do") or told.get(stage, "write"):
        case "write":
            (context.out / "result.txt").write_text(settings.get("text", "done"))
        case "data error":
            (context.out / "half").write_text("half")
            raise DataError("data.jsonl:1:1: found x", expected="y", hint="mend it")
        case "refuse":
            raise GateRefused("served loss 9.0", expected="below 1.0", hint="see the report")
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
        case "talk":  # more than any pipe holds
            for number in range(20_000):
                sys.stderr.write(f"line {number}\n")
            (context.out / "result.txt").write_text("done")
        case "hang":
            _hang(settings)
    return {
        "rows": 3,
        "path": context.run.model.base,
        "hints": {"train": {"micro_batch": 2}, "release": {}},
        "merged_loss": 1.0,
        "endpoint": "http://127.0.0.1:1/v1",
        "model": "default",
        "release": "r1",
    }


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


if __name__ == "__main__":
    import dataclasses

    from tuneserve import stages
    from tuneserve.__main__ import main

    sys.modules["shim"] = sys.modules["__main__"]
    for _name, _spec in stages.STAGES.items():
        stages.STAGES[_name] = dataclasses.replace(_spec, entry="shim:behave")
    main()
