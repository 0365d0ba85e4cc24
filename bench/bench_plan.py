"""How well the plan's training peak agrees with measured ones. Its last line is one JSON object.

    python bench/bench_plan.py [--quick] [--points FILE]
    python bench/bench_plan.py --measure FOLDER [--points FILE]     on a GPU: take the points again

The points are peaks of torch's allocator (`max_memory_reserved`) in the product's own train step on
one H200, three architectures, one process a point (`results/h200_plan_points.json` has the
command). The constants were fitted on Qwen2-7B's shape alone; the other two architectures are held
out. Writes `results/plan.json` and the plot `docs/plan_points.png`; with `--quick` nothing.

`--measure` makes the models in FOLDER and runs as many processes side by side as the card's memory
holds, which changes no peak, only the seconds: those are not kept. It writes FILE anew after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.plan.arch import Arch, arch_from_config
from tuneserve.plan.memory import train_peak
from tuneserve.plan.trainstep import Step

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
POINTS = Path(__file__).with_name("results") / "h200_plan_points.json"
RESULT = POINTS.with_name("plan.json")
PLOT = ROOT / "docs" / "plan_points.png"
TRAIN_STEP = [sys.executable, str(ROOT / "tests" / "gpu" / "train_step.py")]


def shapes() -> dict[str, Arch]:
    """The architectures of the points, as the script that measured them has them."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from train_step import SHAPES

    return {name: arch_from_config(config) for name, config in SHAPES.items()}


def step_of(point: dict[str, Any], arch: Arch) -> Step:
    """A point's setting as the plan has it."""
    chosen = point["targets"].split(",")
    kept = {"true": True, "false": False, "offload": "offload"}
    return Step(
        micro_batch=point["micro_batch"],
        length=point["length"],
        targets=tuple(t for t in arch.linears if chosen == ["all-linear"] or t.name in chosen),
        rank=point["rank"],
        quantized=point["method"] == "qlora",
        accumulation=point["accumulation"],
        checkpointing=kept[point["checkpointing"]],  # type: ignore[arg-type]
        optimizer=point["optimizer"],
        kernels="fused",
    )


def predicted_bytes(point: dict[str, Any], arch: Arch) -> int:
    """Reserved memory; the CUDA context is no part of what the allocator counts."""
    parts = train_peak(arch, step_of(point, arch)).components
    return sum(size for name, size in parts.items() if name != "CUDA context")


def measure(points: Path, folder: Path) -> None:
    """Take every point of `train_step.py` again; those of whole runs stay as they are."""
    import torch

    record = json.loads(points.read_text(encoding="utf-8"))
    known = shapes()
    waiting = [point for point in record["points"] if "source" not in point]
    for shape in sorted({point["shape"] for point in waiting}):
        making = [*TRAIN_STEP, "--shape", shape, "--folder", str(folder), "--make-only"]
        subprocess.run(making, check=True, stdout=subprocess.DEVNULL)
    free = torch.cuda.mem_get_info()[0]
    running: list[tuple[dict[str, Any], int, subprocess.Popen[str]]] = []
    waiting.sort(key=lambda point: -predicted_bytes(point, known[point["shape"]]))
    while waiting or running:
        for point in list(waiting):
            wanted = (
                predicted_bytes(point, known[point["shape"]]) + 3 * GIB
            )  # context, and to spare
            if wanted <= free and len(running) < (os.cpu_count() or 2) // 2:
                waiting.remove(point)
                free -= wanted
                running.append((point, wanted, _start(point, folder)))
        if not running:
            raise SystemExit(f"the card is too small for {len(waiting)} of the points")
        ended = next((one for one in running if one[2].poll() is not None), None)
        if ended is None:
            time.sleep(0.5)
            continue
        running.remove(ended)
        point, wanted, child = ended
        free += wanted
        said = child.communicate()[0].strip().splitlines()
        if child.returncode:
            print(f"failed: {point['shape']}: {said[-1:]}", file=sys.stderr, flush=True)
            continue
        found = json.loads(said[-1])
        kept = ("peak_allocated_bytes", "peak_reserved_bytes", "process_gpu_bytes")
        was = point["peak_reserved_bytes"]
        point |= {key: found[key] for key in kept}
        for gone in ("beyond_bytes", "seconds_per_step", "tokens_per_second"):
            point.pop(gone, None)
        print(f"{point} (was {was})", file=sys.stderr, flush=True)
        write_json_atomic(points, record)


