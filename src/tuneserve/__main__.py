"""The command line, and the only place that prints or exits.

Heavy imports happen inside commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tuneserve.errors import TuneserveError

if TYPE_CHECKING:
    from tuneserve.config import RunFile
    from tuneserve.process import StageCall, StageResult

app = typer.Typer(
    name="tuneserve",
    help="From a chat data set and a base model to a proven OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunArgument = Annotated[Path, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command(epilog="Example: tuneserve validate deploy/runs/demo.yaml")
def validate(run_file: RunArgument, as_json: JsonOption = False) -> None:
    """Check the data: every row that would hurt a GPU is named with file, line and column."""
    run = _load(run_file)
    result = _validated(run)[1]
    metrics = result.metrics
    folder = Path(result.path or "")
    data = {
        **metrics,
        "artifact": result.artifact,
        "path": result.path,
        "tokenizer": str(folder / "tokenizer"),
        "cached": result.cached,
    }
    lines = [
        f"rows read {metrics['rows_read']}, kept {metrics['rows_kept']}, "
        f"rejected {metrics['rows_rejected']}",
        *(f"  {code}: {count}" for code, count in sorted(metrics["reasons"].items())),
        f"report: {folder / 'report.md'}",
    ]
    _show(data, "\n".join(lines), as_json)


@app.command(epilog="Example: tuneserve plan RUN.yaml --gpu-memory 24GiB")
def plan(
    run_file: RunArgument,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Plan for a card of this size, e.g. 24GiB; no GPU needed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict peak memory, disk and the micro-batch of every stage, before anything runs."""
    from tuneserve.config import parse_size
    from tuneserve.plan import plan_run

    try:
        gpu_bytes = parse_size(gpu_memory) if gpu_memory else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu-memory") from error
    found = plan_run(_load(run_file), gpu_memory_bytes=gpu_bytes)
    _show({k: v for k, v in found.items() if k != "table"}, found["table"], as_json)
    if not found["fits"]:
        raise SystemExit(3)


@app.command(epilog="Example: tuneserve train RUN.yaml")
def train(run_file: RunArgument, as_json: JsonOption = False) -> None:
    """Train the adapter: fetch, validate and plan first; a finished adapter is re-used."""
    from tuneserve.process import StageCall

    run = _load(run_file)
    base, dataset = _validated(run)
    inputs = {"dataset": dataset.artifact or ""}
    hints = _execute(StageCall("plan", run, base, inputs)).metrics["hints"]["train"]
    result = _execute(StageCall("train", run, base, inputs, hints=hints))
    _show(result.to_json(), f"adapter: {result.path}", as_json)


@app.command(epilog="Example: tuneserve run deploy/runs/demo.yaml")
def run(run_file: RunArgument, as_json: JsonOption = False) -> None:
    """The whole way: validate, plan, train, merge, evaluate, quantize, prove and serve."""
    from tuneserve.pipeline import finetune_to_serve

    result = finetune_to_serve(_load(run_file), _execute)
    lines = [f"{kind}: {id}" for kind, id in result.artifacts.items()]
    lines += [f"endpoint: {result.endpoint}", f"model: {result.model}"]
    _show(result.to_json(), "\n".join(lines), as_json)


