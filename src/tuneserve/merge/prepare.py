"""What is read and checked before a merge writes a byte."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tuneserve.checkpoint.fingerprint import compare, fingerprint
from tuneserve.checkpoint.headers import Checkpoint, TensorInfo
from tuneserve.checkpoint.jsonfile import read_json
from tuneserve.checkpoint.quantized import packed_by, quantized_by
from tuneserve.errors import AdapterError, InputError, ModelError, OutputExists
from tuneserve.merge import companions as small
from tuneserve.merge.adapter import Adapter, open_adapter
from tuneserve.merge.journal import PROOF_NAME
from tuneserve.merge.plan import MergePlan, plan_merge
from tuneserve.merge.proof import FORMAT, versions
from tuneserve.merge.tiling import Budget, budget

# Weights that share a scale: what transformers takes, and where tiles may end (`tiling`).
_NF4_BLOCK = 64

BaseWeights = Literal["original", "nf4"]


@dataclass
class Job:
    """A merge that was planned and checked."""

    base: Checkpoint
    adapter: Adapter
    plan: MergePlan
    budget: Budget
    companions: small.Companions
    base_weights: BaseWeights
    nf4: dict[str, Any] | None
    fingerprint: dict[str, Any]
    fingerprint_checked: bool
    adapter_sha256: str
    key: str
    notes: tuple[str, ...]


def prepare(
    base: Path,
    adapter: Path,
    out: Path,
    base_weights: BaseWeights,
    max_memory_bytes: int | None,
    tokenizer_from: Path | None,
) -> Job:
    """Everything that can be refused is refused here, before a byte is written."""
    refuse_no_folder(out)
    checkpoint = Checkpoint.open(base)
    config = read_json(base / "config.json")
    refuse_quantized(base, config)
    opened = open_adapter(adapter)
    notes: list[str] = []
    found_base = fingerprint(base)
    checked = check_fingerprint(found_base, base, adapter, notes)
    nf4, modules = _nf4_settings(adapter) if base_weights == "nf4" else (None, frozenset())
    plan = plan_merge(checkpoint, config, opened, modules)
    _check_aliases(plan)
    found = small.collect(base, config, plan.config, adapter, tokenizer_from)
    notes += small.check_vocabulary(found, plan.vocabulary, base, adapter)
    weights_sha256, adapter_digest = opened.digests()
    if changes_nothing(opened):
        notes.append("every update of the adapter is zero: the merged weights are the base's")
    return Job(
        checkpoint,
        opened,
        plan,
        budget(plan, max_memory_bytes),
        found,
        base_weights,
        nf4,
        found_base,
        checked,
        weights_sha256,
        _key(checkpoint, adapter_digest, found, base_weights, nf4),
        (*notes, *found.notes),
    )


def refuse_no_folder(out: Path) -> None:
    """What lies at `out`, if anything does, and above it must be folders; the lowest takes files.

    Raises:
        OutputExists: Something else is there.
        InputError: The folder cannot be written to.
    """
    for path in (out, *out.parents):
        try:
            is_folder = path.is_dir()
        except OSError as error:  # no way in, or a name that no disk takes
            raise InputError(
                f"{path}: cannot be looked at ({error.strerror})",
                expected="a folder that this user may write to",
                hint="choose another folder for --out",
            ) from error
        if is_folder:
            if os.access(path, os.W_OK | os.X_OK) or (out / PROOF_NAME).exists():
                return
            raise InputError(
                f"{path}: cannot be written to",
                expected="a folder that this user may write to, on a disk that takes files",
                hint="choose another folder for --out, or change its owner or its mount",
            )
        if os.path.lexists(path):
            what = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
            raise OutputExists(f"{path}: is {what}", expected="a folder, or a new name")


def changes_nothing(adapter: Adapter) -> bool:
    """Whether one factor of every update is zero, as before the first step of a training."""
    if adapter.saved or adapter.tokens:
        return False
    return all(
        not (lora.magnitude or lora.bias) and (_is_zero(lora.b) or _is_zero(lora.a))
        for lora in adapter.loras.values()
    )


def _is_zero(info: TensorInfo) -> bool:
    step = 2**20
    with info.file.open("rb", buffering=0) as stream:
        return not any(
            os.pread(stream.fileno(), min(step, info.end - at), at).strip(b"\0")
            for at in range(info.begin, info.end, step)
        )


def refuse_quantized(base: Path, config: Mapping[str, Any]) -> None:
    """A base whose weights are quantized takes no merge.

    Raises:
        ModelError: It is one.
    """
    method = quantized_by(config) or packed_by(base, Checkpoint.open(base).tensors.values())
    if method:
        raise ModelError(
            f"{base}: its weights are quantized ({method})",
            expected="the 16-bit weights",
            hint="a merge into quantized weights would round the adapter away: pass the original "
            "16-bit model, and quantize the result",
        )


def check_fingerprint(
    found: Mapping[str, Any], base: Path, adapter: Path, notes: list[str]
) -> bool:
    """Whether the adapter's record of its base was there; it then agrees with `found`.

    Raises:
        AdapterError: It is the record of another base; what differs is named.
    """
    path = adapter / "base_fingerprint.json"
    if not path.is_file():
        notes.append(
            "the adapter does not say which base it was trained on: only shapes were checked"
        )
        return False
    recorded = read_json(path)
    if recorded.get("digest") != found["digest"]:
        differences = compare(recorded, base)
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise AdapterError(
            f"{base}: is not the base that {adapter} was trained on; "
            f"different: {', '.join(differences[:5])}{more}",
            expected="the same config and weights as in training",
            hint="pass the base of the training run",
            details={"differences": differences[:100]},
        )
    return True


def _nf4_settings(adapter: Path) -> tuple[dict[str, Any], frozenset[str]]:
    """How training quantized the base, and which modules, from its sidecar."""
    path = adapter / "training.json"
    sidecar = read_json(path) if path.is_file() else {}
    settings, modules = sidecar.get("quantization"), sidecar.get("quantized_modules")
    are_names = isinstance(modules, list) and all(isinstance(m, str) for m in modules)
    if not (isinstance(settings, dict) and settings and are_names and modules):
        raise AdapterError(
            f"{adapter}: does not say how its base was quantized in training",
            expected="training.json with quantization and quantized_modules",
            hint="merge onto the original weights (--base-weights original)",
        )
    blocksize = settings.get("blocksize", _NF4_BLOCK)
    if blocksize != _NF4_BLOCK:
        raise AdapterError(
            f"{path}: blocksize {blocksize!r} is not known", expected=str(_NF4_BLOCK)
        )
    if settings.get("quant_type", "nf4") not in ("nf4", "fp4"):
        raise AdapterError(
            f"{path}: quant_type {settings['quant_type']!r} is not known", expected="nf4"
        )
    return dict(settings), frozenset(modules)


def _check_aliases(plan: MergePlan) -> None:
    """The same parameter saved under two names must be the same bytes."""
    for first, second in plan.aliases:
        if (
            first.dtype != second.dtype
            or first.shape != second.shape
            or _bytes_differ(first, second)
        ):
            raise AdapterError(
                f"{first.file}: {first.name} and {second.name} are one parameter of the model, "
                "but hold different values",
                expected="one value, since the model ties them",
                hint="train again with ensure_weight_tying, or without tying",
            )


def _bytes_differ(first: TensorInfo, second: TensorInfo) -> bool:
    step = 2**22
    with first.file.open("rb", buffering=0) as stream:
        descriptor = stream.fileno()
        return any(
            os.pread(descriptor, min(step, first.nbytes - at), first.begin + at)
            != os.pread(descriptor, min(step, first.nbytes - at), second.begin + at)
            for at in range(0, first.nbytes, step)
        )


def _key(
    base: Checkpoint,
    adapter_digest: str,
    companions: small.Companions,
    base_weights: BaseWeights,
    nf4: dict[str, Any] | None,
) -> str:
    """Which merge this is: the same key writes the same bytes."""
    shards = [
        [s.file.name, s.file_bytes, s.file.stat().st_mtime_ns, hashlib.sha256(s.raw).hexdigest()]
        for s in base.shards
    ]
    files = {name: hashlib.sha256(data).hexdigest() for name, data in companions.files.items()}
    parts = [FORMAT, shards, adapter_digest, files, base_weights, nf4, versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
