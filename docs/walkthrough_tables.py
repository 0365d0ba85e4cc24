"""The tables of the 7B page, from what was measured and what the plan says of the same."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tuneserve.plan.arch import Arch, arch_from_config
from tuneserve.plan.asjson import as_json
from tuneserve.plan.build import plan_for
from tuneserve.plan.constants import Constants, for_card
from tuneserve.plan.machine import Gpu, Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.times import about
from tuneserve.runfile import load_run_file

HERE = Path(__file__).parent
RUNS = HERE.parent / "deploy" / "runs"
H200_BYTES = 140 * 2**30


def planned(path: Path, gib: float) -> Plan:
    """What the plan says of a shipped run file on an empty card of that size."""
    run = load_run_file(path)
    shape = f"{run.model.base.rsplit('/', 1)[-1]}.json"
    size = int(gib * 2**30)
    card = Gpu(f"a {gib:.0f} GiB GPU", size, size)
    machine = Machine(card, 64 * 2**30, 60 * 2**30, 200 * 2**30, "store", supposed=True)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(HERE.parent / "tests" / "shapes" / shape, Path(folder) / "config.json")
        return plan_for(run, base_dir=Path(folder), machine=machine)


def shortened(shape: str, layers: int) -> Arch:
    """A shipped shape with so many of its layers."""
    path = HERE.parent / "tests" / "shapes" / f"{shape}.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    return arch_from_config({**config, "num_hidden_layers": layers})


def served(models: list[dict[str, Any]]) -> int:
    """What the plan counts for servers of one H200 that were measured."""
    beside = for_card(Constants(), H200_BYTES).server_gpu_bytes
    return sum(model["weights_bytes"] + model["kv_cache_bytes"] + beside for model in models)


def _plan_table() -> str:
    table = as_json(planned(RUNS / "gpu-24gb.yaml", 24))["table"]
    return f"```\n{table}\n```\n"


def _stages() -> str:
    """A whole run, stage by stage, with what the plan had said before it."""
    whole = _result("run_h200.json")
    found = whole["stages"]
    done = {name: found[name]["runs"][0]["metrics"] for name in found if "runs" in found[name]}
    gate, step, merge = done["validate"], done["train"], done["merge"]
    scored, export = done["evaluate"], done["quantize"]
    said = {
        "validate": f"{gate['rows_read']} conversations, {gate['total_tokens']:,} tokens",
        "train": f"{step['steps']} steps of {step['micro_batch']} rows of up to "
        f"{gate['longest_tokens']:,} tokens, {step['seconds_per_step']:.2f} s each",
        "merge": f"{merge['bytes_written'] / 1e9:.1f} GB",
        "evaluate": f"{scored['rows']} rows, {gate['eval_tokens']:,} tokens, four models",
        "quantize": f"GPTQ, {export['calibration_rows']} rows, "
        f"{export['calibration_tokens']:,} tokens",
        "release": "until the server is up",
    }
    lines = [
        "| stage | memory, planned | measured | time, planned | measured |",
        "|---|---|---|---|---|",
    ]
    for name, what in said.items():
        entry, plan = found[name], found[name].get("planned")
        if name == "release":  # not alone on the card, and refused
            measured, seconds = "-", whole["seconds_to_ready"]
        else:
            seconds = entry["runs"][0]["seconds"]
            peak, resident = entry["device_peak_bytes"], done[name]["peak_rss_bytes"]
            measured = gib(peak) if peak else f"{resident / 2**20:.0f} MiB of RAM"
        guess = "-"
        if plan:
            small = f"{plan['peak_bytes'] / 2**20:.0f} MiB of RAM"
            guess = small if plan["device"] == "RAM" else gib(plan["peak_bytes"])
        time = about(plan["seconds"]) if plan and plan.get("seconds") else "-"
        lines.append(f"| {name}: {what} | {guess} | {measured} | {time} | {seconds:.0f} s |")
    return "\n".join(lines) + "\n"


def _evaluate() -> str:
    """Where the evaluation of the whole run spent its time."""
    metrics = _result("run_h200.json")["stages"]["evaluate"]["runs"][0]["metrics"]
    lines = ["| part | seconds |", "|---|---|"]
    lines += [
        f"| {name} | {seconds:.1f} |"
        for name, seconds in sorted(metrics["laps_seconds"].items(), key=lambda lap: -lap[1])
        if seconds >= 0.1
    ]
    return "\n".join(lines) + "\n"


def gib(count: float) -> str:
    """``12.4 GiB``."""
    return f"{count / 2**30:.1f} GiB"


def _train_table() -> str:
    """Timed steps of the 7B shape, with the plan's figure for the same setting beside them."""
    predicted = {row["setting"]: row["predicted_gib"] for row in _result("plan.json")["rows"]}
    lines = [
        "| base | adapter | recomputed | predicted | measured | a step | a million tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in _result("train.json")["runs"]:
        if run["peer"] != "ours":
            continue
        kept = {"true": "checkpointing", "false": "all kept", "offload": "checkpoints on the host"}
        bits = "16 bits" if run["method"] == "lora" else "NF4"
        targets = run["targets"].replace("_proj", "").replace(",", ", ")
        adapter = f"r={run['rank']} on {targets}"
        gib = run["peak_reserved_bytes"] / 2**30
        guess = _predicted(predicted, run, kept[run["checkpointing"]])
        lines.append(
            f"| {bits} | {adapter} | {kept[run['checkpointing']]} | {guess} | {gib:.1f} GiB | "
            f"{run['seconds_per_step']:.3f} s | {1e6 / run['tokens_per_second']:.0f} s |"
        )
    where = "[bench/results/train.json](../bench/results/train.json)"
    note = f"Reserved by torch's allocator; `python bench/bench_train.py`, {where}."
    return "\n".join([*lines, "", note]) + "\n"


def _predicted(known: dict[str, float], point: dict[str, Any], kept: str) -> str:
    bits = "bf16" if point["method"] == "lora" else "nf4"
    targets = point["targets"].replace("_proj", "").replace(",", " ")
    size = f"{point['micro_batch']} x {point['length']}"
    name = f"{point['shape']} {bits} r{point['rank']} {targets}, {size}, {kept}"
    return f"{known[name]:.1f} GiB" if name in known else "-"


def _merge() -> str:
    """The merge of a 7B shape beside the copy of its files."""
    path = HERE.parent / "bench" / "results" / "merge_h200_host.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    return (
        f"Measured on the H200's host, cold cache: {found['checkpoint_bytes'] / 1e9:.1f} GB merged "
        f"in {found['merge_seconds']:.0f} s, where `cp -r && sync` of the same files took "
        f"{found['copy_seconds']:.0f} s; {found['peak_rss_bytes'] / 2**20:.0f} MiB of memory at "
        f"most (`{found['command']}`,\n"
        "[bench/results/merge_h200_host.json](../bench/results/merge_h200_host.json)).\n"
        "Both means of two pairs, beside trainings and an export on the same host.\n"
    )


