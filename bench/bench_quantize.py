"""What the checked export costs beside bare GPTQModel: same model, same rows, in turns.

    python bench/bench_quantize.py [--quick] [--method gptq|awq] [--model DIR --dataset DIR]
    python bench/bench_quantize.py --shape 7b [--layers N] --out FILE   random weights of that shape
    python bench/bench_quantize.py ... --sides ours --out A      where a machine is lent by the
    python bench/bench_quantize.py ... --sides bare --out B      minute: one side a call,
    python bench/bench_quantize.py --merge A B --out FILE        and one record of both

Each side is a process of its own, from its start to its end: imports, loading, quantizing and
saving on both, and on ours also the checks before and after, the comparison of losses and the
records. `--quick` takes a small random Llama (the time does not depend on what it knows) and writes
nothing; without it the built-in base model is used, and `bench/results/quantize.json` written,
anew after every process: what a killed bench has measured is kept. What a process says stands
beside it in `FILE.SIDE.log` as it comes.

The first export on a machine compiles kernels, and reads gigabytes of libraries from the disk; a
model of one small layer is exported first, so that neither side pays for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Width, MLP, layers, heads, key-value heads, vocabulary.
SHAPES = {"7b": (3584, 18944, 28, 28, 4, 152064), "tiny": (128, 256, 2, 4, 2, 1024)}

BARE = """
import os, sys
from tuneserve.progress import Clock
clock = Clock()
import torch
if (os.cpu_count() or 1) <= 2:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
from pathlib import Path
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization.config import AWQConfig, GPTQConfig
from tuneserve.quantize.calibration import choose

model, method, dataset, out, count, most = sys.argv[1:]
rows = choose(Path(dataset), count=int(count), max_tokens=int(most), min_tokens=1).rows
if method == "gptq":
    config, backend = GPTQConfig(bits=4, group_size=GROUP, desc_act=False, sym=True), BACKEND.AUTO
else:
    config = AWQConfig(bits=4, group_size=GROUP, sym=False)
    backend = BACKEND.AUTO if torch.cuda.is_available() else BACKEND.AWQ_TORCH
clock.lap("imports")
quantizer = GPTQModel.load(model, config)
clock.lap("loading")
quantizer.quantize(rows, batch_size=8, backend=backend)
clock.lap("quantizing")
quantizer.save(out)
clock.lap("saving")
print("where the time went:", clock, file=sys.stderr)
quantizing_gpu_bytes = None
"""

OURS = """
import logging, sys
from pathlib import Path
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
from tuneserve.config import QuantizeSection
from tuneserve.quantize import export, quantize_model

quantizing_gpu_bytes = None


def compare_losses(*rest, **named):
    # It holds the 16-bit model on the card, which quantizing does not: a peak of its own.
    global quantizing_gpu_bytes
    import torch
    if torch.cuda.is_available():
        quantizing_gpu_bytes = torch.cuda.max_memory_reserved()
    return original(*rest, **named)


original, export._smoke = export._smoke, compare_losses
model, method, dataset, out, count, most = sys.argv[1:]
section = QuantizeSection(
    group_size=GROUP, calibration_rows=int(count), calibration_max_tokens=int(most),
    min_calibration_tokens=1,
)
quantize_model(Path(model), method, Path(dataset), Path(out), section)
"""
# Beside the program's own output, the last line. VmHWM: `ru_maxrss` of a child counts its parent's.
PEAKS = """
import json, torch
gpu = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
rss = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("\\n" + json.dumps({
    "peak_gpu_bytes": gpu,
    "peak_gpu_bytes_quantizing": quantizing_gpu_bytes or gpu,
    "peak_rss_bytes": 1024 * int(rss),
}), flush=True)
"""
SIDES = {"bare": BARE, "ours": OURS}
# What two records must share to be merged.
SETTINGS = (
    "bench", "method", "model", "layers", "rows", "max_tokens", "group_size", "quick", "machine",
    "versions",
)  # fmt: skip


def main() -> None:
    """Measure and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes; writes nothing")
    parser.add_argument("--method", choices=("gptq", "awq"), default="gptq")
    parser.add_argument("--model", type=Path, help="16-bit model; default: see above")
    parser.add_argument("--dataset", type=Path, help="dataset artifact; default: random rows")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--layers", type=int, help="only the first layers of the model")
    parser.add_argument("--rows", type=int, help="calibration rows; default 32 quick, 64 else")
    parser.add_argument("--max-tokens", type=int, help="a row; default 128 quick, 192 else")
    parser.add_argument("--group-size", type=int, default=64, help="weights per scale")
    parser.add_argument("--rounds", type=int, help="pairs; default 2 quick, 3 else")
    parser.add_argument("--sides", choices=("bare", "ours", "both"), default="both")
    parser.add_argument("--merge", type=Path, nargs=2, help="records of the two sides; no bench")
    parser.add_argument("--work", type=Path, help="folder that keeps the random model and rows")
    parser.add_argument("--keep", type=Path, help="new folder for our last export")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/quantize.json")
    asked = parser.parse_args()
    if asked.keep and asked.keep.exists():
        parser.error(f"--keep {asked.keep} is there; name a folder that is not")
    out = None if asked.quick else (asked.out or ROOT / "bench/results/quantize.json").absolute()
    if asked.merge:
        result = merged(*(json.loads(path.read_text()) for path in asked.merge))
        keep_record(out, result)
    else:
        with tempfile.TemporaryDirectory(prefix="bench-quantize-") as folder:
            result = measure(asked, Path(folder), out)
    print(json.dumps(result))


