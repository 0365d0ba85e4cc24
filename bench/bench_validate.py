"""Measures `validate` against the bare tokenizer on the same rows.

`ratio`: tokens per second of the whole gate (read, parse, check, render, tokenize, prove, split,
write) over tokens per second of `tokenizers` alone on the rendered texts, one process each,
interleaved, medians. `cpu_ratio` is the same in processor seconds, which a busy machine disturbs
less. Starting up (loading the tokenizer, drawing the picture) is in neither; `start_seconds` says
what it costs. `speedup`: two processes over one. `peak_rss_bytes`: the sum of VmHWM over all
processes of the gate.

    python bench/bench_validate.py [--quick] [--part speed|memory] [--rows N] [--base DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "validate.json"


def sentences() -> list[str]:
    """Sentences of the project's own support conversations."""
    found: list[str] = []
    with (ROOT / "data_templates" / "support.jsonl").open(encoding="utf-8") as stream:
        for line in stream:
            for message in json.loads(line)["messages"]:
                found += [
                    part.strip() + "." for part in message["content"].split(".") if part.strip()
                ]
    return sorted(set(found))


def write_rows(path: Path, rows: int, seed: int, shortest: int, longest: int) -> None:
    """Conversations of one or two turns; no two are equal."""
    rng = random.Random(seed)
    pool = sentences()

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(pool, k=rng.randint(low, high)))

    with path.open("w", encoding="utf-8") as stream:
        for row in range(rows):
            messages = []
            for turn in range(1 if rng.random() < 0.8 else 2):
                messages += [
                    {"role": "user", "content": f"{row}.{turn}: {text(1, 3)}"},
                    {"role": "assistant", "content": text(shortest, longest)},
                ]
            stream.write(json.dumps({"messages": messages}) + "\n")


def gate(data: Path, base: Path, processes: int) -> None:
    """Child: run the stage and print its metrics."""
    from tuneserve.data.stage import run
    from tuneserve.runfile import parse_run
    from tuneserve.stages import StageContext

    logging.basicConfig(level=logging.WARNING)
    started = time.monotonic()
    spec = {"name": "bench", "model": {"base": str(base)}, "data": {"train": [str(data)]}}
    with tempfile.TemporaryDirectory(prefix="tuneserve-bench-", dir=data.parent) as folder:
        out, work = Path(folder) / "out", Path(folder) / "work"
        out.mkdir()
        work.mkdir()
        context = StageContext(parse_run(spec), base, {}, out, work, hints={"processes": processes})
        metrics = run(context)
    metrics.pop("report")
    metrics["wall_seconds"] = time.monotonic() - started
    print(json.dumps(metrics))


def bare(data: Path, base: Path) -> None:
    """Child: tokenize the rendered rows with `tokenizers` alone, and print the seconds."""
    from tokenizers import Tokenizer

    from tuneserve.data.template import ChatTemplate

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = (base / "chat_template.jinja").read_text(encoding="utf-8")
    template = ChatTemplate({"default": source}, {})
    with data.open(encoding="utf-8") as stream:
        texts = [
            template.render(json.loads(line)["messages"], None, prompt=False) for line in stream
        ]
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokens, started, cpu_started = 0, time.monotonic(), time.process_time()
    for begin in range(0, len(texts), 256):
        encodings = tokenizer.encode_batch_fast(
            texts[begin : begin + 256], add_special_tokens=False
        )
        tokens += sum(len(encoding.ids) for encoding in encodings)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}))


