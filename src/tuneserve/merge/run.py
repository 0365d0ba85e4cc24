"""The merge from beginning to end: plan, check, stream shard by shard, prove."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneserve.artifacts import write_atomic
from tuneserve.checkpoint.headers import INDEX_NAME
from tuneserve.errors import AdapterError
from tuneserve.merge.imports import uncollected
from tuneserve.merge.journal import JOURNAL_NAME, PART_SUFFIX, PROOF_NAME, Journal
from tuneserve.merge.plan import MergePlan
from tuneserve.merge.prepare import BaseWeights, Job, prepare
from tuneserve.merge.proof import FORMAT, read_proof, summarize_survival, versions
from tuneserve.merge.result import MergeResult, peak_rss_bytes
from tuneserve.merge.space import SPARE_BYTES, check_room, owned
from tuneserve.merge.stream import ShardStream
from tuneserve.merge.tiling import header_bytes
from tuneserve.progress import Progress, human_bytes

if TYPE_CHECKING:
    from tuneserve.merge.sample import Sampler

log = logging.getLogger(__name__)


def merge_adapter(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    base_weights: BaseWeights = "original",
    max_memory_bytes: int | None = None,
    tokenizer_from: Path | None = None,
    in_memory: bool = False,
    sample: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> MergeResult:
    """Merge a saved PEFT adapter into its base and write a checkpoint.

    Args:
        base: Folder of the base model, safetensors, 16 or 32 bits.
        adapter: Folder of the adapter; tokenizer, template and generation config are taken from it.
        out: Folder to fill: new, empty, or the unfinished work of this same merge.
        base_weights: Onto the original weights, or onto the dequantized ones that training saw.
        max_memory_bytes: Most resident memory to use; None takes the default of about 350 MiB (600
            with a torch built for CUDA); with `in_memory`, all that is free.
        tokenizer_from: Folder whose tokenizer files are taken instead of the adapter's.
        in_memory: Let PEFT merge, with the whole model in memory, onto the original weights.
        sample: Compare some merged rows with PEFT's own layer, in a process beside the merge.
        progress: Called with bytes done and bytes in all.

    Raises:
        AdapterError: The adapter does not fit the base, or is of a kind that is not handled.
        ModelError: The base cannot be used.
        OutputExists: `out` holds something else, or another merge is writing it.
        DiskFull: There is no room for the result.
        OutOfMemory: `max_memory_bytes` is below the floor.
    """
    started = time.monotonic()
    if in_memory:
        from tuneserve.merge.in_memory import merge_in_memory

        return merge_in_memory(
            base, adapter, out, base_weights, max_memory_bytes, tokenizer_from, started
        )
    job = prepare(base, adapter, out, base_weights, max_memory_bytes, tokenizer_from)
    done = _already_done(out, job)
    if done is not None:
        log.info("%s: is complete already", out)
        return _result(done, started, bytes_written=0)
    sizes = _shard_bytes(job.plan)
    small = (*job.companions.files, INDEX_NAME, PROOF_NAME)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(owned(out, job.key, sizes, _needed_bytes(job, {}), small))
        for note in job.notes:
            log.warning("%s", note)
        todo = {name: size for name, size in sizes.items() if name not in journal.finished}
        check_room(out, _needed_bytes(job, todo))
        sampler = _sampler(job, sample)
        if sampler is not None:
            stack.callback(sampler.close)
        written = _stream(job, journal, progress, sampler)
        answer = None if sampler is None else _checked(sampler.answers(), adapter)
        proof = _proof(job, journal, _finish_files(job, journal))
        if answer is not None:
            proof["peft_sample"] = answer
        proof["peak_rss_bytes"] = peak_rss_bytes()
        proof["seconds"] = round(time.monotonic() - started, 3)
        text = json.dumps(proof, indent=1, sort_keys=True, allow_nan=False)
        _write_small(out / PROOF_NAME, f"{text}\n".encode())
        journal.complete()
    return _result(proof, started, bytes_written=written)


def _already_done(out: Path, job: Job) -> dict[str, Any] | None:
    """The proof of a finished merge of the same inputs, if `out` holds it whole."""
    proof = read_proof(out)
    if proof is None or proof.get("key") != job.key or (out / JOURNAL_NAME).exists():
        return None
    for name, entry in proof["outputs"].items():
        path = out / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return None
    return proof


def _shard_bytes(plan: MergePlan) -> dict[str, int]:
    return {s.name: len(header_bytes(s)) + sum(o.nbytes for o in s.outputs) for s in plan.shards}


def _needed_bytes(job: Job, shards: Mapping[str, int]) -> int:
    """Room for these shards and everything beside them."""
    return sum(shards.values()) + sum(map(len, job.companions.files.values())) + SPARE_BYTES


def _stream(
    job: Job,
    journal: Journal,
    progress: Callable[[int, int], None] | None,
    sampler: Sampler | None,
) -> int:
    """Merge the shards that are not finished; the bytes written now.

    Samples of a shard are sent off as soon as it is finished.
    """
    _load_engine()
    sizes = _shard_bytes(job.plan)
    todo = [s for s in job.plan.shards if s.name not in journal.finished]
    if len(todo) < len(sizes):
        log.info("resuming: %d of %d files are finished", len(sizes) - len(todo), len(sizes))
    journal.discard_parts()
    total = sum(sizes[s.name] for s in todo)
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(_progress(total, progress))
        stream = ShardStream(job.budget, job.adapter.shard.file, job.nf4, advance)
        stack.callback(stream.close)
        if sampler is not None:
            for name in journal.finished:
                sampler.ask(journal.folder / name)
        try:
            for shard in todo:
                report = stream.merge(shard, journal.part(shard.name))
                journal.finish(shard.name, asdict(report))
                if sampler is not None:
                    sampler.ask(journal.folder / shard.name)
        except BaseException:
            journal.discard_parts()
            raise
    return total


def _load_engine() -> None:
    """Start to load torch: it takes seconds, in which bytes can flow already."""
    # Where torch is loaded, so is more: what the collector is kept from would be others' as well.
    keep_off = uncollected() if "torch" not in sys.modules else contextlib.nullcontext()

    def load() -> None:
        with keep_off:
            importlib.import_module("tuneserve.merge.engine")

    threading.Thread(target=load, daemon=True).start()


@contextlib.contextmanager
def _progress(
    total: int, call: Callable[[int, int], None] | None
) -> Iterator[Callable[[int], None]]:
    """A function to call with bytes done: it logs lines with rate and time left."""
    started = time.monotonic()
    done = 0
    with Progress("merge", total=round(total / 2**20) or 1, unit="MiB") as lines:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            rate = done / max(time.monotonic() - started, 1e-9)
            lines.advance(done // 2**20 - lines.done, f"{human_bytes(rate)}/s")
            if call:
                call(done, total)

        yield advance


def _finish_files(job: Job, journal: Journal) -> dict[str, dict[str, Any]]:
    """Write the small files; size and hash of every output file by name."""
    files = dict(job.companions.files)
    if job.base.index_metadata is not None:
        files[INDEX_NAME] = _index(job)
    for name, data in files.items():
        _write_small(journal.folder / name, data)
    outputs = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    for name, line in journal.finished.items():
        outputs[name] = {"bytes": line["bytes"], "sha256": line["sha256"]}
    return dict(sorted(outputs.items()))


def _index(job: Job) -> bytes:
    weight_map = {o.name: s.name for s in job.plan.shards for o in s.outputs}
    metadata = {**(job.base.index_metadata or {}), "total_size": job.plan.data_bytes}
    if "total_parameters" in metadata:
        outputs = (output for shard in job.plan.shards for output in shard.outputs)
        metadata["total_parameters"] = sum(math.prod(output.shape) for output in outputs)
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_small(path: Path, data: bytes) -> None:
    """Provisional under a name that the journal sweeps after a kill."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, data, path.with_name(f".{path.name}{PART_SUFFIX}"))