def measure(asked: argparse.Namespace, scratch: Path, out: Path | None) -> dict[str, Any]:
    """Runs of one side, or of both in turns; `out` is written after each."""
    quick = asked.quick
    kept = asked.work or scratch
    kept.mkdir(parents=True, exist_ok=True)
    if asked.shape:
        model = shaped_model(kept / "model", asked.shape, asked.layers)
    else:
        model = asked.model or (small_model(scratch) if quick else built_in_model())
        if asked.layers:
            model = first_layers(model, asked.layers, scratch / "model")
    count = asked.rows or (32 if quick else 64)
    most = asked.max_tokens or (128 if quick else 192)
    dataset = asked.dataset or random_dataset(scratch / "dataset", model, count, most)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    settings = {
        "bench": "quantize",
        "method": asked.method,
        "model": asked.shape or (asked.model.name if asked.model else "built-in"),
        "layers": layers,
        "rows": count,
        "max_tokens": most,
        "group_size": asked.group_size,
        "quick": quick,
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "gptqmodel")},
    }
    if not quick or not (Path.home() / ".cache" / "gptqmodel").is_dir():
        tiny = shaped_model(scratch / "tiny", "tiny", 1)
        rows = random_dataset(scratch / "tiny-rows", tiny, 8, 64)
        warm = run(asked, "bare", tiny, rows, scratch, 8, 64, None)
        print(f"warm-up: {warm['seconds']} s", file=sys.stderr, flush=True)
    runs: list[dict[str, Any]] = []
    for number in range(asked.rounds or (2 if quick else 3)):
        pair = ("bare", "ours") if number % 2 == 0 else ("ours", "bare")
        for side in pair if asked.sides == "both" else (asked.sides,):
            runs.append(run(asked, side, model, dataset, scratch, count, most, out))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            keep_record(out, record(settings, runs))
            if side == "ours" and asked.keep:
                shutil.rmtree(asked.keep, ignore_errors=True)
                shutil.move(scratch / "out", asked.keep)
    return record(settings, runs)


def record(settings: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The result file of these runs; the ratios are there when both sides are."""
    found: dict[str, Any] = {**settings, "all_seconds": {}, "all_cpu_seconds": {}, "peaks": {}}
    for run_ in runs:
        side = run_["side"]
        found["all_seconds"].setdefault(side, []).append(run_["seconds"])
        found["all_cpu_seconds"].setdefault(side, []).append(run_["cpu_seconds"])
        # Of the side's last run.
        found["peaks"][side] = {
            key: value for key, value in run_.items() if key.startswith("peak") or key == "laps"
        }
    for side, taken in found["all_seconds"].items():
        found[f"{side}_seconds"] = statistics.median(taken)
    if len(found["all_seconds"]) == 2:
        cpu = {side: statistics.median(taken) for side, taken in found["all_cpu_seconds"].items()}
        found["ratio"] = round(found["ours_seconds"] / found["bare_seconds"], 4)
        # On a machine that others use as well, CPU time says more than the clock.
        found["cpu_ratio"] = round(cpu["ours"] / cpu["bare"], 4)
    return {**found, "runs": runs}


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One record of two that were measured with the same settings on machines of one kind."""
    settings = {key: first[key] for key in SETTINGS}
    for key, value in settings.items():
        if second[key] != value:
            sys.exit(f"not the same bench: {key} is {value} and {second[key]}")
    return record(settings, first["runs"] + second["runs"])


def keep_record(out: Path | None, result: dict[str, Any]) -> None:
    """Write the result file, if one is wanted."""
    from tuneserve.artifacts import write_json_atomic

    if out:
        write_json_atomic(out, result)


def run(
    asked: argparse.Namespace,
    side: str,
    model: Path,
    dataset: Path,
    scratch: Path,
    count: int,
    most: int,
    beside: Path | None,
) -> dict[str, Any]:
    """One process: its side, seconds by the clock and of CPU, its peak memory and its steps."""
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    arguments = [str(model), asked.method, str(dataset), str(out), str(count), str(most)]
    code = SIDES[side].replace("GROUP", str(asked.group_size)) + PEAKS
    log = beside.with_name(f"{beside.name}.{side}.log") if beside else scratch / f"{side}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started, used = time.monotonic(), children_seconds()
    with log.open("w") as errors:
        found = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    taken = time.monotonic() - started
    said = log.read_text(errors="replace")
    if found.returncode:
        sys.exit(f"a run failed:\n{found.stdout[-1500:]}\n{said[-3000:]}")
    laps = [line for line in said.splitlines() if line.startswith("where the time went")]
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    return {
        "side": side,
        "seconds": round(taken, 2),
        "cpu_seconds": round(children_seconds() - used, 2),
        **json.loads(lines[-1]),
        "laps": laps[-1].partition(": ")[2] if laps else "",
    }


def machine() -> str:
    """Processor kind, cores and GPU."""
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}, {os.cpu_count()} cores{gpu}"


