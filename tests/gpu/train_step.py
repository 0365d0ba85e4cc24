"""The train stage on random weights of a known shape: peak memory and seconds a step, as JSON.

    PYTHONPATH=src python tests/gpu/train_step.py --shape qwen2-7b --rank 64 \\
        --targets q_proj,k_proj,v_proj,o_proj --micro-batch 2 --length 2048

Needs nothing from outside: weights, tokenizer and rows are made up, in memory-backed files where
there are such. It is the product's own stage that runs, from loading to the saved adapter.
Without a GPU, ``--shape tiny`` shows that the script itself works. The last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "llama-1b-tied": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "llama3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}


def main() -> None:
    """Make the model, run the stage, print what it took."""
    options = _options()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    shared = Path("/dev/shm")
    place = options.folder or tempfile.mkdtemp(dir=shared if shared.is_dir() else None)
    root = Path(place)
    try:
        base = root / f"base-{options.shape}"
        if not base.is_dir():
            _make_base(base, options.shape)
        if options.make_only:
            return
        _instrument(options)
        result = _train(root, base, options)
    finally:
        if not options.folder:
            shutil.rmtree(root)
    sys.stdout.write(json.dumps(result) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-7b")
    parser.add_argument("--method", choices=("qlora", "lora"), default="qlora")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--targets", default="all-linear", help="comma-separated, or all-linear")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--optimizer", default="adamw_8bit")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--checkpointing", choices=("true", "false", "offload"), default="true")
    parser.add_argument("--folder", help="keep weights here, and use those that are there")
    parser.add_argument("--make-only", action="store_true", help="make the weights, no more")
    parser.add_argument("--turn", type=Path, help="folder: wait for --of others, then train alone")
    parser.add_argument("--of", type=int, default=1, help="processes that take turns")
    parser.add_argument("--places", type=int, help="block inputs on the GPU with offload")
    parser.add_argument("--profile", type=Path, help="write what one step spends its time on")
    return parser.parse_args()


def _process_gpu_bytes() -> int | None:
    """What the driver counts for this process: the allocator's memory, and CUDA's own."""
    import os

    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid():
                return int(process.usedGpuMemory)
    except (ImportError, pynvml.NVMLError, TypeError):
        pass
    return None


def _instrument(options: argparse.Namespace) -> None:
    """Take turns on the GPU, and profile a step: hooks around the product's own functions."""
    from tuneserve.train import attempt, offload, watch

    if options.places is not None:
        offload.OFFLOAD_PLACES = options.places
    smoke = attempt.smoke_step

    def in_turn(*arguments: Any, **named: Any) -> None:
        _wait_for_turn(options.turn, options.of)
        smoke(*arguments, **named)

    if options.turn:
        attempt.smoke_step = in_turn
    if options.profile:
        import torch

        profiler = torch.profiler.profile()
        begin, end = watch.Watch.on_step_begin, watch.Watch.on_step_end

        def on_step_begin(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == options.steps - 1:
                profiler.start()
            begin(self, args, state, control, **more)

        def on_step_end(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
            end(self, args, state, control, **more)
            if state.global_step == options.steps:
                profiler.stop()
                averages = profiler.key_averages()
                key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
                text = averages.table(sort_by=key, row_limit=45, max_name_column_width=70)
                text += averages.table(sort_by="self_cpu_time_total", row_limit=25)
                options.profile.write_text(text, encoding="utf-8")

        watch.Watch.on_step_begin, watch.Watch.on_step_end = on_step_begin, on_step_end


_LOCK: list[Any] = []


def _wait_for_turn(folder: Path, of: int) -> None:
    """Until all have loaded, then until nobody else trains; the lock goes with the process.

    Somebody who saves or ends takes locks in the driver that the others' steps wait for.
    """
    import fcntl
    import os
    import time

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready-{os.getpid()}").touch()
    until = time.monotonic() + 170
    while len(list(folder.glob("ready-*"))) < of and time.monotonic() < until:
        time.sleep(0.05)
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    _LOCK.append(lock)
    time.sleep(1.0)  # the one before gives its memory back


def _make_base(folder: Path, shape: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.for_model(**SHAPES[shape], max_position_embeddings=32768)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _make_dataset(folder: Path, vocabulary: int, rows: int, length: int, held_out: int = 0) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    ints = pa.list_(pa.int32())
    for name, count in (("train", rows), ("eval", held_out)):
        ids = numbers.integers(4, vocabulary, (count, length), dtype=np.int32)
        labels = ids.copy()
        labels[:, : length // 4] = -100
        columns = {
            "input_ids": pa.array(list(ids), ints),
            "labels": pa.array(list(labels), ints),
            "source": [f"random:{i + 1}" for i in range(count)],
        }
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    words = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    ).save_pretrained(folder / "tokenizer")


def _train(root: Path, base: Path, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from tuneserve.artifacts import Artifact
    from tuneserve.runfile import parse_run
    from tuneserve.stages import StageContext
    from tuneserve.train.stage import run

    effective = options.micro_batch * options.accumulation
    work = Path(tempfile.mkdtemp(dir=root))
    shape = SHAPES[options.shape]
    _make_dataset(work / "dataset", shape["vocab_size"], options.steps * effective, options.length)
    targets = options.targets if options.targets == "all-linear" else options.targets.split(",")
    train = {
        "method": options.method,
        "lora": {"r": options.rank, "alpha": 2 * options.rank, "target_modules": targets},
        "effective_batch": effective,
        "max_steps": options.steps,
        "gradient_checkpointing": {"true": True, "false": False}.get(
            options.checkpointing, options.checkpointing
        ),
        "optimizer": options.optimizer,
        "attention": options.attention,
        "save_steps": 10**6,
    }
    context = StageContext(
        parse_run(
            {
                "name": "step",
                "model": {"base": str(base)},
                "data": {"train": "random"},
                "train": train,
            }
        ),
        base,
        {"dataset": Artifact("dataset-random", work / "dataset", {})},
        work / "out",
        work / "work",
        {},
        {"micro_batch": options.micro_batch},
    )
    context.out.mkdir()
    context.work.mkdir()
    metrics = run(context)
    memory = json.loads((context.out / "memory.json").read_text())
    phases: dict[str, int] = {}
    for point in memory.pop("timeline"):
        used = point.get("reserved_bytes", point["rss_bytes"])
        phases[point["phase"]] = max(used, phases.get(point["phase"], 0))
    shutil.rmtree(work)
    cuda = torch.cuda.is_available()
    return {
        **{k: v for k, v in vars(options).items() if k not in ("folder", "turn", "of", "profile")},
        **metrics,
        **memory,
        "peak_bytes_by_phase": phases,
        "process_gpu_bytes": _process_gpu_bytes() if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