def _start(point: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    names = ("shape", "method", "rank", "targets", "accumulation", "length", "checkpointing")
    command = [*TRAIN_STEP, "--folder", str(folder), "--steps", "4"]
    for name in (*names, "micro_batch", "optimizer"):
        command += [f"--{name.replace('_', '-')}", str(point[name])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def errors(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Mean and worst absolute relative error of (predicted, measured)."""
    relative = [abs(found / measured - 1) for found, measured in pairs]
    if not relative:
        return {"mape": None, "worst": None, "points": 0}
    mean = sum(relative) / len(relative)
    return {"mape": round(mean, 4), "worst": round(max(relative), 4), "points": len(relative)}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same, but write no result")
    parser.add_argument("--points", type=Path, default=POINTS)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="take the points again")
    options = parser.parse_args()
    if options.measure:
        measure(options.points, options.measure)
        return
    points = json.loads(options.points.read_text(encoding="utf-8"))["points"]
    known = shapes()
    rows = [_row(point, known[point["shape"]]) for point in points]
    for row in rows:
        error = row["predicted_gib"] / row["measured_gib"] - 1
        held = "held out" if row["held_out"] else ""
        print(
            f"{row['setting']:<72}{row['predicted_gib']:>8.2f}{row['measured_gib']:>8.2f} GiB "
            f"{error:+6.1%} {held}"
        )

    def pairs(held_out: bool | None) -> list[tuple[float, float]]:
        chosen = [r for r in rows if held_out is None or r["held_out"] == held_out]
        return [(r["predicted_gib"], r["measured_gib"]) for r in chosen]

    result = {"bench": "plan", **errors(pairs(None)), "held_out": errors(pairs(True))}
    result["fitted"] = errors(pairs(False))
    if not options.quick:
        about = {"machine": "one NVIDIA H200", "measured": options.points.name, "rows": rows}
        RESULT.write_text(json.dumps({**result, **about}, indent=1) + "\n", encoding="utf-8")
        _plot(rows)
    print(json.dumps(result))


def _row(point: dict[str, Any], arch: Arch) -> dict[str, Any]:
    kind = "nf4" if point["method"] == "qlora" else "bf16"
    targets = point["targets"].replace("_proj", "").replace(",", " ")
    kept = {"true": "checkpointing", "false": "all kept", "offload": "checkpoints on the host"}
    batch = f"{point['micro_batch']} x {point['length']}"
    if point["accumulation"] > 1:
        batch += f", {point['accumulation']} passes"
    how = kept[point["checkpointing"]]
    return {
        "setting": f"{point['shape']} {kind} r{point['rank']} {targets}, {batch}, {how}",
        "shape": point["shape"],
        "held_out": point["held_out"],
        "predicted_gib": round(predicted_bytes(point, arch) / GIB, 3),
        "measured_gib": round(point["peak_reserved_bytes"] / GIB, 3),
    }


def _plot(rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    ink = "#7f7f7f"
    low, high = 1.5, 32.0
    axes.plot([low, high], [low, high], color=ink, linewidth=1)
    axes.fill_between(
        [low, high], [0.85 * low, 0.85 * high], [1.15 * low, 1.15 * high], color=ink, alpha=0.12
    )
    looks = {"qwen2-7b": ("o", "#2f8fdd"), "llama3-8b": ("s", "#e0762f")}
    for shape in sorted({row["shape"] for row in rows}):
        marker, colour = looks.get(shape, ("^", "#3fa55b"))
        chosen = [row for row in rows if row["shape"] == shape]
        label = f"{shape} ({'held out' if chosen[0]['held_out'] else 'fitted'})"
        axes.plot(
            [row["measured_gib"] for row in chosen],
            [row["predicted_gib"] for row in chosen],
            marker,
            color=colour,
            label=label,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [2, 4, 8, 16, 32]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
        axis.label.set_color(ink)
    axes.set_xlabel("measured, GiB reserved")
    axes.set_ylabel("planned, GiB (band: 15 % off)")
    axes.tick_params(colors=ink)
    for spine in axes.spines.values():
        spine.set_color(ink)
    axes.legend(frameon=False, labelcolor=ink)
    figure.savefig(PLOT, dpi=120, transparent=True, metadata={"Software": None})


if __name__ == "__main__":
    main()
