"""The merge that PEFT does itself, with the whole model in memory. Engine file.

For adapters that are not merged tile by tile (see `tuneserve.merge.adapter.refusals`). Needs
memory for the whole model and more. What can be wrong with base and adapter is checked as for the
streaming merge, and that PEFT uses every tensor of the adapter; nothing of the result is proven
beyond finite values.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuneserve.artifacts import file_sha256, write_json_atomic
from tuneserve.checkpoint.fingerprint import fingerprint
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.checkpoint.jsonfile import read_json
from tuneserve.errors import AdapterError, OutOfMemory, OutputExists
from tuneserve.merge import companions as small
from tuneserve.merge.adapter import read_config
from tuneserve.merge.journal import PROOF_NAME
from tuneserve.merge.prepare import (
    BaseWeights,
    check_fingerprint,
    refuse_no_folder,
    refuse_quantized,
)
from tuneserve.merge.proof import FORMAT, versions
from tuneserve.merge.result import MergeResult, peak_rss_bytes
from tuneserve.merge.space import SPARE_BYTES, check_room, full_disk_said
from tuneserve.progress import human_bytes


def merge_in_memory(
    base: Path,
    adapter: Path,
    out: Path,
    base_weights: BaseWeights,
    max_memory_bytes: int | None,
    tokenizer_from: Path | None,
    started: float,
) -> MergeResult:
    """Load the model, let PEFT merge, save it beside `out` and rename.

    Raises:
        AdapterError: PEFT cannot merge it either, it is of another base, or `base_weights` is not
            original.
        ModelError: The base is quantized, or cannot be used.
        OutputExists: `out` is not empty, or another merge is writing it.
        OutOfMemory: The model is larger than the free memory, or than `max_memory_bytes`.
        DiskFull: There is no room for the result.
    """
    if base_weights != "original":
        raise AdapterError(
            f"--base-weights {base_weights} is not known to the merge in memory",
            expected="--in-memory with --base-weights original",
            hint="merge without --in-memory, or onto the original weights",
        )
    _refuse_used(out)
    checkpoint = Checkpoint.open(base)
    config = read_json(base / "config.json")
    refuse_quantized(base, config)
    read_config(adapter)
    notes: list[str] = []
    found = fingerprint(base)
    checked = check_fingerprint(found, base, adapter, notes)
    _check_memory(checkpoint, max_memory_bytes)
    needed = checkpoint.data_bytes + SPARE_BYTES
    with full_disk_said(out, needed), _part(out) as part:
        check_room(part, needed)
        merged = _merge_and_save(base, adapter, part)
        notes += _add_small_files(base, config, adapter, tokenizer_from, part)
        files = [p for p in sorted(part.rglob("*")) if p.is_file()]
        written = sum(p.stat().st_size for p in files)
        proof = {
            "format": FORMAT,
            "key": "in-memory",
            "base": {
                "digest": found["digest"],
                "checked_against_training": checked,
                "weights": base_weights,
            },
            "outputs": {
                p.relative_to(part).as_posix(): {
                    "bytes": p.stat().st_size,
                    "sha256": file_sha256(p),
                }
                for p in files
            },
            "merged": merged,
            "copied": 0,
            "notes": notes,
            "versions": versions(),
            "seconds": round(time.monotonic() - started, 3),
        }
        write_json_atomic(part / PROOF_NAME, proof)
        _give_name(part, out)
    return MergeResult(
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=peak_rss_bytes(),
        bytes_written=written,
        merged=merged,
        copied=0,
        notes=tuple(notes),
    )


def _refuse_used(out: Path) -> None:
    refuse_no_folder(out)
    if out.exists() and any(out.iterdir()):
        raise OutputExists(
            f"{out}: is not empty",
            expected="a folder that is new or empty",
            hint="choose another folder, or remove this one",
        )


@contextlib.contextmanager
def _part(out: Path) -> Iterator[Path]:
    """The hidden folder beside `out` that becomes it, emptied, and locked while it is filled.

    Raises:
        OutputExists: Another merge holds it.
    """
    part = out.with_name(f".{out.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = part.stat().st_ino == os.fstat(descriptor).st_ino
        except (BlockingIOError, FileNotFoundError):  # the other one may be finished by now
            is_ours = False
        if not is_ours:
            raise OutputExists(
                f"{out}: another merge is writing it at this moment",
                expected="one merge per folder",
                hint="wait for it, or choose another folder",
            )
        _refuse_used(out)
        try:
            for left in part.iterdir():  # by an attempt that was killed
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
    finally:
        os.close(descriptor)


def _give_name(part: Path, out: Path) -> None:
    """Rename, over a folder that is still empty."""
    try:
        part.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise OutputExists(
            f"{out}: was filled by something else in the meantime",
            expected="a folder that nothing else writes to",
            hint="choose another folder",
        ) from error


def _check_memory(checkpoint: Checkpoint, max_memory_bytes: int | None) -> None:
    text = Path("/proc/meminfo").read_text()
    free = int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    needed = int(checkpoint.data_bytes * 1.2) + 2**30
    allowed = min(free, max_memory_bytes or free)
    if allowed < needed:
        limit = "allowed (--max-memory)" if allowed < free else "free"
        raise OutOfMemory(
            f"merging in memory needs about {human_bytes(needed)}, {human_bytes(allowed)} are "
            f"{limit}",
            expected="room for the whole model",
            hint="merge without --in-memory, or on a larger machine",
            details={"needed_bytes": needed, "free_bytes": free, "allowed_bytes": allowed},
        )


def _merge_and_save(base: Path, adapter: Path, part: Path) -> int:
    """Fill `part` with weights and config; how many tensors there are."""
    import torch
    from peft import PeftModel
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    try:
        wrapped = PeftModel.from_pretrained(model, str(adapter))
        # Loading once more changes nothing, and gives what loading found.
        _refuse_unused(adapter, wrapped.load_adapter(str(adapter), "default"))
        merged = wrapped.merge_and_unload()
    except (
        ValueError, RuntimeError, NotImplementedError, TypeError, KeyError, AttributeError,
    ) as error:  # fmt: skip
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
    try:
        merged.save_pretrained(part, max_shard_size="5GB")
    except SafetensorError as error:  # tells of the system's error in its text alone
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    (part / "generation_config.json").unlink(missing_ok=True)
    return len(Checkpoint.open(part).tensors)


def _refuse_unused(adapter: Path, loaded: Any) -> None:
    """Of both PEFT says nothing or only warns, and merges the rest.

    Raises:
        AdapterError: The adapter holds tensors that the model has no place for, or lacks some.
    """
    problems = [f"{name}: the model has no place for it" for name in loaded.unexpected_keys]
    problems += [f"{name}: is not in the adapter" for name in loaded.missing_keys]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise AdapterError(
            f"{adapter} does not fit the base: {'; '.join(problems[:10])}{more}",
            expected="the base that the adapter was trained on",
            details={"problems": problems[:100]},
        )


def _add_small_files(
    base: Path, config: dict[str, Any], adapter: Path, tokenizer_from: Path | None, part: Path
) -> tuple[str, ...]:
    """Config, tokenizer and generation config, checked; what had to be said about them."""
    changed = json.loads((part / "config.json").read_bytes())
    changes = {
        name: changed[name]
        for name in ("tie_word_embeddings", "vocab_size")
        if name in changed and changed[name] != config.get(name, changed[name])
    }
    found = small.collect(base, config, changes, adapter, tokenizer_from)
    rows = changed.get("vocab_size")
    rows = rows if isinstance(rows, int) else None
    notes = small.check_vocabulary(found, rows, base, adapter)
    for name, data in found.files.items():
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_bytes(data)
    return (*found.notes, *notes)
