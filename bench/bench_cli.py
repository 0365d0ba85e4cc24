"""How long `--help` of each verb takes. Its last line is one JSON object.

    python bench/bench_cli.py [--quick]

Each verb's help is asked for in a process of its own, as a person does; the goal is half a second.
The yardstick is a Python that imports typer alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tuneserve.__main__ import app

RESULT = Path(__file__).with_name("results") / "cli.json"
GOAL_SECONDS = 0.5


def once(command: list[str]) -> float:
    """Wall seconds of one process."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure, print, and write the result unless told to be quick."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="once each; writes nothing")
    options = parser.parse_args()
    verbs = [
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback and not command.hidden
    ]
    bare = [sys.executable, "-c", "import typer"]
    program = [sys.executable, "-m", "tuneserve"]
    once(program + ["--help"])  # files into the page cache
    seconds: dict[str, float] = {}
    yardstick = []
    for verb in ["", *verbs]:
        command = [*program, *filter(None, [verb]), "--help"]
        runs = []
        for _ in range(1 if options.quick else 5):
            yardstick.append(once(bare))
            runs.append(once(command))
        seconds[verb or "(none)"] = round(statistics.median(runs), 3)
        print(f"{verb or '(none)':<10} {seconds[verb or '(none)']:.3f} s")
    slowest = max(seconds, key=lambda verb: seconds[verb])
    result = {
        "bench": "cli",
        "slowest": slowest,
        "slowest_seconds": seconds[slowest],
        "goal_seconds": GOAL_SECONDS,
        "yardstick_seconds": round(statistics.median(yardstick), 3),
        "ratio": round(seconds[slowest] / statistics.median(yardstick), 2),
    }
    if not options.quick:
        RESULT.parent.mkdir(exist_ok=True)
        about = {"cores": os.cpu_count(), "python": sys.version.split()[0], "seconds": seconds}
        RESULT.write_text(json.dumps({**result, **about}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
