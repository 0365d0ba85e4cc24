"""`make demo`: the flow on the demo's run file, then the live endpoint beside the base model."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUN_FILE = ROOT / "deploy" / "runs" / "demo.yaml"


def main() -> int:
    """Run, ask, show; the exit status is the error's."""
    # Before Prefect is imported: its database lives beside the artifacts, not in the user's own.
    from tuneserve.places import home

    # What is installed for the CPU shows itself there, whatever card the machine has.
    if importlib.metadata.version("torch").endswith("+cpu"):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("PREFECT_HOME", str(home() / "prefect"))
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # SQLite makes no folders
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "ERROR")
    os.chdir(ROOT)  # `from tasks...` and relative places work from the root
    sys.path.insert(0, str(ROOT))
    from rich.console import Console

    from tasks.embedded import own_server
    from tuneserve.artifacts import Store
    from tuneserve.errors import TuneserveError
    from tuneserve.places import store_root
    from tuneserve.runfile import load_run_file

    # A pipe has no width of its own, and 80 columns cut two answers to ribbons.
    console = Console(width=None if sys.stdout.isatty() else 120)
    started = time.monotonic()
    run_file = sys.argv[1] if len(sys.argv) > 1 else str(RUN_FILE)
    console.print(f"[bold]tuneserve demo[/bold]: {run_file} through Prefect's embedded server")
    try:
        ready = own_server()
        from flows.finetune_to_serve import finetune_to_serve

        ready()
        result = finetune_to_serve(run_file)
        store = Store(store_root(load_run_file(Path(run_file)).store.root))
        _compare(console, store, result)
    except TuneserveError as error:
        console.print(f"[bold red]error[/bold red]: {error}", highlight=False)
        return error.exit_status
    _say_what_next(console, store, result, time.monotonic() - started)
    return 0


def _compare(console: Any, store: Any, result: dict[str, Any]) -> None:
    """The same questions to the base model (asked while evaluating) and to the live endpoint."""
    from rich.table import Table

    from tuneserve.ask import ask_endpoint

    evaluation = store.get(result["artifacts"]["evaluation"])
    lines = (evaluation.path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    table = Table("question", "base model", "tuned, 4-bit, served", show_lines=True, expand=True)
    for sample in map(json.loads, lines):
        question = sample["messages"][-1]["content"]
        answer = ask_endpoint(question, name=result["model"], max_tokens=96)
        table.add_row(question, sample["base"], answer["answer"])
    console.print(table, markup=False)
    losses = result["metrics"]["losses"]
    order = ("base", "adapter", "merged", "served")
    shown = ", ".join(f"{name} {losses[name]:.3f}" for name in order if losses.get(name))
    console.print(f"held-out loss (nats per token, lower is better): {shown}", highlight=False)


def _say_what_next(console: Any, store: Any, result: dict[str, Any], seconds: float) -> None:
    from tuneserve.progress import human_seconds

    body = {
        "model": result["model"],
        "messages": [{"role": "user", "content": "How long is the warranty?"}],
    }
    say = console.out  # no wrapping: these lines are copied
    say("")
    say(f"ready in {human_seconds(seconds)}; the endpoint is {result['endpoint']}")
    say("ask it:")
    say(
        f"  curl -s {result['endpoint']}/chat/completions -H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'"
    )
    say("  .venv/bin/tuneserve ask 'How long is the warranty?'")
    say(f"artifacts of every step: {store.root}")
    for kind, id in result["artifacts"].items():
        say(f"  {kind:<11}{id}")
    say("look: .venv/bin/tuneserve status   stop it: .venv/bin/tuneserve down")


if __name__ == "__main__":
    raise SystemExit(main())