def _result(name: str) -> dict[str, Any]:
    path = HERE.parent / "bench" / "results" / name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _quantize() -> str:
    """Steps of exports of the 7B shape, or of some of its layers, beside bare GPTQModel's."""
    steps = ("imports", "loading", "quantizing", "saving")
    lines = [
        f"| | {' | '.join(steps)} | checks, losses, records | GPU memory |",
        "|---|" + "---|" * 6,
    ]
    whole = _result("run_h200.json")["stages"]["quantize"]["runs"][0]["metrics"]
    lines.append(
        _export_line(
            "GPTQ, 28 layers, the run above", whole["laps_seconds"], whole["peak_gpu_bytes"]
        )
    )
    for name in ("gptq_28", "gptq", "awq"):
        found = _result(f"quantize_h200_{name}.json")
        for side, who in (("ours", "tuneserve"), ("bare", "bare GPTQModel")):
            if side not in found["peaks"]:
                continue
            peaks = found["peaks"][side]
            size = f"{found['layers']} layers, {found['rows']} rows of {found['max_tokens']}"
            title = f"{found['method'].upper()}, {size}, {who}"
            lines.append(_export_line(title, laps_of(peaks["laps"]), peaks["peak_gpu_bytes"]))
    return "\n".join(lines) + "\n"


def _export_line(title: str, laps: dict[str, float], peak_bytes: int) -> str:
    """Imports and the look at the 16-bit weights beside them are one step."""
    imports = next(taken for step, taken in laps.items() if step.startswith("imports"))
    shared = [laps[step] for step in ("loading", "quantizing", "saving")]
    around = sum(laps.values()) - imports - sum(shared)
    cells = [f"{taken:.1f} s" for taken in (imports, *shared)]
    cells.append(f"{around:.1f} s" if around >= 0.05 else "-")
    return f"| {title} | {' | '.join(cells)} | {gib(peak_bytes)} |"


def laps_of(text: str) -> dict[str, float]:
    """Seconds by step of ``loading 0.2 s, quantizing 1 min 04 s``."""
    found = {}
    for match in re.finditer(r"(.+?) (?:(\d+) min )?([\d.]+) s(?:, |$)", text):
        found[match[1]] = 60 * int(match[2] or 0) + float(match[3])
    return found


def _serve() -> str:
    """Speed of the 16-bit and of the 4-bit 7B shape, served with a release's own command."""
    found = _result("serve_h200.json")
    counts = [key.removeprefix("at_") for key in found["models"][0] if key.startswith("at_")]
    head = " | ".join(f"tokens/s, {n} at once" for n in counts)
    lines = [
        f"| model | weights | first answer after | first token, alone | {head} |",
        "|---|---|---|---|" + "---|" * len(counts),
    ]
    for model in found["models"]:
        bits = "4 bits" if model["quantization"] else "16 bits"
        speeds = " | ".join(f"{model[f'at_{n}']['tokens_per_second']:,.0f}" for n in counts)
        first = model[f"at_{counts[0]}"]["first_token_seconds"]
        lines.append(
            f"| {bits} | {model['weights_bytes'] / 2**30:.1f} GiB | "
            f"{model['seconds_to_first_answer']:.0f} s | {1000 * first:.0f} ms | {speeds} |"
        )
    return "\n".join(lines) + "\n"


BLOCKS = {
    "plan": _plan_table,
    "stages": _stages,
    "train": _train_table,
    "merge": _merge,
    "evaluate": _evaluate,
    "quantize": _quantize,
    "serve": _serve,
}
