"""The endpoint: release, switch, look, stop."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tuneserve.cli.app import (
    JsonOption,
    app,
    log_to_stderr,
    show,
)

KeepWarmOption = Annotated[
    bool,
    typer.Option("--keep-warm", help="Keep the one that served running: back again is instant."),
]


@app.command(epilog="Example: tuneserve release merged/ --name support")
def release(
    model: Annotated[Path, typer.Argument(help="Folder of a model.", metavar="MODEL_DIR")],
    name: Annotated[str, typer.Option(help="Served name.")] = "default",
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the gateway.")] = 8080,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the API key.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a model folder: start it, prove it, switch to it."""
    from tuneserve.config import ServeSection
    from tuneserve.release.control import release_model_dir
    from tuneserve.runfile import make_section

    log_to_stderr()
    serve = make_section(
        ServeSection, "tuneserve release", name=name, host=host, port=port, api_key_env=api_key_env
    )
    found = release_model_dir(model, serve=serve)
    show(found, f"endpoint: {found['endpoint']}\nmodel: {found['model']}", as_json)


@app.command(epilog="Example: tuneserve ask 'How long is the warranty?'")
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.", metavar="QUESTION")],
    name: Annotated[str | None, typer.Option(help="Served name; unset: the default one.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    as_json: JsonOption = False,
) -> None:
    """Ask the endpoint one question with the official OpenAI client."""
    from tuneserve.ask import ask_endpoint

    answer = ask_endpoint(question, name=name, max_tokens=max_tokens)
    show(answer, answer["answer"], as_json)
    if answer["finish_reason"] == "length":
        ours = answer["tokens"] == max_tokens
        whose = "--max-tokens" if ours else "serve.max_tokens or serve.max_model_len"
        sys.stderr.write(f"(cut after {answer['tokens']} tokens: {whose} allows no more)\n")


@app.command(epilog="Example: tuneserve status")
def status(as_json: JsonOption = False) -> None:
    """What is serving: releases, health, memory, since when."""
    from tuneserve.release.control import status as get_status
    from tuneserve.release.status_text import status_text

    found = get_status()
    show(found, status_text(found), as_json)


@app.command(
    short_help="Start what was serving, after `down` or a restart.",
    epilog="Example: tuneserve up",
)
def up(as_json: JsonOption = False) -> None:
    """Start what was serving, after `down` or a restart of the machine."""
    from tuneserve.release import control
    from tuneserve.release.status_text import status_text

    log_to_stderr()
    found = control.up()
    show(found, status_text(found), as_json)


@app.command(
    short_help="Keep the servers up in the foreground, for containers.",
    epilog="Example: tuneserve keep",
)
def keep() -> None:
    """Keep the servers up in the foreground, for containers and service managers."""
    from tuneserve.release.keep import keep as keep_servers

    log_to_stderr()
    keep_servers()


@app.command(epilog="Example: tuneserve promote r0003")
def promote(
    release_id: Annotated[str, typer.Argument(help="Release id.", metavar="RELEASE")],
    keep_warm: KeepWarmOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a release that was proven before the one that serves."""
    from tuneserve.release import control

    log_to_stderr()
    found = control.promote_release(release_id, keep_warm=keep_warm)
    show(found, f"{found['release']} serves now", as_json)


@app.command(epilog="Example: tuneserve rollback --name support")
def rollback(
    name: Annotated[str | None, typer.Option(help="Served name; unset: the default one.")] = None,
    keep_warm: KeepWarmOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go back to the release that served before."""
    from tuneserve.release import control

    log_to_stderr()
    found = control.rollback(name, keep_warm=keep_warm)
    show(found, f"{found['release']} serves now", as_json)


@app.command(epilog="Example: tuneserve down")
def down(
    name: Annotated[str | None, typer.Option(help="Served name; unset: all of them.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop serving: running answers finish first."""
    from tuneserve.release import control

    log_to_stderr()
    found = control.down(name)
    show(found, "ended: " + (", ".join(found["ended"]) or "nothing was serving"), as_json)


def _why_empty(path: Path) -> str:
    said = f"{path} is empty: the last time it said nothing, as when a result is re-used"
    before = path.with_suffix(".log.1")
    if before.is_file() and before.stat().st_size:
        return f"{said}; the time before is in {before}"
    return f"{said}; `tuneserve runs` shows how runs ended"


@app.command(epilog="Example: tuneserve logs support --follow")
def logs(
    which: Annotated[
        str | None,
        typer.Argument(
            help="Served name, release id, stage, gateway, access or keeper.", metavar="LOG"
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing.")] = False,
    lines: Annotated[int, typer.Option(min=1, help="Lines from the end.")] = 40,
) -> None:
    """Show the log of a server, or of a stage's latest run."""
    from tuneserve.errors import InputError
    from tuneserve.release import control

    files = control.log_files(which)
    for path in files if not follow else []:
        if not path.exists():
            raise InputError(
                f"{path} is not there: nothing wrote it yet",
                expected="a log of something that ran with this TUNESERVE_HOME",
                hint="`tuneserve status` shows what serves, `tuneserve runs` what ran",
            )
        if not path.stat().st_size:
            sys.stderr.write(f"{_why_empty(path)}\n")
    names = [str(path) for path in files]
    sys.stderr.flush()
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), *names])


@app.command(epilog="Example: tuneserve keys add my-application")
def keys(
    action: Annotated[str, typer.Argument(help="list, add or revoke.", metavar="ACTION")] = "list",
    name: Annotated[str, typer.Argument(help="Name of the key.", metavar="NAME")] = "",
    as_json: JsonOption = False,
) -> None:
    """API keys of the endpoint: named, several, revocable."""
    from tuneserve.release import control

    if action not in ("list", "add", "revoke") or (action != "list" and not name):
        raise typer.BadParameter("use `keys list`, `keys add NAME` or `keys revoke NAME`")
    if action == "add":
        key = control.add_key(name)
        text = f"{key}\n(shown this once; send it as a Bearer token)"
        if not control.asks_for_keys():
            text += (
                "\n(the endpoint takes requests without a key until the next release; "
                "`tuneserve run RUN.yaml --force` makes one)"
            )
        show({"name": name, "key": key}, text, as_json)
        return
    if action == "revoke":
        control.revoke_key(name)
    found = control.key_names()
    shut = not found and control.asks_for_keys()
    none = "no keys" + (": nobody gets in until `tuneserve keys add NAME`" if shut else "")
    if action == "revoke":
        text = f"revoked {name}" + (f"; {none}" if shut else "")
        show({"revoked": name, "keys": found}, text, as_json)
        return
    show({"keys": found}, "\n".join(found) or none, as_json)
