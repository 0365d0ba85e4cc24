"""What orchestration costs: the time of a run that is not spent in the stages' own processes.

    python bench/bench_overhead.py [--quick]

A whole run of the flow with a Prefect server of its own, as `make demo` starts it: interpreter,
server, eight tasks, keys, hashes, manifests, pages of the UI, locks, records. The stages are real
child processes with stand-ins for the heavy work, and each child's life is timed from outside; what
is left of the wall time is the overhead. Beside it the same run without Prefect (`tuneserve run`),
the yardstick of `ratio`, and two runs that find everything made: one asks the release stage again,
one has nothing to do at all. The release stage's own questions to vLLM are not part of this.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tuneserve.artifacts import write_json_atomic

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "overhead.json"
# As deploy/demo.py does.
FLOW = """
import sys
from tasks.embedded import own_server
ready = own_server()
from flows.finetune_to_serve import finetune_to_serve
ready()
finetune_to_serve(sys.argv[1])
"""
# It runs the stage and notes how long the process lived.
TIMED = """#!/bin/sh
start=$(date +%s.%N)
"{shim}" "$@"
status=$?
[ "$1" = -c ] || echo "$start $(date +%s.%N)" >> "{log}"
exit $status
"""


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Bench:
    """A run file with timed stand-in stages in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shim, pico = _module("shim"), _module("pico")
        base = pico.cached_pico()
        self.log = folder / "children.log"
        timed = folder / "python-timed"
        timed.write_text(TIMED.format(shim=self.shim.interpreter(folder), log=self.log))
        timed.chmod(timed.stat().st_mode | stat.S_IXUSR)
        stages = ("data", "train", "evaluate", "merge", "quantize", "serve")
        run = self.shim.run_file(
            folder,
            model={"base": str(base)},
            merge={"base": "original"},
            engines={name: {"python": str(timed)} for name in stages},
        )
        self.run_file = folder / "run.yaml"
        self.run_file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
        (folder / "behave.json").write_text(json.dumps({"release": "promote"}))
        self.env = {
            **os.environ,
            "TUNESERVE_HOME": str(folder / "home"),
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_LEVEL": "INFO",
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        }
        self.env.pop("PREFECT_API_URL", None)
        (folder / "prefect").mkdir()
        os.environ["TUNESERVE_HOME"] = self.env["TUNESERVE_HOME"]

    def new_data(self, content: int) -> None:
        """Other data: everything has to be made."""
        (self.folder / "data.jsonl").write_text(json.dumps({"messages": [content]}) + "\n")

    def run(self, *command: str) -> dict[str, float]:
        """Wall time of a run, what its children took of it, and what is left."""
        self.log.unlink(missing_ok=True)
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command, str(self.run_file)],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
        )
        wall = time.monotonic() - started
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        lives = [[float(part) for part in line.split()] for line in lines]
        children = sum(end - start for start, end in lives)
        return {"wall": wall, "children": children, "overhead": wall - children, "n": len(lives)}

    def flow(self) -> dict[str, float]:
        """One run of the flow."""
        return self.run("-c", FLOW)

    def plain(self) -> dict[str, float]:
        """One run without Prefect."""
        return self.run("-m", "tuneserve", "run")

    def active(self) -> str:
        """The release that serves."""
        state = json.loads((self.folder / "home" / "run" / "releases.json").read_text())
        return str(state["names"]["default"]["active"])


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """All figures, medians over `rounds`; flow and plain runs in turns."""
    bench = Bench(folder)
    fresh = bench.flow()
    warm, plain, cached, nothing = [], [], [], []
    for number in range(rounds):
        bench.new_data(2 * number + 1)
        warm.append(bench.flow())
        bench.new_data(2 * number + 2)
        plain.append(bench.plain())
        cached.append(bench.flow())
        with bench.shim.healthy_server(bench.active()):
            nothing.append(bench.flow())

    def median(runs: list[dict[str, float]], what: str) -> float:
        return round(statistics.median(run[what] for run in runs), 2)

    return {
        "overhead_seconds": median(warm, "overhead"),
        "fresh_home_overhead_seconds": round(fresh["overhead"], 2),
        "cached_run_seconds": median(cached, "wall"),
        "nothing_to_do_seconds": median(nothing, "wall"),
        "flow_seconds": median(warm, "wall"),
        "children_seconds": median(warm, "children"),
        "plain_seconds": median(plain, "wall"),
        "plain_overhead_seconds": median(plain, "overhead"),
        "ratio": round(median(warm, "wall") / median(plain, "wall"), 2),
        "children": {"made": int(warm[0]["n"]), "cached": int(cached[0]["n"])},
        "rounds": rounds,
    }


def main() -> None:
    """Measure, record unless --quick, print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round; writes nothing")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="ts-") as name:
        found = measure(Path(name), 1 if quick else 3)
    found["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "load_before": os.getloadavg()[2],
    }
    found["versions"] = {name: version(name) for name in ("prefect", "tuneserve")}
    if not quick:
        with contextlib.suppress(FileExistsError):
            RESULT.parent.mkdir()
        write_json_atomic(RESULT, found)
    print(json.dumps(found, sort_keys=True))


if __name__ == "__main__":
    main()
