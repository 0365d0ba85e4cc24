"""The tables of the 7B page, from what was measured and what the plan says of the same."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tuneserve.plan.arch import Arch, arch_from_config
from tuneserve.plan.build import Plan, plan_for
from tuneserve.plan.constants import Constants, for_card
from tuneserve.plan.later import quantize_peak
from tuneserve.plan.machine import Gpu, Machine
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
    table = planned(RUNS / "gpu-24gb.yaml", 24).to_json()["table"]
    return f"```\n{table}\n```\n"


def _stages() -> str:
    """Each stage as it was measured, with the plan's figure for the same setting beside it."""
    plan = planned(RUNS / "gpu-24gb.yaml", 24)
    context = Constants().cuda_context_bytes
    few = load_run_file(RUNS / "gpu-24gb.yaml")
    few = few.model_copy(
        update={"quantize": few.quantize.model_copy(update={"calibration_rows": 32})}
    )
    known = {row["setting"]: row for row in _result("plan.json")["rows"]}
    step = known["qwen2-7b nf4 r64 q k v o, 2 x 2048, checkpointing"]
    timed = next(
        point
        for point in _result("h200_plan_points.json")["points"]
        if (point["shape"], point["method"], point["checkpointing"])
        == ("qwen2-7b", "qlora", "true")
        and "seconds_per_step" in point
    )
    gate = _result("validate.json")["memory"][0]
    merge, serve = _result("merge_h200_host.json"), _result("serve_h200.json")["models"]
    quantize = _result("quantize_h200_gptq.json")
    sides = [quantize["peaks"][name] for name in ("ours", "bare")]
    laps = [laps_of(side["laps"])["quantizing"] for side in sides]
    evaluate = plan.stages["evaluate"].peak.needed_bytes - context
    arch = shortened("Qwen2.5-7B-Instruct", quantize["layers"])
    bare = quantize_peak(arch, few, gpu=True).needed_bytes - context
    export = quantize_peak(arch, few, gpu=True, room_bytes=H200_BYTES).needed_bytes - context
    rows = [
        (
            f"validate: {gate['rows']:,} rows of {gate['tokens'] / gate['rows']:.0f} tokens, "
            "SmolLM2's tokenizer, 2 cores",
            "-",
            f"{gib(gate['peak_rss_bytes'])} of RAM",
            f"{gate['row_seconds']:.0f} s: {gate['rows'] / gate['row_seconds']:,.0f} rows/s",
            "validate.json",
        ),
        (
            "train: NF4, r=64 on q, k, v, o, 2 x 2048 tokens, checkpointing",
            f"{step['predicted_gib']:.1f} GiB",
            gib(timed["peak_reserved_bytes"]),
            f"{timed['seconds_per_step']:.3f} s a step",
            "h200_plan_points.json",
        ),
        (
            f"merge: {merge['checkpoint_bytes'] / 1e9:.1f} GB",
            "at most 700 MiB of RAM",
            f"{merge['peak_rss_bytes'] / 2**20:.0f} MiB of RAM",
            f"{merge['merge_seconds']:.0f} s",
            "merge_h200_host.json",
        ),
        (
            "evaluate: 16 x 2048 tokens in 16 bits",
            gib(evaluate),
            "16.1 GiB",
            "10 s to load, 6 s to score, 3 s for the losses",
            "",
        ),
        (
            f"quantize: GPTQ of {quantize['layers']} layers, {quantize['rows']} rows of "
            f"{quantize['max_tokens']} tokens",
            f"{gib(bare)} bare, {gib(export)} ours",
            f"{gib(sides[1]['peak_gpu_bytes'])} bare, {gib(sides[0]['peak_gpu_bytes'])} ours",
            f"{laps[1]:.0f} s bare (kernels compiled), {laps[0]:.0f} s ours",
            "quantize_h200_gptq.json",
        ),
        (
            "serve: 16 bits and 4 bits beside one another",
            gib(served(serve)),
            gib(serve[0]["device_used_bytes"]) + " of the card",
            " and ".join(f"{model['seconds_to_first_answer']:.0f}" for model in serve)
            + " s to the first answer",
            "serve_h200.json",
        ),
    ]
    lines = ["| stage | predicted | measured | seconds | source |", "|---|---|---|---|---|"]
    for *cells, name in rows:
        source = (
            f"[{name}](../bench/results/{name})" if name else "[notes](../bench/NOTES.md), once"
        )
        lines.append(f"| {' | '.join(cells)} | {source} |")
    note = "GPU memory is what torch reserves, without the CUDA context; the card's own for serve."
    return "\n".join([*lines, "", note]) + "\n"


