"""Who a base model is, without reading it whole: recorded when an adapter is trained, checked at
the merge.

Two folders have the same fingerprint when their configs agree in everything that changes what the
model computes, their tensors have the same names, dtypes and shapes, and sampled blocks of every
tensor hold the same bytes. How the tensors are spread over files does not matter. About 12 KiB are
read per tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.headers import Checkpoint, TensorInfo
from tuneserve.checkpoint.jsonfile import read_json

FORMAT = 1
_BLOCK_BYTES = 4096

# Single tensors are recorded so that a difference can be named; with more than this many
# (experts), only the digests over all of them are kept, or the record would be megabytes.
_MAX_NAMED_TENSORS = 5000

# They say where a config came from or how a library runs it, not what the model is.
_IRRELEVANT = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        "_commit_hash",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "torch_dtype",
        "dtype",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "gradient_checkpointing",
    }
)


def fingerprint(model_dir: Path) -> dict[str, Any]:
    """The fingerprint of a model folder: JSON-able; `digest` identifies the whole.

    Raises:
        ModelError: The folder, its config or a header cannot be read.
    """
    config = relevant_config(model_dir)
    checkpoint = Checkpoint.open(model_dir)
    tensors = _sampled(checkpoint)
    fields = {key: _digest(value) for key, value in config.items()}
    result: dict[str, Any] = {
        "format": FORMAT,
        "config": _digest(config),
        "config_fields": fields,
        "headers": _digest({name: entry[:2] for name, entry in tensors.items()}),
        "samples": _digest({name: entry[2] for name, entry in tensors.items()}),
        "tensor_count": len(tensors),
        "data_bytes": checkpoint.data_bytes,
    }
    result["digest"] = _digest([result[key] for key in ("format", "config", "headers", "samples")])
    if len(tensors) <= _MAX_NAMED_TENSORS:
        result["tensors"] = tensors
    return result


def compare(recorded: Mapping[str, Any], model_dir: Path) -> list[str]:
    """What differs between a recorded fingerprint and a model folder; empty when it is the same
    base.
    """
    found = fingerprint(model_dir)
    if recorded.get("digest") == found["digest"]:
        return []
    differences = [
        f"config field {name}"
        for name in _differing(recorded.get("config_fields"), found["config_fields"])
    ]
    before, after = recorded.get("tensors"), found.get("tensors")
    if before is not None and after is not None:
        for name in _differing(before, after):
            differences.append(_tensor_difference(name, before.get(name), after.get(name)))
    elif recorded.get("headers") != found["headers"]:
        differences.append("names, dtypes or shapes of tensors")
    elif recorded.get("samples") != found["samples"]:
        differences.append("contents of tensors")
    return differences or ["the fingerprint's digest"]


def relevant_config(model_dir: Path) -> dict[str, Any]:
    """`config.json` without the fields that do not change what the model computes.

    Raises:
        ModelError: There is no readable config.json.
    """
    return dict(_without_irrelevant(read_json(model_dir / "config.json")))


def _without_irrelevant(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_irrelevant(v) for k, v in value.items() if k not in _IRRELEVANT}
    return value


def _sampled(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """name -> [dtype, shape, digest of the first, middle and last block], sorted by name."""
    entries: dict[str, list[Any]] = {}
    for shard in checkpoint.shards:
        descriptor = os.open(shard.file, os.O_RDONLY)
        try:
            for info in shard.tensors:
                sample = _sample(descriptor, info)
                entries[info.name] = [info.dtype, list(info.shape), sample]
        finally:
            os.close(descriptor)
    return dict(sorted(entries.items()))


def _sample(descriptor: int, info: TensorInfo) -> str:
    last = max(info.nbytes - _BLOCK_BYTES, 0)
    digest = hashlib.sha256()
    for offset in sorted({0, last // 2, last}):
        length = min(_BLOCK_BYTES, info.nbytes - offset)
        digest.update(os.pread(descriptor, length, info.begin + offset))
    return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _differing(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[str]:
    known = before or {}
    return sorted(n for n in known.keys() | after.keys() if known.get(n) != after.get(n))


def _tensor_difference(name: str, before: list[Any] | None, after: list[Any] | None) -> str:
    if before is None or after is None:
        return f"tensor {name} ({'not there before' if before is None else 'missing now'})"
    if before[:2] != after[:2]:
        return f"tensor {name} ({before[0]} {before[1]}, now {after[0]} {after[1]})"
    return f"tensor {name} (other values)"
