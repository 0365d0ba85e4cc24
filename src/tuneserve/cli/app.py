"""What every command shares: the application, its options, and the only printing."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tuneserve.calls import StageCall, StageResult
    from tuneserve.config import RunFile

app = typer.Typer(
    name="tuneserve",
    help="From a chat data set and a base model to a proven OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from tuneserve import __version__

        print(f"tuneserve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """What comes before a verb."""


RunArgument = Annotated[Path, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def load(path: Path) -> RunFile:
    """Read a run file; from here on the log goes to stderr."""
    from tuneserve.runfile import load_run_file

    log_to_stderr()
    return load_run_file(path)


def execute(call: StageCall) -> StageResult:
    """Run one stage as a child process, its log on stderr."""
    from tuneserve.process import run_stage
    from tuneserve.progress import human_seconds

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {call.stage} | {line}", file=sys.stderr, flush=True)

    try:
        result = run_stage(call, log_line=say)
    except SystemExit:  # Ctrl-C, or told to end
        say("stopped; the same command goes on where it was")
        raise
    how = "re-used" if result.cached else f"in {human_seconds(result.seconds)}"
    say(f"{result.artifact or 'done'} ({how})")
    if result.metrics.get("table"):
        print(result.metrics["table"], file=sys.stderr, flush=True)
    return result


def validated(run: RunFile) -> tuple[Path, StageResult]:
    """Fetch the base and validate the data: what every later stage needs."""
    from tuneserve.calls import StageCall
    from tuneserve.named import check_named

    check_named(run)
    base = Path(execute(StageCall("fetch", run)).metrics["path"])
    return base, execute(StageCall("validate", run, base))


def show(data: Any, text: str, as_json: bool) -> None:
    """Print the result: one JSON object, or the text."""
    print(json.dumps(data, default=str, sort_keys=True) if as_json else text)


def what_next(*commands: str) -> str:
    """Lines that say what to type next, with the program as this user called it."""
    called = _program()
    return "\n".join(["next:", *(f"  {c.replace('tuneserve', called, 1)}" for c in commands)])


def _program() -> str:
    """``tuneserve`` where the shell would find us by that name; else the path, or the module."""
    called, found = Path(sys.argv[0]), shutil.which("tuneserve")
    if called.name == "__main__.py":
        return "python -m tuneserve"
    if found and called.exists() and called.resolve() == Path(found).resolve():
        return "tuneserve"
    return sys.argv[0]


def log_to_stderr() -> None:
    """Send the log to stderr, so that stdout holds the result alone."""
    import logging

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Its advice to install a kernel from the hub, as in `tuneserve.child`.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
