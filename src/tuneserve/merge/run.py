"""The merge from beginning to end: plan, check, stream shard by shard, prove."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.artifacts import file_sha256, fsync_directory, write_json_atomic
from tuneserve.checkpoint.headers import INDEX_NAME, read_header
from tuneserve.errors import DiskFull
from tuneserve.merge.journal import JOURNAL_NAME, PART_SUFFIX, PROOF_NAME, Journal
from tuneserve.merge.plan import MergePlan
from tuneserve.merge.prepare import BaseWeights, Job, prepare
from tuneserve.merge.proof import FORMAT, read_proof, summarize_survival, versions
from tuneserve.merge.stream import ShardStream
from tuneserve.merge.tiling import header_bytes
from tuneserve.progress import Progress, human_bytes

log = logging.getLogger(__name__)

# Room asked for beside the weights: journal, proof, index and the file system's own blocks.
_SPARE_BYTES = 8 * 2**20

# Two correct sums of the same rows differ by a few units in the last place of bfloat16 (2**-8) at
# most; a wrong scale or orientation differs by far more.
_SAMPLE_TOLERANCE = 2**-6


@dataclass(frozen=True)
class MergeResult:
    """What a merge did.

    Attributes:
        seconds: Wall time of this call.
        peak_rss_bytes: Largest resident memory of this process since it started (VmHWM).
        bytes_written: Bytes of weights that this call wrote; less than the whole after a resume.
        merged: Tensors that were changed.
        copied: Tensors that are byte for byte the base's.
        delta_survival: Share of the adapter's change that survived rounding, over all tensors.
        sampled: Tensors compared with PEFT's own layer.
        sampled_equal: How many of them were equal bit for bit.
        notes: What had to be said: repairs, missing tokenizer, missing fingerprint.
    """

    seconds: float
    peak_rss_bytes: int
    bytes_written: int
    merged: int
    copied: int
    delta_survival: float | None = None
    sampled: int = 0
    sampled_equal: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return {**asdict(self), "notes": list(self.notes)}


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
            with a torch built for CUDA).
        tokenizer_from: Folder whose tokenizer files are taken instead of the adapter's.
        in_memory: Let PEFT merge, with the whole model in memory.
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

        return merge_in_memory(base, adapter, out, tokenizer_from=tokenizer_from, started=started)
    job = prepare(base, adapter, out, base_weights, max_memory_bytes, tokenizer_from)
    done = _already_done(out, job)
    if done is not None:
        log.info("%s: is complete already", out)
        return _result(done, started, bytes_written=0)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(contextlib.closing(Journal.open(out, job.key)))
        for note in job.notes:
            log.warning("%s", note)
        _check_disk(out, job, journal)
        sampler = _sampler(job, sample)
        if sampler is not None:
            stack.callback(sampler.close)
        written = _stream(job, journal, progress)
        proof = _proof(job, journal, _finish_files(job, journal))
        if sampler is not None:
            proof["peft_sample"] = _sample(job, out, sampler)
        proof["peak_rss_bytes"] = peak_rss_bytes()
        proof["seconds"] = round(time.monotonic() - started, 3)
        write_json_atomic(out / PROOF_NAME, proof)
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


def _check_disk(out: Path, job: Job, journal: Journal) -> None:
    sizes = _shard_bytes(job.plan)
    missing = sum(size for name, size in sizes.items() if name not in journal.finished)
    needed = missing + sum(len(data) for data in job.companions.files.values()) + _SPARE_BYTES
    parts = sum(p.stat().st_size for p in out.glob(".*.part"))
    stat = os.statvfs(out)
    free = stat.f_bavail * stat.f_frsize + parts
    if free < needed:
        raise DiskFull(
            f"{out}: {human_bytes(needed)} ({needed} bytes) needed, {human_bytes(free)} free",
            expected=f"{human_bytes(needed)} free",
            hint="make room or choose another disk, then run the same command again",
            details={"needed_bytes": needed, "free_bytes": free},
        )


def _shard_bytes(plan: MergePlan) -> dict[str, int]:
    return {s.name: len(header_bytes(s)) + sum(o.nbytes for o in s.outputs) for s in plan.shards}


def _stream(job: Job, journal: Journal, progress: Callable[[int, int], None] | None) -> int:
    """Merge the shards that are not finished; the bytes written now."""
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
        try:
            for shard in todo:
                report = stream.merge(shard, journal.part(shard.name))
                journal.finish(shard.name, asdict(report))
        except DiskFull as error:
            journal.discard_all()
            error.details["needed_bytes"] = sum(sizes.values())
            raise
        except BaseException:
            journal.discard_parts()
            raise
    return total


def _load_engine() -> None:
    """Start to load torch: it takes seconds, in which bytes can flow already."""
    threading.Thread(
        target=importlib.import_module, args=("tuneserve.merge.engine",), daemon=True
    ).start()


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
        _write_atomic(journal.folder / name, data)
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
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_atomic(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    provisional = path.with_name(f".{path.name}{PART_SUFFIX}")
    with provisional.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    provisional.replace(path)
    fsync_directory(path.parent)


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
            "sha256": file_sha256(job.adapter.shard.file),
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


def _sampler(job: Job, wanted: bool) -> Any:
    """The process that compares with PEFT; None where nothing was updated or it is not wanted."""
    if not wanted or not job.adapter.loras:
        return None
    from tuneserve.merge.sample import Sampler

    return Sampler()


def _sample(job: Job, folder: Path, sampler: Any) -> dict[str, Any]:
    """Rows of some tensors, compared with what PEFT makes of them.

    Raises:
        AdapterError: They differ by more than rounding.
    """
    from tuneserve.merge.sample import requests

    shards = [read_header(folder / s.name) for s in job.plan.shards]
    written = {info.name: info for shard in shards for info in shard.tensors}
    answer = dict(sampler.compare(requests(job.plan, written), job.nf4))
    if answer.get("error"):
        log.warning("the comparison with PEFT could not be made: %s", answer["error"])
    far = [t["name"] for t in answer["tensors"] if t["relative_difference"] > _SAMPLE_TOLERANCE]
    assert not far, f"merged rows differ from PEFT's: {far}"
    return answer


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


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
