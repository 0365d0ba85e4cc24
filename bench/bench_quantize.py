"""What the checked export costs beside bare GPTQModel: same model, same rows, in turns.

    python bench/bench_quantize.py [--quick] [--method gptq|awq] [--model DIR --dataset DIR]

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
GROUP_SIZE = 64

BARE = """
import os, sys, json, time
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
    import torch
    config = AWQConfig(bits=4, group_size=GROUP, sym=False)
    backend = BACKEND.AUTO if torch.cuda.is_available() else BACKEND.AWQ_TORCH
quantizer = GPTQModel.load(model, config)
quantizer.quantize(rows, batch_size=8, backend=backend)
quantizer.save(out)
""".replace("GROUP", str(GROUP_SIZE))

OURS = """
import sys
from pathlib import Path
from tuneserve.config import QuantizeSection
from tuneserve.quantize import quantize_model

model, method, dataset, out, count, most = sys.argv[1:]
section = QuantizeSection(
    group_size=GROUP, calibration_rows=int(count), calibration_max_tokens=int(most),
    min_calibration_tokens=1,
)
quantize_model(Path(model), method, Path(dataset), Path(out), section)
""".replace("GROUP", str(GROUP_SIZE))


def main() -> None:
    """Measure and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes; writes nothing")
    parser.add_argument("--method", choices=("gptq", "awq"), default="gptq")
    parser.add_argument("--model", type=Path, help="16-bit model; default: see above")
    parser.add_argument("--dataset", type=Path, help="dataset artifact; default: random rows")
    parser.add_argument("--rounds", type=int, help="pairs; default 2 quick, 3 else")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-quantize-") as folder:
        result = measure(arguments, Path(folder))
    if not arguments.quick:
        from tuneserve.artifacts import write_json_atomic

        write_json_atomic(ROOT / "bench" / "results" / "quantize.json", result)
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Pairs of runs, ours and bare in turns."""
    quick = arguments.quick
    model = arguments.model or (small_model(scratch) if quick else built_in_model())
    count, most = (32, 128) if quick else (64, 192)
    dataset = arguments.dataset or random_dataset(scratch / "dataset", model, most)
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    cpu_seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    if not (Path.home() / ".cache" / "gptqmodel").is_dir():
        # The first export on a machine compiles an extension; it would count against one side only.
        run(BARE, model, arguments.method, dataset, scratch, count, most)
    for number in range(arguments.rounds or (2 if quick else 3)):
        for name in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
            code = BARE if name == "bare" else OURS
            taken, cpu = run(code, model, arguments.method, dataset, scratch, count, most)
            seconds[name].append(round(taken, 2))
            cpu_seconds[name].append(round(cpu, 2))
            print(f"{name}: {taken:.1f} s, {cpu:.1f} s of CPU", file=sys.stderr)
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
        "rows": count,
        "max_tokens": most,
        "group_size": GROUP_SIZE,
        "quick": quick,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers", "gptqmodel")},
    }


def run(
    code: str, model: Path, method: str, dataset: Path, scratch: Path, count: int, most: int
) -> tuple[float, float]:
    """Seconds of one process by the clock, and of CPU."""
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    arguments = [str(model), method, str(dataset), str(out), str(count), str(most)]
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
    return taken, children_seconds() - used


def children_seconds() -> float:
    """CPU seconds of the processes that were waited for so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def small_model(scratch: Path) -> Path:
    """Six layers of width 512, random weights: seconds to make."""
    spec = importlib.util.spec_from_file_location("pico", ROOT / "tests" / "pico.py")
    assert spec is not None and spec.loader is not None
    pico = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pico)
    return Path(pico.make_pico(scratch / "model", layers=6, hidden=512, steps=0))


def built_in_model() -> Path:
    """SmolLM2-135M-Instruct, converted once a machine."""
    from tuneserve.checkpoint.base import resolve_base
    from tuneserve.config import ModelSection

    return resolve_base(ModelSection(base="builtin:smollm2-135m"))


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
