"""The pipeline and its single stages."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tuneserve.cli.app import (
    JsonOption,
    RunArgument,
    app,
    execute,
    load,
    log_to_stderr,
    named_or_usual,
    show,
    validated,
    what_next,
)

if TYPE_CHECKING:
    from tuneserve.config import RunFile

log = logging.getLogger(__name__)


@app.command(
    short_help="Check every row of the data, with file, line and column.",
    epilog="Example: tuneserve validate deploy/runs/demo.yaml",
)
def validate(run_file: RunArgument = None, as_json: JsonOption = False) -> None:
    """Check the data: every row that would hurt a GPU is named with file, line and column."""
    path = named_or_usual(run_file, "validate")
    run = load(path)
    result = validated(run)[1]
    metrics = result.metrics
    _warn_of_refusal(run, metrics)
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
        *(f"  warning {code}: {n}" for code, n in sorted(metrics.get("warnings", {}).items())),
        f"report: {folder / 'report.md'}",
        what_next(f"tuneserve plan {shlex.quote(str(path))}"),
    ]
    show(data, "\n".join(lines), as_json)


def _warn_of_refusal(run: RunFile, metrics: dict[str, Any]) -> None:
    """Say what a run will be refused for although its rows are fine."""
    from tuneserve.errors import RunFileError
    from tuneserve.ladder import check_held_out

    try:
        check_held_out(run, metrics.get("eval_conversations", metrics.get("eval_rows")))
    except RunFileError as error:
        log.warning("the run would be refused: %s; %s", error.message, error.hint)


@app.command(
    short_help="Predict memory, disk and time before anything runs.",
    epilog="Example: tuneserve plan RUN.yaml --gpu-memory 24GiB",
)
def plan(
    run_file: RunArgument = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Plan for a card of this size, e.g. 24GiB; no GPU needed.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit to the trainings that ended on this machine.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict peak memory, disk and the micro-batch of every stage, before anything runs."""
    from tuneserve.plan import plan_run
    from tuneserve.sizes import parse_card

    if calibrate:
        from tuneserve.plan.calibrate import calibrate as fit_here

        fitted = fit_here()
        before, after = (f"{fitted[when]['mape']:.1%}" for when in ("before", "after"))
        text = f"{fitted['points']} trainings: mean error {before} before, {after} now"
        show(fitted, text, as_json)
        return
    path = named_or_usual(run_file, "plan")
    try:
        gpu_bytes = None if gpu_memory is None else parse_card(gpu_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu-memory") from error
    found = plan_run(load(path), gpu_memory_bytes=gpu_bytes)
    text = found["table"]
    if found["fits"] and not found.get("refused_for"):
        text += "\n" + what_next(f"tuneserve run {shlex.quote(str(path))}")
    show({k: v for k, v in found.items() if k != "table"}, text, as_json)
    if not found["fits"]:
        raise SystemExit(3)


@app.command(
    short_help="Train the adapter, after fetch, validate and plan.",
    epilog="Example: tuneserve train RUN.yaml",
)
def train(run_file: RunArgument = None, as_json: JsonOption = False) -> None:
    """Train the adapter: fetch, validate and plan first; a finished adapter is re-used."""
    from tuneserve.calls import StageCall
    from tuneserve.named import check_named
    from tuneserve.runlock import hold
    from tuneserve.runs import now

    run = load(named_or_usual(run_file, "train"))
    check_named(run)  # before others are waited for
    with hold(run, "tuneserve train", now()):
        base, dataset = validated(run)
        inputs = {"dataset": dataset.artifact or ""}
        planned = execute(StageCall("plan", run, base, inputs, hints={"serves": False}))
        hints = planned.metrics["hints"]["train"]
        result = execute(StageCall("train", run, base, inputs, hints=hints))
    show(result.to_json(), f"adapter: {result.path}", as_json)


@app.command(
    short_help="The whole way, from the data to the endpoint.",
    epilog="Example: tuneserve run deploy/runs/demo.yaml",
)
def run(
    run_file: RunArgument = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run also when nothing changed since the last time.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """The whole way: validate, plan, train, merge, evaluate, quantize, prove and serve."""
    from tuneserve.retrain import retrain

    result = retrain(load(named_or_usual(run_file, "run")), execute, force=force)
    lines = [f"{kind}: {id}" for kind, id in result.artifacts.items()]
    if result.outcome != "unchanged":  # then the note says what serves: it may be another one
        lines.append(f"release: {result.release}")
    lines += [f"endpoint: {result.endpoint}", f"model: {result.model}"]
    if result.note:
        lines.append(result.note)
    named = f" --name {shlex.quote(result.model)}"
    lines.append(what_next(f"tuneserve ask{named} 'Hello'", "tuneserve status", "tuneserve down"))
    show(result.to_json(), "\n".join(lines), as_json)


@app.command(
    short_help="Merge a LoRA adapter into its base, in bounded memory.",
    epilog="Example: tuneserve merge --base base/ --adapter adapter/ --out merged/",
)
def merge(
    base: Annotated[Path | None, typer.Option(help="Folder of the base model.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of the PEFT adapter.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make.")] = None,
    base_weights: Annotated[
        Literal["original", "nf4"],
        typer.Option(help="original, or nf4: the dequantized weights that training saw."),
    ] = "original",
    max_memory: Annotated[
        str | None,
        typer.Option(help="Memory to stay under; 700MiB, with --in-memory what is free."),
    ] = None,
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="Merge with PEFT: whole model in memory.")
    ] = False,
    tokenizer_from: Annotated[
        Path | None, typer.Option(help="Folder whose tokenizer is taken, not the adapter's.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Only check a merged folder against its proof.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Merge a LoRA adapter into its base, shard by shard, in bounded memory."""
    if verify is not None:
        from tuneserve.merge.proof import verify as verify_folder

        checked = verify_folder(verify)
        text = f"{verify}: {checked['files']} files, {checked['bytes']} bytes as the proof says"
        show({**checked, "path": str(verify)}, text, as_json)
        return
    if base is None or adapter is None or out is None:
        raise typer.BadParameter("give --base, --adapter and --out, or --verify alone")
    from tuneserve.merge import merge_adapter
    from tuneserve.sizes import parse_size

    if base_weights not in ("original", "nf4"):
        raise typer.BadParameter(
            f"{base_weights!r}; use original or nf4", param_hint="--base-weights"
        )
    try:
        limit = parse_size(max_memory or "700MiB")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-memory") from error
    log_to_stderr()
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on stdout when PEFT loads them
        result = merge_adapter(
            base,
            adapter,
            out,
            base_weights=base_weights,
            max_memory_bytes=None if in_memory and max_memory is None else limit,
            tokenizer_from=tokenizer_from,
            in_memory=in_memory,
        ).to_json()
    text = (
        f"{out}: {result['merged']} tensors merged, {result['copied']} copied, "
        f"{result['bytes_written'] / 1e9:.2f} GB in {result['seconds']:.1f} s, "
        f"peak {result['peak_rss_bytes'] / 2**20:.0f} MiB"
    )
    show(result, text, as_json)


@app.command(
    short_help="Export a 4-bit model that vLLM serves.",
    epilog="Example: tuneserve quantize --model merged/ --calibration dataset-1f0c --out q/",
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
    from tuneserve.config import QuantizeSection
    from tuneserve.lineage import open_artifact
    from tuneserve.places import store_root
    from tuneserve.quantize import quantize_model
    from tuneserve.runfile import make_section

    log_to_stderr()
    folder = open_artifact(Store(store_root()), calibration).path
    section = make_section(QuantizeSection, "tuneserve quantize", group_size=group_size)
    result = quantize_model(model, method, folder, out, section).to_json()
    show(result, f"{out}: {method}, {result['bytes'] / 1e6:.0f} MB", as_json)


@app.command(hidden=True)
def stage(name: str, request: Path, result: Path) -> None:
    """The inside of a stage's child process."""
    from tuneserve.child import run_request

    raise SystemExit(run_request(name, request, result))
