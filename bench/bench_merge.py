"""The streaming merge beside ``cp -r && sync`` of the same checkpoint, on the same disk.

Claims: at most 1.3 times the copy's time, and at most 700 MiB of resident memory (VmHWM, torch
included) whatever the model's and the shards' size. Both are run as commands, in interleaved
pairs, with the source's pages dropped from the cache before a cold run and read into it before a
warm one.

    python bench/bench_merge.py --quick           4.5 GB, two cold pairs, writes nothing
    python bench/bench_merge.py                   8.2 GB as one file and with one 5 GB shard, cold
                                                  and warm, in a cgroup of 1 GiB, and PEFT's merge
                                                  where memory allows
    python bench/bench_merge.py --record FILE     the same, written to another file than merge.json
    python bench/bench_merge.py --layers 32       a 16 GB model (7B-shaped) instead; also --quick
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "merge.json"
Shapes = list[tuple[str, tuple[int, ...]]]

# Shapes of Llama-3.1-8B; the layers decide the size.
HIDDEN, MLP, KEY_VALUE = 4096, 14336, 1024
RANK = 16


def shapes(layers: int, vocabulary: int) -> Shapes:
    """Names and shapes in the order in which transformers writes them."""
    found: Shapes = [("lm_head.weight", (vocabulary, HIDDEN))]
    found.append(("model.embed_tokens.weight", (vocabulary, HIDDEN)))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        found += [
            (prefix + "input_layernorm.weight", (HIDDEN,)),
            (prefix + "mlp.down_proj.weight", (HIDDEN, MLP)),
            (prefix + "mlp.gate_proj.weight", (MLP, HIDDEN)),
            (prefix + "mlp.up_proj.weight", (MLP, HIDDEN)),
            (prefix + "post_attention_layernorm.weight", (HIDDEN,)),
            (prefix + "self_attn.k_proj.weight", (KEY_VALUE, HIDDEN)),
            (prefix + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
            (prefix + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
            (prefix + "self_attn.v_proj.weight", (KEY_VALUE, HIDDEN)),
        ]
    return [*found, ("model.norm.weight", (HIDDEN,))]


def size(shape: tuple[int, ...]) -> int:
    """Bytes in bfloat16."""
    return 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)


def make_model(folder: Path, layers: int, vocabulary: int, shard_bytes: int) -> int:
    """Write a checkpoint of random bfloat16 values; its bytes."""
    import numpy

    generator = numpy.random.default_rng(0)
    values = generator.standard_normal(8 * 2**20, dtype=numpy.float32) * 0.02
    noise = memoryview((values.view(numpy.uint32) >> 16).astype(numpy.uint16).tobytes())
    shards: list[Shapes] = [[]]
    for item in shapes(layers, vocabulary):
        if shards[-1] and sum(size(s) for _, s in shards[-1]) + size(item[1]) > shard_bytes:
            shards.append([])
        shards[-1].append(item)
    folder.mkdir(parents=True)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else name
        write_shard(folder / name, shard, noise)
        weight_map.update({tensor: name for tensor, _ in shard})
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(p.stat().st_size for p in folder.iterdir())


def write_shard(path: Path, shard: Shapes, noise: memoryview) -> None:
    """One file: the header, then as many bytes of noise as it needs."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shard:
        end = offset + size(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb", buffering=0) as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        while offset:
            offset -= stream.write(noise[: min(offset, len(noise))])
        os.fsync(stream.fileno())


def make_adapter(folder: Path, layers: int) -> None:
    """A rank-16 LoRA adapter on all linear layers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors = {}
    for name, shape in shapes(layers, 8):
        if "_proj" in name:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, shape[1]) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(shape[0], RANK) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.split(".")[-2] for name, _ in shapes(1, 8) if "_proj" in name})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))


def set_cache(folder: Path, warm: bool) -> None:
    """Read the files into the page cache, or have them dropped from it."""
    os.sync()  # dirty pages cannot be dropped, and are nobody's work but their writer's
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as stream:
            if warm:
                while stream.read(16 * 2**20):
                    pass
            else:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    began = time.monotonic()
    result = work()
    return time.monotonic() - began, result


def copy(base: Path, out: Path) -> None:
    """The yardstick."""
    subprocess.run(["sh", "-c", 'cp -r "$1" "$2" && sync', "sh", base, out], check=True)


def merge(
    base: Path, adapter: Path, out: Path, *options: str, prefix: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The merge as a user runs it."""
    command = [*prefix, sys.executable, "-m", "tuneserve", "merge", "--json", *options]
    command += ["--base", str(base), "--adapter", str(adapter), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the merge ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def measure(base: Path, adapter: Path, out: Path, pairs: int, warm: bool) -> dict[str, Any]:
    """Interleaved pairs of copy and merge; medians, and every figure."""
    copies, merges, peaks, equal = [], [], [], True
    for number in range(pairs):
        for kind in ("copy", "merge") if number % 2 == 0 else ("merge", "copy"):
            set_cache(base, warm)
            if kind == "copy":
                copies.append(timed(lambda: copy(base, out))[0])
            else:
                seconds, result = timed(lambda: merge(base, adapter, out))
                merges.append(seconds)
                peaks.append(result["peak_rss_bytes"])
                equal = equal and result["sampled"] == result["sampled_equal"] > 0
            shutil.rmtree(out)
            print(
                f"{kind} {'warm' if warm else 'cold'}: "
                f"{(copies if kind == 'copy' else merges)[-1]:.1f} s",
                file=sys.stderr,
            )
    merge_seconds, copy_seconds = statistics.median(merges), statistics.median(copies)
    return {
        "ratio": merge_seconds / copy_seconds,
        "merge_seconds": merge_seconds,
        "copy_seconds": copy_seconds,
        "all_merge_seconds": merges,
        "all_copy_seconds": copies,
        "peak_rss_bytes": max(peaks),
        "samples_bit_equal_to_peft": equal,
        "cache": "warm" if warm else "cold",
        "load_average": os.getloadavg()[0],
    }


def quick(place: Path, layers: int) -> dict[str, Any]:
    """Two cold pairs of one file: loading torch and PEFT costs seconds that small files show."""
    total = make_model(place / "base", layers, 32_000, 10**13)
    make_adapter(place / "adapter", layers)
    figures = measure(place / "base", place / "adapter", place / "out", 2, warm=False)
    return {**figures, "checkpoint_bytes": total}


def full(place: Path, layers: int, pairs: int) -> dict[str, Any]:
    """Both layouts, cold and warm, and PEFT."""
    runs: dict[str, Any] = {}
    make_adapter(place / "adapter", layers)
    for layout, shard_bytes in (("one_file", 10**13), ("one_5gb_shard", 5_100_000_000)):
        base = place / layout
        total = make_model(base, layers, 128_256, shard_bytes)
        for warm in (False, True):
            figures = measure(base, place / "adapter", place / "out", pairs, warm)
            files = sorted((p.stat().st_size for p in base.glob("*.safetensors")), reverse=True)
            key = f"{layout}_{figures['cache']}"
            runs[key] = {**figures, "checkpoint_bytes": total, "file_bytes": files}
        if layout == "one_file":
            runs["peft_in_memory"] = peft(base, place, total)
            runs["in_1gib_cgroup"] = in_cgroup(base, place, 2**30)
        shutil.rmtree(base)
    first = runs["one_file_cold"]
    measured = [run for run in runs.values() if run and "ratio" in run]
    return {
        "ratio": max(run["ratio"] for run in measured),
        "merge_seconds": first["merge_seconds"],
        "copy_seconds": first["copy_seconds"],
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in measured),
        "checkpoint_bytes": first["checkpoint_bytes"],
        "runs": runs,
    }


def peft(base: Path, place: Path, total: int) -> dict[str, Any] | None:
    """PEFT's merge of the same adapter, where the machine has the memory for it."""
    free = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    if free < total * 1.4 + 2**30:
        return None
    set_cache(base, warm=False)
    options = (base, place / "adapter", place / "out", "--in-memory")
    seconds, result = timed(lambda: merge(*options))
    shutil.rmtree(place / "out")
    return {"merge_seconds": seconds, "peak_rss_bytes": result["peak_rss_bytes"]}


def in_cgroup(base: Path, place: Path, limit_bytes: int) -> dict[str, Any] | None:
    """The merge in a memory cgroup, page cache included; None where none can be made here."""
    for root, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(root) / f"tuneserve-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
        except OSError:
            continue
        break
    else:
        return None
    enter = ("sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh")
    try:
        set_cache(base, warm=False)
        options = (base, place / "adapter", place / "out")
        seconds, result = timed(lambda: merge(*options, prefix=enter))
    finally:
        group.rmdir()
    shutil.rmtree(place / "out")
    return {
        "limit_bytes": limit_bytes,
        "merge_seconds": seconds,
        "peak_rss_bytes": result["peak_rss_bytes"],
    }


def main() -> None:
    """Measure and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="under two minutes, writes nothing")
    parser.add_argument("--layers", type=int, help="14 (default): 8.2 GB; 32: 16 GB; quick: 9")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--record", type=Path, default=RESULT, help="file for the figures")
    parser.add_argument("--place", type=Path, help="folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=options.place) as folder:
        place = Path(folder)
        if options.quick:
            result = quick(place, options.layers or 9)
        else:
            result = full(place, options.layers or 14, options.pairs)
    result["machine"] = {
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "peft": version("peft"),
    }
    if not options.quick:
        options.record.parent.mkdir(exist_ok=True)
        options.record.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