def _proof(job: Job, journal: Journal, outputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    lines = [journal.finished[s.name] for s in job.plan.shards]
    tensors = {name: report for line in lines for name, report in line["tensors"].items()}
    counts = job.plan.counts()
    return {
        "format": FORMAT,
        "key": job.key,
        "base": {
            "digest": job.fingerprint["digest"],
            "checked_against_training": job.fingerprint_checked,
            "weights": job.base_weights,
            "nf4": job.nf4,
            "sha256": {line["shard"]: line["source_sha256"] for line in lines},
        },
        "adapter": {
            "sha256": job.adapter_sha256,
            "tensors": len(job.adapter.shard.tensors),
        },
        "tokenizer_from": job.companions.tokenizer_from,
        "outputs": outputs,
        "counts": counts,
        "merged": sum(n for kind, n in counts.items() if kind != "copy"),
        "copied": counts.get("copy", 0),
        "merged_bytes": sum(line["merged_bytes"] for line in lines),
        "copied_bytes": sum(line["copied_bytes"] for line in lines),
        "finite": True,  # a merged value that is not finite ends the merge
        "delta_survival": summarize_survival(tensors),
        "tensors": tensors,
        "notes": list(job.notes),
        "versions": versions(),
    }


def _sampler(job: Job, wanted: bool) -> Sampler | None:
    """The process that compares with PEFT; None where nothing was updated or it is not wanted."""
    if not wanted or not job.adapter.loras:
        return None
    from tuneserve.merge.sample import Sampler

    return Sampler(job.plan, job.nf4)


def _checked(answer: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """The comparison with PEFT, if it found no difference but rounding.

    Raises:
        AdapterError: Merged rows are not what PEFT makes of them.
    """
    if answer.get("error"):
        log.warning("the comparison with PEFT could not be made: %s", answer["error"])
    far = [t["name"] for t in answer["tensors"] if t["far"]]
    if far:
        raise AdapterError(
            f"{adapter}: merged rows differ from what PEFT makes of them: {', '.join(far)}",
            expected="differences by rounding alone",
            hint="merge with --in-memory into another folder, which lets PEFT do it, and report "
            "this on the project's issue tracker with adapter_config.json",
            details={"tensors": [t for t in answer["tensors"] if t["far"]]},
        )
    rounded = [t for t in answer["tensors"] if t["plain"] and not t["bit_equal"]]
    if rounded:
        log.warning(
            "%d of %d compared tensors are PEFT's up to the last place of %d values, not bit for "
            "bit: this machine takes sums in another order; first: %s",
            len(rounded),
            answer["checked"],
            sum(t["different_elements"] for t in rounded),
            rounded[0]["name"],
        )
    return answer


def _result(proof: Mapping[str, Any], started: float, bytes_written: int) -> MergeResult:
    sample = proof.get("peft_sample") or {}
    return MergeResult(
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=peak_rss_bytes(),
        bytes_written=bytes_written,
        merged=proof["merged"],
        copied=proof["copied"],
        delta_survival=proof["delta_survival"]["total"],
        sampled=sample.get("checked", 0),
        sampled_equal=sample.get("bit_equal", 0),
        notes=tuple(proof["notes"]),
    )