def children_seconds() -> float:
    """CPU seconds of the processes that were waited for so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def small_model(scratch: Path) -> Path:
    """Six layers of width 512, random weights: seconds to make."""
    return Path(pico().make_pico(scratch / "model", layers=6, hidden=512, steps=0))


def shaped_model(folder: Path, name: str, layers: int | None) -> Path:
    """Random weights of a Qwen2 shape, a file a layer; the same ones in every call."""
    import torch
    from safetensors.torch import save_file

    width, inner, count, heads, kv_heads, vocabulary = SHAPES[name]
    count = layers or count
    if (folder / "config.json").is_file():  # written last
        found = json.loads((folder / "config.json").read_text())
        if (found["hidden_size"], found["num_hidden_layers"]) == (width, count):
            return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    files: dict[str, str] = {}

    def keep(file: str, sizes: dict[str, tuple[int, ...]]) -> None:
        tensors = {
            key: (torch.randn(*size, device=device) * 0.02 + (len(size) == 1)).bfloat16().cpu()
            for key, size in sizes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, file))

    kv = width // heads * kv_heads
    for at in range(count):
        p = f"model.layers.{at}"
        sizes: dict[str, tuple[int, ...]] = {
            f"{p}.self_attn.q_proj.weight": (width, width),
            f"{p}.self_attn.k_proj.weight": (kv, width),
            f"{p}.self_attn.v_proj.weight": (kv, width),
            f"{p}.self_attn.o_proj.weight": (width, width),
            f"{p}.mlp.gate_proj.weight": (inner, width),
            f"{p}.mlp.up_proj.weight": (inner, width),
            f"{p}.mlp.down_proj.weight": (width, inner),
            f"{p}.input_layernorm.weight": (width,),
            f"{p}.post_attention_layernorm.weight": (width,),
        }
        sizes |= {
            f"{p}.self_attn.{n}_proj.bias": (size,)
            for n, size in (("q", width), ("k", kv), ("v", kv))
        }
        keep(f"layer-{at}.safetensors", sizes)
    ends = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    keep("ends.safetensors", {**ends, "model.norm.weight": (width,)})
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": count, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "dtype": "bfloat16",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": False,
    }  # fmt: skip
    pico()._tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pico() -> Any:
    """The tests' maker of small models."""
    spec = importlib.util.spec_from_file_location("pico", ROOT / "tests" / "pico.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_in_model() -> Path:
    """SmolLM2-135M-Instruct, converted once a machine."""
    from tuneserve.checkpoint.base import resolve_base
    from tuneserve.config import ModelSection

    return resolve_base(ModelSection(base="builtin:smollm2-135m"))


def first_layers(model: Path, count: int, folder: Path) -> Path:
    """A copy of a model in one file, with only its first layers."""
    import re

    from safetensors.torch import load_file, save_file

    folder.mkdir()
    kept = {
        name: tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        if not (at := re.search(r"\.layers\.(\d+)\.", name)) or int(at.group(1)) < count
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja", ".model"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    return folder


def random_dataset(folder: Path, model: Path, count: int, most: int) -> Path:
    """At least `count` rows of random ids, of lengths from 16 tokens up."""
    import pyarrow
    import pyarrow.parquet

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    count = max(count, 128)
    rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(16, most))] for _ in range(count)]
    folder.mkdir(parents=True)
    ids = pyarrow.array(rows, pyarrow.list_(pyarrow.int32()))
    table = pyarrow.table(
        {"input_ids": ids, "labels": ids, "source": [f"r:{i}" for i in range(count)]}
    )
    for name in ("train", "eval"):
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    return folder


if __name__ == "__main__":
    main()
