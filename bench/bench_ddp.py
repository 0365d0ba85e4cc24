"""One GPU against several: memory of each, tokens a second, speed-up. Its last line is one object.

    python bench/bench_ddp.py [--gpus 2] [--shape qwen2-7b] [--rank 64] [--targets all-linear]
                              [--micro-batch 2] [--length 2048] [--steps 16] [--add] [--quick]

The product's own train stage runs on random weights of a known shape: on one GPU, on several with
DDP, and on several with ZeRO-2 (16-bit LoRA), then on one and on several with QLoRA. Each GPU has
the same rows a step in all of them, so `speedup_ddp` is tokens a second of the several over those
of the one; the best would be the number of GPUs. A step's time is the median over steps, from one
step's log to the next. The case `lora-accumulated` is one GPU that takes the rows of all in turn:
step by step the loss and the gradient's norm should be those of `lora-ddp`, and `losses` says how
far apart they are. With `--add` the cases that `ddp.json` lacks, and the losses, are added to what
it holds. `gib` is what torch's allocator reserved at most, of the fullest GPU;
`used_gib` what the driver says, CUDA's and NCCL's own buffers included. Without a GPU (`--quick`,
which writes nothing) two processes share the CPU: it shows that the script works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "ddp.json"
GIB = 2**30
CASES: dict[str, tuple[str, bool, int]] = {  # method, on several GPUs, ZeRO stage
    "lora": ("lora", False, 0),
    "lora-ddp": ("lora", True, 0),
    "lora-zero2": ("lora", True, 2),
    "qlora": ("qlora", False, 0),
    "qlora-ddp": ("qlora", True, 0),
    "lora-accumulated": ("lora", False, 0),
}
ACCUMULATED = "lora-accumulated"
DEFAULT = "lora,lora-ddp,lora-zero2,qlora,qlora-ddp,lora-accumulated"


def main() -> None:
    """Measure and print, or do one part in a process of its own."""
    options = parser().parse_args()
    if options.quick:
        options.shape, options.length, options.steps, options.rank = "tiny", 64, 4, 8
        options.cases = options.cases or "lora,lora-ddp,lora-accumulated"
    options.cases = options.cases or DEFAULT
    if options.case:
        print(json.dumps(run_case(options)))
        return
    if options.make_base:
        train_step()._make_base(Path(options.folder) / "base", options.shape)
        return
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and not options.quick else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        result = measure(options, folder)
    if options.add:
        result = added(json.loads(RESULT.read_text(encoding="utf-8")), result)
    if not options.quick and not result["failed"]:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("--gpus", type=int, default=2)
    found.add_argument("--shape", default="qwen2-7b", help="of tests/gpu/train_step.py")
    found.add_argument("--rank", type=int, default=64)
    found.add_argument("--targets", default="all-linear", help="comma-separated, or all-linear")
    found.add_argument("--micro-batch", type=int, default=2)
    found.add_argument("--length", type=int, default=2048, help="tokens a row")
    found.add_argument("--steps", type=int, default=16)
    found.add_argument("--cases", help=f"some of {DEFAULT}, in this order; else all")
    found.add_argument("--add", action="store_true", help="add to what was recorded")
    found.add_argument("--budget", type=float, default=3600, help="seconds; no case starts later")
    found.add_argument("--quick", action="store_true", help="a tiny model; nothing is written")
    for hidden in ("--case", "--folder"):
        found.add_argument(hidden, help=argparse.SUPPRESS)
    found.add_argument("--make-base", action="store_true", help=argparse.SUPPRESS)
    return found


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All cases, each in a process of its own, and the table."""
    began = time.monotonic()
    again = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
    subprocess.run([*again, "--make-base"], check=True, cwd=ROOT)
    print(f"weights made after {time.monotonic() - began:.0f} s", flush=True)
    cases: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for name in options.cases.split(","):
        if time.monotonic() - began > options.budget:
            failed.append(f"{name}: no time left")
            continue
        with Used() as used:
            done = subprocess.run(
                [*again, "--case", name], stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            failed.append(f"{name}: status {done.returncode}")
            continue
        cases[name] = {**json.loads(lines[-1]), "used_gib": used.most_gib()}
        print(f"{name} after {time.monotonic() - began:.0f} s: {lines[-1]}", flush=True)
    curves = {name: case.pop("curve") for name, case in cases.items()}
    accumulated = cases.pop(ACCUMULATED, None)
    speedups = add_speedups(cases)
    print(table({**cases, ACCUMULATED: accumulated} if accumulated else cases))
    losses = None
    if accumulated and "lora-ddp" in curves:
        losses = differences(curves[ACCUMULATED], curves["lora-ddp"])
        print(curve_table(curves[ACCUMULATED], curves["lora-ddp"]))
    return {
        "bench": "ddp",
        **speedups,
        "losses": losses,
        "cases": cases,
        "failed": failed,
        "shape": options.shape,
        "tokens_a_gpu_and_step": options.micro_batch * options.length,
        "command": "python bench/bench_ddp.py " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "versions": {
            name: version(name)
            for name in ("torch", "transformers", "peft", "trl", "bitsandbytes", "deepspeed")
            if importlib.util.find_spec(name)
        },
    }


def add_speedups(cases: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Tokens a second over those of one GPU with the same method, into the cases and by name."""
    for name, case in cases.items():
        one = cases.get(name.partition("-")[0])
        if one:
            case["speedup"] = round(case["tokens_per_second"] / one["tokens_per_second"], 3)
    return {
        f"speedup_{key}": cases.get(name, {}).get("speedup")
        for key, name in (("ddp", "lora-ddp"), ("zero2", "lora-zero2"), ("qlora_ddp", "qlora-ddp"))
    }


def differences(one: list[dict[str, float]], several: list[dict[str, float]]) -> dict[str, Any]:
    """How far apart two curves of the same rows are, step by step, as shares of the first."""
    found: dict[str, Any] = {"steps": len(one)}
    for key in ("loss", "grad_norm"):
        shares = [abs(b[key] / a[key] - 1) for a, b in zip(one, several, strict=True)]
        found[key] = [float(f"{share:.3g}") for share in shares]
        found[f"largest_{key}"] = max(found[key])
    return found


def curve_table(one: list[dict[str, float]], several: list[dict[str, float]]) -> str:
    """For people."""
    lines = [f"{'step':>4}{'one GPU':>12}{'several':>12}{'relative':>12}{'of the norm':>13}"]
    for a, b in zip(one, several, strict=True):
        apart, norm = b["loss"] / a["loss"] - 1, b["grad_norm"] / a["grad_norm"] - 1
        lines.append(
            f"{a['step']:>4}{a['loss']:>12.6f}{b['loss']:>12.6f}{apart:>12.1e}{norm:>13.1e}"
        )
    return "\n".join(lines)


def added(recorded: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What was recorded, with the cases that it lacks and the losses measured now.

    What failed now is said, and is no failure of what was recorded.
    """
    for failure in now["failed"]:
        print(failure, file=sys.stderr)
    for name in ("shape", "tokens_a_gpu_and_step", "machine", "versions"):
        if recorded[name] != now[name]:
            print(f"not added: {name} was {recorded[name]}, is {now[name]}", file=sys.stderr)
            return {**now, "failed": [*now["failed"], f"--add: another {name}"]}
    cases = {**now["cases"], **recorded["cases"]}
    order = [name for name in CASES if name in cases]
    cases = {name: cases[name] for name in order}
    result = {**recorded, **add_speedups(cases), "cases": cases}
    if now["losses"]:
        result["losses"] = now["losses"]
    return {**result, "added_by": now["command"]}


def table(cases: dict[str, dict[str, Any]]) -> str:
    """For people."""
    lines = [f"{'':<17}{'GPUs':>5}{'GiB a GPU':>11}{'planned':>9}{'tokens/s':>10}{'speed-up':>10}"]
    for name, case in cases.items():
        planned = f"{case['planned_gib']:.1f}" if case["planned_gib"] else "-"
        speedup = f"{case['speedup']:.2f}" if "speedup" in case else "-"
        lines.append(
            f"{name:<17}{case['gpus']:>5}{case['gib'] or 0:>11.1f}{planned:>9}"
            f"{case['tokens_per_second']:>10,.0f}{speedup:>10}"
        )
    return "\n".join(lines)


def run_case(options: argparse.Namespace) -> dict[str, Any]:
    """One training; what it took."""
    from tuneserve.artifacts import Artifact
    from tuneserve.runfile import parse_run
    from tuneserve.stages import StageContext
    from tuneserve.train.stage import run

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    method, several, zero = CASES[options.case]
    gpus = options.gpus if several else 1
    together = options.gpus if options.case == ACCUMULATED else gpus
    effective = options.micro_batch * together
    base, work = Path(options.folder) / "base", Path(options.folder) / options.case
    config = json.loads((base / "config.json").read_text())
    rows = options.steps * effective
    train_step()._make_dataset(work / "data", config["vocab_size"], rows, options.length)
    targets = options.targets
    run_file = parse_run(
        {
            "name": "ddp",
            "model": {"base": str(base)},
            "data": {"train": "random", "max_length": options.length},
            "train": {
                "method": method,
                "gpus": gpus,
                "zero": zero,
                "lora": {
                    "r": options.rank,
                    "alpha": 2 * options.rank,
                    "target_modules": targets if targets == "all-linear" else targets.split(","),
                },
                "effective_batch": effective,
                "micro_batch": options.micro_batch,
                "max_steps": options.steps,
                "gradient_checkpointing": True,
                "save_steps": 10**6,
            },
        }
    )
    context = StageContext(
        run_file, base, {"dataset": Artifact("dataset-random", work / "data", {})},
        work / "out", work / "work", {}, {"micro_batch": options.micro_batch},
    )  # fmt: skip
    context.out.mkdir()
    context.work.mkdir()
    metrics = run(context)
    seconds = metrics["seconds_per_step"]
    peak = metrics.get("peak_gpu_bytes")
    lines = (context.out / "loss.jsonl").read_text().splitlines()
    curve = [{k: p[k] for k in ("step", "loss", "grad_norm")} for p in map(json.loads, lines)]
    shutil.rmtree(work)
    return {
        "method": method,
        "gpus": gpus,
        "zero": zero,
        "seconds_per_step": seconds,
        "tokens_per_second": round(effective * options.length / seconds, 1),
        "gib": round(peak / GIB, 3) if peak else None,
        "planned_gib": planned_gib(run_file),
        "trainable_parameters": metrics["trainable_parameters"],
        "did_not_fit": metrics["did_not_fit"],
        "final_loss": metrics["final_loss"],
        "curve": curve,
    }


def planned_gib(run_file: Any) -> float | None:
    """What the plan says of the same run on cards of this size."""
    import torch

    from tuneserve.errors import TuneserveError
    from tuneserve.plan import plan_run

    if not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        train = plan_run(run_file, gpu_memory_bytes=total)["stages"]["train"]
    except TuneserveError as error:
        logging.getLogger(__name__).warning("not planned: %s", error)
        return None
    return round(train["peak_bytes"] / GIB, 3)


class Used:
    """The most memory that each GPU's driver reports in between; empty without a GPU."""

    def __init__(self) -> None:
        self._most: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Used:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def most_gib(self) -> list[float]:
        """By GPU."""
        return [round(mib / 1024, 2) for mib in self._most]

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which("nvidia-smi") and not self._stop.wait(2.0):
            done = subprocess.run(query, capture_output=True, text=True)
            now = [int(line) for line in done.stdout.split() if line.isdigit()]
            self._most = [max(pair) for pair in zip(now, self._most or now, strict=True)]


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    if not torch.cuda.is_available():
        return {"cpu": platform.processor() or platform.machine()}
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    peer = len(names) > 1 and torch.cuda.can_device_access_peer(0, 1)
    return {"gpus": names, "peer_access": peer, "cuda": torch.version.cuda}


def train_step() -> ModuleType:
    """Makes weights and rows: `tests/gpu/train_step.py`."""
    path = ROOT / "tests" / "gpu" / "train_step.py"
    spec = importlib.util.spec_from_file_location("train_step", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