def gib(count: float) -> str:
    """``12.4 GiB``."""
    return f"{count / 2**30:.1f} GiB"


def _train_table() -> str:
    """Timed steps of the 7B shape, with the plan's figure for the same setting beside them."""
    results = HERE.parent / "bench" / "results"
    points = json.loads((results / "h200_plan_points.json").read_text(encoding="utf-8"))["points"]
    rows = json.loads((results / "plan.json").read_text(encoding="utf-8"))["rows"]
    predicted = {row["setting"]: row["predicted_gib"] for row in rows}
    lines = [
        "| base | adapter | recomputed | predicted | measured | a step | a million tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in points:
        if point["shape"] != "qwen2-7b" or "seconds_per_step" not in point:
            continue
        kept = {"true": "checkpointing", "false": "all kept", "offload": "checkpoints on the host"}
        bits = "16 bits" if point["method"] == "lora" else "NF4"
        targets = point["targets"].replace("_proj", "").replace(",", ", ")
        adapter = f"r={point['rank']} on {targets}"
        gib = point["peak_reserved_bytes"] / 2**30
        guess = _predicted(predicted, point, kept[point["checkpointing"]])
        lines.append(
            f"| {bits} | {adapter} | {kept[point['checkpointing']]} | {guess} | {gib:.1f} GiB | "
            f"{point['seconds_per_step']:.3f} s | {1e6 / point['tokens_per_second']:.0f} s |"
        )
    command = "`python tests/gpu/train_step.py`"
    where = "[bench/results/h200_plan_points.json](../bench/results/h200_plan_points.json)"
    note = f"Reserved by torch's allocator; {command}, {where}."
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
        "That was before the merge went past the page cache, which was not measured on that host.\n"
    )


def _result(name: str) -> dict[str, Any]:
    path = HERE.parent / "bench" / "results" / name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _quantize() -> str:
    """Steps of a GPTQ export of some layers of the 7B shape, beside bare GPTQModel's."""
    found = _result("quantize_h200_gptq.json")
    sides = {name: laps_of(found["peaks"][name]["laps"]) for name in ("ours", "bare")}
    shared = list(sides["bare"])
    around = {name: sum(t for n, t in laps.items() if n not in shared)
              for name, laps in sides.items()}  # fmt: skip
    lines = [f"| GPTQ of {found['layers']} of the 28 layers | tuneserve | bare |", "|---|---|---|"]
    for name in shared:
        lines.append(f"| {name} | {sides['ours'][name]:.1f} s | {sides['bare'][name]:.1f} s |")
    lines.append(f"| checks, comparison of losses, records | {around['ours']:.1f} s | - |")
    ours, bare = (f"{found['peaks'][n]['peak_gpu_bytes'] / 2**30:.1f} GiB" for n in sides)
    lines.append(f"| GPU memory, peak | {ours} | {bare} |")
    return "\n".join(lines) + "\n"


def laps_of(text: str) -> dict[str, float]:
    """Seconds by step of ``loading 0.2 s, quantizing 1 min 04 s``."""
    found = {}
    for part in text.split(", "):
        match = re.fullmatch(r"(.*?) (?:(\d+) min )?([\d.]+) s", part)
        assert match is not None, part
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
    "quantize": _quantize,
    "serve": _serve,
}
