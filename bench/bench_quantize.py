"""What the checked export costs beside bare GPTQModel: same model, same rows, in turns.

    python bench/bench_quantize.py [--quick] [--method gptq|awq] [--model DIR --dataset DIR]
    python bench/bench_quantize.py --shape 7b [--layers N] --out FILE   random weights of that shape

Each side is a process of its own, from its start to its end: imports, loading, quantizing and
saving on both, and on ours also the checks before and after, the comparison of losses and the
records. `--quick` takes a small random Llama (the time does not depend on what it knows) and writes
nothing; without it the built-in base model is used, and `bench/results/quantize.json` written.
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
"""

OURS = """
import logging, sys
from pathlib import Path
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
from tuneserve.config import QuantizeSection
from tuneserve.quantize import quantize_model

model, method, dataset, out, count, most = sys.argv[1:]
section = QuantizeSection(
    group_size=GROUP, calibration_rows=int(count), calibration_max_tokens=int(most),
    min_calibration_tokens=1,
)
quantize_model(Path(model), method, Path(dataset), Path(out), section)
"""
# Beside the program's own output, the last line.
PEAKS = """
import json, resource, torch
gpu = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
rss = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("\\n" + json.dumps({"peak_gpu_bytes": gpu, "peak_rss_bytes": rss}), flush=True)
"""


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
    parser.add_argument("--keep", type=Path, help="new folder for our last export")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/quantize.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-quantize-") as folder:
        result = measure(arguments, Path(folder))
    if not arguments.quick:
        from tuneserve.artifacts import write_json_atomic

        out = arguments.out or ROOT / "bench" / "results" / "quantize.json"
        write_json_atomic(out.absolute(), result)
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Pairs of runs, ours and bare in turns."""
    quick = arguments.quick
    if arguments.shape:
        model = shaped_model(scratch / "model", arguments.shape, arguments.layers)
    else:
        model = arguments.model or (small_model(scratch) if quick else built_in_model())
        if arguments.layers:
            model = first_layers(model, arguments.layers, scratch / "model")
    count = arguments.rows or (32 if quick else 64)
    most = arguments.max_tokens or (128 if quick else 192)
    dataset = arguments.dataset or random_dataset(scratch / "dataset", model, most)
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    cpu_seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    peaks: dict[str, dict[str, Any]] = {}
    if not (Path.home() / ".cache" / "gptqmodel").is_dir():
        # The first export on a machine compiles kernels; it would count against one side only.
        tiny = shaped_model(scratch / "tiny", "tiny", 1)
        run(arguments, BARE, tiny, random_dataset(scratch / "tiny-rows", tiny, 64), scratch, 8, 64)
    for number in range(arguments.rounds or (2 if quick else 3)):
        for name in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
            code = BARE if name == "bare" else OURS
            taken, cpu, peaks[name] = run(arguments, code, model, dataset, scratch, count, most)
            seconds[name].append(round(taken, 2))
            cpu_seconds[name].append(round(cpu, 2))
            print(f"{name}: {taken:.1f} s, {cpu:.1f} s of CPU", file=sys.stderr)
            if name == "ours" and arguments.keep:
                shutil.rmtree(arguments.keep, ignore_errors=True)
                shutil.move(scratch / "out", arguments.keep)
    ours, bare = statistics.median(seconds["ours"]), statistics.median(seconds["bare"])
    return {
        "bench": "quantize",
        "method": arguments.method,
        "ratio": round(ours / bare, 4),
        "ours_seconds": ours,
        "bare_seconds": bare,
        # On a machine that others use as well, CPU time says more than the clock.
        "cpu_ratio": round(
            statistics.median(cpu_seconds["ours"]) / statistics.median(cpu_seconds["bare"]), 4
        ),
        "all_seconds": seconds,
        "all_cpu_seconds": cpu_seconds,
        "peaks": peaks,
        "model": arguments.shape or (arguments.model.name if arguments.model else "built-in"),
        "layers": json.loads((model / "config.json").read_text())["num_hidden_layers"],
        "rows": count,
        "max_tokens": most,
        "group_size": arguments.group_size,
        "quick": quick,
        "machine": machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "gptqmodel")},
    }


def run(
    asked: argparse.Namespace,
    code: str,
    model: Path,
    dataset: Path,
    scratch: Path,
    count: int,
    most: int,
) -> tuple[float, float, dict[str, Any]]:
    """Seconds of one process by the clock, and of CPU; its peak memory and its steps."""
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    arguments = [str(model), asked.method, str(dataset), str(out), str(count), str(most)]
    code = code.replace("GROUP", str(asked.group_size)) + PEAKS
    started, used = time.monotonic(), children_seconds()
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    taken = time.monotonic() - started
    if found.returncode:
        sys.exit(f"a run failed:\n{found.stdout[-1500:]}\n{found.stderr[-3000:]}")
    laps = ""
    for line in found.stderr.splitlines():
        if line.startswith("where the time went"):
            laps = line.partition(": ")[2]
            print(line, file=sys.stderr)
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    return taken, children_seconds() - used, {**json.loads(lines[-1]), "laps": laps}


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
    """Random weights of a Qwen2 shape, a file a layer."""
    import torch
    from safetensors.torch import save_file

    width, inner, count, heads, kv_heads, vocabulary = SHAPES[name]
    count = layers or count
    folder.mkdir()
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    (folder / "config.json").write_text(json.dumps(config))
    pico()._tokenizer().save_pretrained(folder)
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


def random_dataset(folder: Path, model: Path, most: int) -> Path:
    """Rows of random ids, of lengths from 16 tokens up."""
    import pyarrow
    import pyarrow.parquet

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(16, most))] for _ in range(128)]
    folder.mkdir(parents=True)
    ids = pyarrow.array(rows, pyarrow.list_(pyarrow.int32()))
    table = pyarrow.table(
        {"input_ids": ids, "labels": ids, "source": [f"r:{i}" for i in range(128)]}
    )
    for name in ("train", "eval"):
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    return folder


if __name__ == "__main__":
    main()
