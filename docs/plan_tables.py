"""The plan's table of the stages after training: predicted beside measured, from recorded JSON.

What was not recorded is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from walkthrough_tables import H200_BYTES, RUNS, gib, laps_of, planned, served, shortened

from tuneserve.config import RunFile
from tuneserve.plan.build import Plan
from tuneserve.plan.constants import Constants
from tuneserve.plan.later import evaluate_peak, quantize_peak
from tuneserve.plan.speed import rate
from tuneserve.plan.times import (
    about,
    copying_seconds,
    evaluate_seconds,
    quantize_seconds,
    serve_seconds,
)
from tuneserve.runfile import load_run_file

HERE = Path(__file__).parent
RESULTS = HERE.parent / "bench" / "results"
Row = tuple[str, str, str, str, str, str]


def stages() -> str:
    """Memory without the CUDA context, as torch reserves it; seconds of the whole stage."""
    plan = planned(RUNS / "gpu-24gb.yaml", 140)
    run = load_run_file(RUNS / "gpu-24gb.yaml")
    rows = [*_merges(), *_evaluations(plan), *_exports(plan, run), *_servers(plan, run)]
    rows += _whole_run()
    lines = [
        "| stage | memory, planned | measured | time, planned | measured | source |",
        "|---|---|---|---|---|---|",
    ]
    for *cells, source in rows:
        lines.append(f"| {' | '.join(cells)} | [{source}](../bench/results/{source}) |")
    return "\n".join(lines) + "\n"


PLAN_BLOCKS = {"stages": stages}


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _merges() -> Iterator[Row]:
    for name, where in (
        ("merge_h200_host.json", "the H200's host"),
        ("merge.json", "2 cores"),
        ("merge_fast_disk.json", "2 cores, a faster disk"),
    ):
        found = _read(name)
        if found is None:
            continue
        size = found["checkpoint_bytes"]
        cold = found.get("runs", {}).get("one_file_cold", found)
        yield (
            f"merge of {size / 1e9:.1f} GB, {where}",
            "at most 700 MiB of RAM",
            f"{cold['peak_rss_bytes'] / 2**20:.0f} MiB",
            about(copying_seconds(size)),
            f"{cold['merge_seconds']:.0f} s",
            name,
        )


def _evaluations(plan: Plan) -> Iterator[Row]:
    """A record is one evaluation of the 7B shape: `rows` of `row_tokens` tokens, `peak_gpu_bytes`,
    and `seconds` of the whole stage or `laps_seconds` of its parts."""
    name = "evaluate_h200.json"
    found = _read(name)
    if found is None:
        return
    rows, length = found.get("rows", 16), found.get("row_tokens", 2048)
    step = replace(plan.step, length=length)
    planned_bytes = evaluate_peak(plan.arch, step).total_bytes - Constants().cuda_context_bytes
    seconds = evaluate_seconds(plan.arch, step, rate(step, "H200"), rows * length)
    took = found.get("seconds") or sum(found.get("laps_seconds", {}).values())
    peak = found.get("peak_gpu_bytes")
    yield (
        f"evaluate a 7B, {rows} x {length} tokens",
        gib(planned_bytes),
        gib(peak) if peak else "-",
        about(seconds or 0),
        f"{took:.0f} s" if took else "-",
        name,
    )


def _exports(plan: Plan, run: RunFile) -> Iterator[Row]:
    """Records of `bench/bench_quantize.py`: one, or several under `runs`."""
    for name in ("quantize_h200_gptq.json", "quantize_h200.json"):
        found = _read(name)
        for record in (found or {}).get("runs", [found] if found else []):
            if "ours" not in record["peaks"]:
                continue
            layers = record["layers"]
            arch = shortened("Qwen2.5-7B-Instruct", layers)
            section = run.quantize.model_copy(
                update={
                    "methods": [record["method"]],
                    "calibration_rows": record["rows"],
                    "calibration_max_tokens": record["max_tokens"],
                }
            )
            asked = run.model_copy(update={"quantize": section})
            planned_bytes = quantize_peak(arch, asked, gpu=True, room_bytes=H200_BYTES).total_bytes
            ours = record["peaks"]["ours"]
            seconds = quantize_seconds(
                asked, arch, plan.step, rate(plan.step, "H200"), record["max_tokens"]
            )
            how = f"{record['method'].upper()} of {layers} layers of a 7B"
            yield (
                f"{how}, {record['rows']} x {record['max_tokens']} tokens",
                gib(planned_bytes - Constants().cuda_context_bytes),
                gib(ours["peak_gpu_bytes"]),
                about(seconds) if seconds else "-",
                f"{sum(laps_of(ours['laps']).values()):.0f} s",
                name,
            )


def _whole_run() -> Iterator[Row]:
    """A record of `bench/bench_run.py`: what the plan said then, and the card's own memory."""
    name = "run_h200.json"
    found = _read(name)
    for stage, entry in (found or {}).get("stages", {}).items():
        planned_then = entry.get("planned")
        if not planned_then or entry.get("seconds") is None:
            continue
        peak, seconds = entry.get("device_peak_bytes"), planned_then.get("seconds")
        in_ram = planned_then["device"] == "RAM"
        yield (
            f"a whole run: {stage}",
            gib(planned_then["peak_bytes"]) + (" of RAM" if in_ram else " with the context"),
            gib(peak) if peak and not in_ram else "-",
            about(seconds) if seconds else "-",
            f"{entry['seconds']:.0f} s",
            name,
        )


def _servers(plan: Plan, run: RunFile) -> Iterator[Row]:
    name = "serve_h200.json"
    found = _read(name)
    if found is None:
        return
    models = found["models"]
    used = [m["device_used_bytes"] / 2**30 for m in models]
    yield (
        "serve: 16 bits and 4 bits beside one another",
        gib(served(models)),
        f"{min(used):.1f} to {max(used):.1f} GiB of the card",
        about(serve_seconds(run, plan.arch, plan.step)),
        " and ".join(f"{m['seconds_to_first_answer']:.0f} s" for m in models),
        name,
    )
