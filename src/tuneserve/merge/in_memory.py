"""The merge that PEFT does itself, with the whole model in memory. Engine file.

For adapters that are not merged tile by tile (see `tuneserve.merge.adapter.refusals`). Needs
memory for the whole model and more; nothing of it is proven beyond finite values.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from tuneserve.artifacts import file_sha256, write_json_atomic
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.errors import AdapterError, OutOfMemory, OutputExists
from tuneserve.merge import companions as small
from tuneserve.merge.adapter import read_config
from tuneserve.merge.journal import PROOF_NAME
from tuneserve.merge.proof import FORMAT, versions
from tuneserve.merge.run import MergeResult, peak_rss_bytes
from tuneserve.progress import human_bytes


def merge_in_memory(
    base: Path, adapter: Path, out: Path, *, tokenizer_from: Path | None, started: float
) -> MergeResult:
    """Load the model, let PEFT merge, save it beside `out` and rename.

    Raises:
        AdapterError: PEFT cannot merge it either.
        OutputExists: `out` is not empty.
        OutOfMemory: The model is larger than the free memory.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExists(
            f"{out}: is not empty",
            expected="a folder that is new or empty",
            hint="choose another folder, or remove this one",
        )
    checkpoint = Checkpoint.open(base)
    config = small.read_json(base / "config.json")
    read_config(adapter)
    _check_memory(checkpoint)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _merge_and_save(base, adapter, part)
        changed = json.loads((part / "config.json").read_bytes())
        changes = {
            name: changed[name]
            for name in ("tie_word_embeddings", "vocab_size")
            if name in changed and changed[name] != config.get(name, changed[name])
        }
        found = small.collect(base, config, changes, adapter, tokenizer_from)
        for name, data in found.files.items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(data)
        files = [p for p in sorted(part.rglob("*")) if p.is_file()]
        written = sum(p.stat().st_size for p in files)
        merged = Checkpoint.open(part)
        proof = {
            "format": FORMAT,
            "key": "in-memory",
            "outputs": {
                p.relative_to(part).as_posix(): {
                    "bytes": p.stat().st_size,
                    "sha256": file_sha256(p),
                }
                for p in files
            },
            "merged": len(merged.tensors),
            "copied": 0,
            "notes": list(found.notes),
            "versions": versions(),
            "seconds": round(time.monotonic() - started, 3),
        }
        write_json_atomic(part / PROOF_NAME, proof)
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return MergeResult(
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=peak_rss_bytes(),
        bytes_written=written,
        merged=len(merged.tensors),
        copied=0,
        notes=found.notes,
    )


def _check_memory(checkpoint: Checkpoint) -> None:
    text = Path("/proc/meminfo").read_text()
    free = int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    needed = int(checkpoint.data_bytes * 1.2) + 2**30
    if free < needed:
        raise OutOfMemory(
            f"merging in memory needs about {human_bytes(needed)}, {human_bytes(free)} are free",
            expected="room for the whole model",
            hint="merge without --in-memory, or on a larger machine",
            details={"needed_bytes": needed, "free_bytes": free},
        )


def _merge_and_save(base: Path, adapter: Path, part: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    try:
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (ValueError, RuntimeError, NotImplementedError, TypeError, KeyError) as error:
        raise AdapterError(
            f"{adapter}: PEFT cannot merge it: {error}", expected="an adapter that PEFT can merge"
        ) from error
    bad = [n for n, p in merged.named_parameters() if not bool(torch.isfinite(p).all())]
    if bad:
        raise AdapterError(
            f"{adapter}: merged weights are not finite: {', '.join(bad[:5])}",
            expected="finite weights",
        )
    merged.generation_config.do_sample = True  # what is saved here is replaced by the checked one
    merged.save_pretrained(part, max_shard_size="5GB")
    (part / "generation_config.json").unlink(missing_ok=True)
