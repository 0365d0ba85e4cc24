"""The plan's table of the stages after training: predicted beside measured, from recorded JSON.

What was not recorded is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from walkthrough_tables import H200_BYTES, RUNS, gib, laps_of, planned, served, shortened

from tuneserve.config import RunFile
from tuneserve.plan.constants import Constants
from tuneserve.plan.later import quantize_peak
from tuneserve.plan.plan import Plan
from tuneserve.plan.speed import rate
from tuneserve.plan.times import (
    about,
    copying_seconds,
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
    rows = [*_merges(), *_exports(plan, run), *_servers(plan, run)]
    lines = [
        "| stage | memory, planned | measured | time, planned | measured | source |",
        "|---|---|---|---|---|---|",
    ]
    for *cells, source in rows:
        lines.append(f"| {' | '.join(cells)} | [{source}](../bench/results/{source}) |")
    return "\n".join(lines) + "\n"


def accuracy() -> str:
    """The plan's errors on the points that constants were fitted on, and on the others."""
    found = _read("plan.json")
    assert found is not None
    lines = ["| reserved memory | points | mean error | worst |", "|---|---|---|---|"]
    for name, what in (
        ("fitted", "Qwen2-7B, fitted"),
        ("held_out", "held out: Llama-3-8B, a 1B model with tied embeddings, a whole run of a 7B"),
    ):
        part = found[name]
        lines.append(f"| {what} | {part['points']} | {part['mape']:.1%} | {part['worst']:.1%} |")
    return "\n".join(lines).replace("%", " %") + "\n"


def points() -> str:
    """Every point, planned and measured."""
    found = _read("plan.json")
    assert found is not None
    lines = ["| setting | planned | measured |", "|---|---|---|"]
    lines += [
        f"| {row['setting']} | {row['predicted_gib']:.2f} GiB | {row['measured_gib']:.2f} GiB |"
        for row in found["rows"]
    ]
    return "\n".join(lines) + "\n"


PLAN_BLOCKS = {"accuracy": accuracy, "points": points, "stages": stages}


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


def _exports(plan: Plan, run: RunFile) -> Iterator[Row]:
    """Records of `bench/bench_quantize.py`."""
    for method in ("gptq", "gptq_28", "awq"):
        name = f"quantize_h200_{method}.json"
        record = _read(name)
        if record is not None and "ours" in record["peaks"]:
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