@app.command(epilog="Example: tuneserve merge --base base/ --adapter adapter/ --out merged/")
def merge(
    base: Annotated[Path, typer.Option(help="Folder of the base model.")],
    adapter: Annotated[Path, typer.Option(help="Folder of the PEFT adapter.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    base_weights: Annotated[
        Literal["original", "nf4"],
        typer.Option(help="original, or nf4: the dequantized weights that training saw."),
    ] = "original",
    max_memory: Annotated[str, typer.Option(help="Memory to stay under, e.g. 700MiB.")] = "700MiB",
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="Merge with PEFT: whole model in memory.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge a LoRA adapter into its base, shard by shard, in bounded memory."""
    from tuneserve.config import parse_size
    from tuneserve.merge import merge_adapter

    if base_weights not in ("original", "nf4"):
        raise typer.BadParameter(
            f"{base_weights!r}; use original or nf4", param_hint="--base-weights"
        )
    try:
        limit = parse_size(max_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-memory") from error
    _log_to_stderr()
    result = merge_adapter(
        base, adapter, out, base_weights=base_weights, max_memory_bytes=limit, in_memory=in_memory
    ).to_json()
    text = (
        f"{out}: {result['merged']} tensors merged, {result['copied']} copied, "
        f"{result['bytes_written'] / 1e9:.2f} GB in {result['seconds']:.1f} s, "
        f"peak {result['peak_rss_bytes'] / 2**20:.0f} MiB"
    )
    _show(result, text, as_json)


@app.command(
    epilog="Example: tuneserve quantize --model merged/ --calibration dataset-1f0c --out q/"
)
def quantize(
    model: Annotated[Path, typer.Option(help="Folder of the 16-bit model.")],
    calibration: Annotated[str, typer.Option(help="Dataset artifact: its id or its folder.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    method: Annotated[Literal["gptq", "awq"], typer.Option(help="Format.")] = "gptq",
    group_size: Annotated[int, typer.Option(help="Weights per scale: 32, 64, 128 or -1.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Export a 4-bit model that vLLM serves, calibrated on the training rows."""
    from tuneserve.artifacts import Store
    from tuneserve.config import QuantizeSection, make_section
    from tuneserve.lineage import open_artifact
    from tuneserve.places import store_root
    from tuneserve.quantize import quantize_model

    _log_to_stderr()
    folder = open_artifact(Store(store_root()), calibration).path
    section = make_section(QuantizeSection, "tuneserve quantize", group_size=group_size)
    result = quantize_model(model, method, folder, out, section).to_json()
    _show(result, f"{out}: {method}, {result['bytes'] / 1e6:.0f} MB", as_json)


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
    from tuneserve.config import ServeSection, make_section
    from tuneserve.release.control import release_model_dir

    _log_to_stderr()
    serve = make_section(
        ServeSection, "tuneserve release", name=name, host=host, port=port, api_key_env=api_key_env
    )
    found = release_model_dir(model, serve=serve)
    _show(found, f"endpoint: {found['endpoint']}\nmodel: {found['model']}", as_json)


@app.command(epilog="Example: tuneserve ask 'How long is the warranty?'")
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    name: Annotated[str | None, typer.Option(help="Served name; unset: the only one.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    as_json: JsonOption = False,
) -> None:
    """Ask the endpoint one question with the official OpenAI client."""
    from tuneserve.ask import ask_endpoint

    answer = ask_endpoint(question, name=name, max_tokens=max_tokens)
    _show(answer, answer["answer"], as_json)


@app.command(epilog="Example: tuneserve status")
def status(as_json: JsonOption = False) -> None:
    """What is serving: releases, health, memory, since when."""
    from tuneserve.release.control import status as get_status
    from tuneserve.release.status_text import status_text

    found = get_status()
    _show(found, status_text(found), as_json)


@app.command(epilog="Example: tuneserve up")
def up(as_json: JsonOption = False) -> None:
    """Start what was serving, after `down` or a restart of the machine."""
    from tuneserve.release import control
    from tuneserve.release.status_text import status_text

    _log_to_stderr()
    found = control.up()
    _show(found, status_text(found), as_json)


@app.command(epilog="Example: tuneserve promote support-3")
def promote(
    release_id: Annotated[str, typer.Argument(help="Release id.", metavar="RELEASE")],
    as_json: JsonOption = False,
) -> None:
    """Make a release that was proven before the one that serves."""
    from tuneserve.release import control

    _log_to_stderr()
    found = control.promote_release(release_id)
    _show(found, f"{found['release']} serves now", as_json)


@app.command(epilog="Example: tuneserve rollback --name support")
def rollback(
    name: Annotated[str | None, typer.Option(help="Served name; unset: the default one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to the release that served before."""
    from tuneserve.release import control

    _log_to_stderr()
    found = control.rollback(name)
    _show(found, f"{found['release']} serves now", as_json)


@app.command(epilog="Example: tuneserve down")
def down(
    name: Annotated[str | None, typer.Option(help="Served name; unset: all of them.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop serving: running answers finish first."""
    from tuneserve.release import control

    _log_to_stderr()
    found = control.down(name)
    _show(found, "ended: " + (", ".join(found["ended"]) or "nothing was serving"), as_json)


@app.command(epilog="Example: tuneserve logs support --follow")
def logs(
    which: Annotated[
        str | None,
        typer.Argument(help="Served name, release id, gateway, access or keeper."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing.")] = False,
    lines: Annotated[int, typer.Option(help="Lines from the end.")] = 40,
) -> None:
    """Show the log of a server."""
    from tuneserve.release import control

    files = [str(path) for path in control.log_files(which)]
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), *files])


@app.command(epilog="Example: tuneserve keys add my-application")
def keys(
    action: Annotated[str, typer.Argument(help="list, add or revoke.")] = "list",
    name: Annotated[str, typer.Argument(help="Name of the key.")] = "",
    as_json: JsonOption = False,
) -> None:
    """API keys of the endpoint: named, several, revocable."""
    from tuneserve.release import control

    if action not in ("list", "add", "revoke") or (action != "list" and not name):
        raise typer.BadParameter("use `keys list`, `keys add NAME` or `keys revoke NAME`")
    if action == "add":
        key = control.add_key(name)
        _show(
            {"name": name, "key": key},
            f"{key}\n(shown this once; send it as a Bearer token)",
            as_json,
        )
        return
    if action == "revoke":
        control.revoke_key(name)
    found = control.key_names()
    _show({"keys": found}, "\n".join(found) or "no keys", as_json)


@app.command(epilog="Example: tuneserve lineage adapter-1f0c")
def lineage(
    artifact: Annotated[str, typer.Argument(help="Id, its beginning, or the folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """From an artifact back to every input file, setting, version and metric."""
    from tuneserve.artifacts import Store
    from tuneserve.lineage import lineage_text, trace
    from tuneserve.places import store_root

    found = trace(Store(store_root()), artifact, verify=verify)
    _show(found, lineage_text(found), as_json)


@app.command(epilog="Example: tuneserve doctor")
def doctor(
    port: Annotated[int, typer.Option(help="Port the gateway would use.")] = 8080,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine: Python, compiler, torch, GPU, disk, ports, versions."""
    from tuneserve.doctor import checkup

    findings = checkup(port=port)
    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.state]}  {finding.name}: {finding.found}")
        if finding.state != "ok" and finding.what_to_do:
            lines.append(f"      what to do: {finding.what_to_do}")
    _show({"findings": [vars(f) for f in findings]}, "\n".join(lines), as_json)
    if any(f.state == "fail" for f in findings):
        raise SystemExit(3)


@app.command(hidden=True)
def stage(name: str, request: Path, result: Path) -> None:
    """The inside of a stage's child process."""
    from tuneserve.child import run_request

    raise SystemExit(run_request(name, request, result))


def main() -> None:
    """Run a command; every error a user can mend becomes a message and an exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so `finally` runs
    try:
        app(standalone_mode=True)
    except TuneserveError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.to_json()}))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except BrokenPipeError:  # `tuneserve status | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _load(path: Path) -> RunFile:
    from tuneserve.config import load_run_file

    _log_to_stderr()
    return load_run_file(path)


def _execute(call: StageCall) -> StageResult:
    from tuneserve.process import run_stage
    from tuneserve.progress import human_seconds

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {call.stage} | {line}", file=sys.stderr, flush=True)

    result = run_stage(call, log_line=say)
    how = "re-used" if result.cached else f"in {human_seconds(result.seconds)}"
    say(f"{result.artifact or 'done'} ({how})")
    if result.metrics.get("table"):
        print(result.metrics["table"], file=sys.stderr, flush=True)
    return result


def _validated(run: RunFile) -> tuple[Path, StageResult]:
    from tuneserve.process import StageCall

    base = Path(_execute(StageCall("fetch", run)).metrics["path"])
    return base, _execute(StageCall("validate", run, base))


def _show(data: Any, text: str, as_json: bool) -> None:
    print(json.dumps(data, default=str, sort_keys=True) if as_json else text)


def _log_to_stderr() -> None:
    import logging

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
