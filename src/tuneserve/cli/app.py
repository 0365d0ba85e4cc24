"""What every command shares: the application, its options, and the only printing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from tuneserve.calls import StageCall, StageResult
    from tuneserve.config import RunFile
    from tuneserve.errors import TuneserveError

app = typer.Typer(
    name="tuneserve",
    help="From a chat data set and a base model to a proven OpenAI-compatible endpoint.",
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


# What a command line that we do not take raises. typer carries a click of its own.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
# What `tuneserve init` writes unless told otherwise.
USUAL_RUN_FILE = Path("run.yaml")
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        help=f"The run file (YAML); none: {USUAL_RUN_FILE} of this folder.", metavar="RUN.yaml"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def named_or_usual(path: Path | None, verb: str) -> Path:
    """The run file that was named, else the one that `tuneserve init` writes into this folder.

    Raises:
        RunFileError: None was named and there is none of that name; it lists those that are there.
    """
    from tuneserve.errors import RunFileError

    if path is not None:
        return path
    if USUAL_RUN_FILE.is_file():
        print(f"using {USUAL_RUN_FILE}", file=sys.stderr)
        return USUAL_RUN_FILE
    here = sorted(str(p) for p in (*Path().glob("*.yaml"), *Path().glob("*.yml")))
    name = here[0] if len(here) == 1 else "RUN.yaml"
    raise RunFileError(
        f"no run file was named, and this folder has no {USUAL_RUN_FILE}"
        + (f" but {', '.join(here[:8])}" if here else ""),
        expected=f"tuneserve {verb} {name}",
        hint="name it" if here else "`tuneserve init DATA` looks at your data and writes one",
    )


def load(path: Path) -> RunFile:
    """Read a run file; from here on the log goes to stderr."""
    from tuneserve.runfile import load_run_file

    log_to_stderr()
    return load_run_file(path)


def wrong_usage(error: Exception) -> TuneserveError:
    """A command line that we do not take, as an error like all others."""
    from tuneserve.errors import InputError

    assert isinstance(error, UsageError)
    context = error.ctx  # type: ignore[attr-defined]
    problem = error.format_message()  # type: ignore[attr-defined]
    if isinstance(error.__cause__, ValueError) and hasattr(error.__cause__, "errors"):
        problem = _wrong_value(problem, error.__cause__)
    usage = " ".join(context.get_usage().removeprefix("Usage:").split()) if context else ""
    example = (context.command.epilog or "").removeprefix("Example: ") if context else ""
    called = context.command_path if context else "tuneserve"
    more = f"`{called} --help` says more"
    return InputError(
        f"{called}: {problem}",
        expected=usage,
        hint=f"for example `{example}`; {more}" if example else more,
    )


def _wrong_value(problem: str, cause: Any) -> str:
    """What typer says of an option's value, in the words that a run file's fields have."""
    from tuneserve.wrongfields import in_words

    (item, *_) = cause.errors()
    bounds = [f"{sign} {item['ctx'][of]}" for of, sign in _BOUNDS if of in item.get("ctx", {})]
    expected = f"; expected {bounds[0]}" if bounds else ""
    return f"{problem.partition(':')[0]}: {in_words(item).rstrip('.')}{expected}"


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
    try:
        print(json.dumps(data, default=str, sort_keys=True) if as_json else text, flush=True)
    except BrokenPipeError:  # here, since typer would make status 1 of it, which is our bug's
        close_pipe()


def close_pipe() -> NoReturn:
    """End as a program that the signal of a closed pipe ended, as `head` closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


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