class Memory(threading.Thread):
    """Watches VmHWM of a process and all its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root, self.peaks, self.done = pid, dict[int, int](), threading.Event()

    def run(self) -> None:
        """Poll; VmHWM only grows, so the last value seen of a process is its peak."""
        while not self.done.wait(0.2):
            family = [self.root]
            for pid in family:
                try:
                    tasks = list(Path(f"/proc/{pid}/task").iterdir())
                    for task in tasks:
                        family += map(int, (task / "children").read_text().split())
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                if "VmHWM:" in status:
                    self.peaks[pid] = 1024 * int(status.split("VmHWM:")[1].split()[0])


def child(*arguments: str) -> dict[str, Any]:
    """Run this file again for one measurement."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", *arguments], stdout=subprocess.PIPE, text=True
    )
    memory = Memory(process.pid)
    memory.start()
    output, _ = process.communicate()
    memory.done.set()
    memory.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    result["peak_rss_bytes"] = sum(memory.peaks.values())
    return result


def measure(base: Path, folder: Path, rows: int, pairs: int) -> dict[str, Any]:
    """The ratio and the speedup."""
    ours, theirs, two, starts, cpu_ratios = [], [], [], [], []
    peak = 0
    for pair in range(pairs):
        data = folder / f"pair{pair}.jsonl"
        write_rows(data, rows, pair, 4, 20)
        reference = child("bare", str(data), str(base))
        theirs.append(reference["tokens"] / reference["seconds"])
        one = child("gate", str(data), str(base), "1")
        assert one["total_tokens"] == reference["tokens"], (one["total_tokens"], reference)
        ours.append(one["total_tokens"] / one["row_seconds"])
        cpu_ratios.append(reference["cpu_seconds"] / one["row_cpu_seconds"])
        starts.append(one["wall_seconds"] - one["row_seconds"])
        both = child("gate", str(data), str(base), "2")
        two.append(both["total_tokens"] / both["row_seconds"])
        peak = max(peak, both["peak_rss_bytes"])
        data.unlink()
    return {
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "tokens_per_second": round(statistics.median(ours)),
        "bare_tokens_per_second": round(statistics.median(theirs)),
        "speedup": round(statistics.median(b / a for a, b in zip(ours, two, strict=True)), 2),
        "start_seconds": round(statistics.median(starts), 1),
        "peak_rss_bytes": peak,
        "rows": rows,
        "pairs": pairs,
    }


def memory_at(base: Path, folder: Path, rows: int) -> dict[str, Any]:
    """Peak memory of all processes for a number of short rows."""
    data = folder / "many.jsonl"
    write_rows(data, rows, 1, 2, 8)
    result = child("gate", str(data), str(base), "2")
    data.unlink()
    return {
        "rows": rows,
        "tokens": result["total_tokens"],
        "peak_rss_bytes": result["peak_rss_bytes"],
        "row_seconds": result["row_seconds"],
    }


def main() -> None:
    """Measure and print one JSON object as the last line."""
    if sys.argv[1:2] == ["--child"]:
        what, data, base = sys.argv[2:5]
        if what == "bare":
            bare(Path(data), Path(base))
        else:
            gate(Path(data), Path(base), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="under two minutes, writes nothing")
    parser.add_argument("--part", choices=("all", "speed", "memory"), default="all")
    parser.add_argument("--rows", type=int, help="rows of a pair")
    parser.add_argument("--most", type=int, default=1_000_000, help="rows of the memory run")
    parser.add_argument("--base", type=Path, help="model folder; default: the built-in one")
    parser.add_argument("--folder", type=Path, help="where to put the rows; default: a temp folder")
    options = parser.parse_args()
    base = options.base
    if base is None:
        from tuneserve.checkpoint.base import resolve_base
        from tuneserve.config import ModelSection

        base = resolve_base(ModelSection(base="builtin:smollm2-135m"))
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as name:
        folder = Path(name)
        rows = options.rows or (12_000 if options.quick else 20_000)
        result = {} if options.quick or not RESULTS.exists() else json.loads(RESULTS.read_text())
        if options.part != "memory":
            result |= measure(base, folder, rows, 3 if options.quick else 5)
        if options.part != "speed" and not options.quick:
            counts = (options.most // 10, options.most)
            result["memory"] = [memory_at(base, folder, count) for count in counts]
        if not options.quick:
            result |= {"cpu_count": os.cpu_count(), "machine": platform.machine()}
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
