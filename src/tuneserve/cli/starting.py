"""The first command: from a data file to a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuneserve.cli.app import JsonOption, app, log_to_stderr, show, what_next


@app.command(
    short_help="Write a run file that fits your data and your card.",
    epilog="Example: tuneserve init chats.jsonl --gpu-memory 24GiB",
)
def init(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders or globs with conversations; none: an example is written.",
            metavar="DATA",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Run file to write.")] = Path("run.yaml"),
    base: Annotated[
        str | None,
        typer.Option(help="Hub id, folder or builtin:smollm2-135m; unset: one that fits."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="For a card of this size, e.g. 24GiB; no GPU needed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Look at your data and your card, and write a run file that fits both."""
    from tuneserve.init import init_run
    from tuneserve.sizes import parse_card

    try:
        gpu_bytes = None if gpu_memory is None else parse_card(gpu_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu-memory") from error
    log_to_stderr()
    made = init_run(data or [], out, base=base, gpu_memory_bytes=gpu_bytes, force=force)
    text = f"{made.text()}\n{what_next(*made.next_commands)}"
    show(made.to_json(), text, as_json)
