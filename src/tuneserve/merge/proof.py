"""`mergeproof.json`: what went in, what came out, and how it was checked; and checking it again."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tuneserve.artifacts import file_sha256
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.errors import ModelError
from tuneserve.merge.companions import tokenizer_files
from tuneserve.merge.journal import PROOF_NAME

FORMAT = 1

# What loaders look for beside the tokenizer's files: one that was added would change the model.
_READ_BY_LOADERS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin*",
    "adapter_config.json",
    "generation_config.json",
)


def summarize_survival(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How much of the adapter's change survived rounding, over all updated tensors.

    `total` is 1 - ||applied - exact|| / ||exact|| over all tensors together.
    """
    updated = {n: t for n, t in tensors.items() if "delta_survival" in t}
    if not updated:
        return {"total": None, "lowest": None, "lowest_tensor": None}
    delta = sum(t["delta_norm"] ** 2 for t in updated.values())
    lost = sum((t["delta_norm"] * (1 - t["delta_survival"])) ** 2 for t in updated.values())
    worst = min(updated, key=lambda n: updated[n]["delta_survival"])
    return {
        "total": 1 - (lost / delta) ** 0.5 if delta else 1.0,
        "lowest": updated[worst]["delta_survival"],
        "lowest_tensor": worst,
    }


def versions() -> dict[str, str]:
    """Of what decided the bytes."""
    return {"python": platform.python_version(), "torch": version("torch")}


def read_proof(folder: Path) -> dict[str, Any] | None:
    """The proof in a folder; None where there is none or it cannot be read."""
    try:
        proof = json.loads((folder / PROOF_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    is_usable = isinstance(proof, dict) and proof.get("format") == FORMAT
    return proof if is_usable and _names_files(proof.get("outputs")) else None


def _names_files(outputs: Any) -> bool:
    return isinstance(outputs, dict) and all(
        isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys()
        for entry in outputs.values()
    )


def verify(folder: Path) -> dict[str, Any]:
    """Compare a merged folder with its proof: every file's bytes, and headers against the index.

    Returns:
        Files and bytes that were checked.

    Raises:
        ModelError: There is no proof, or files are missing, changed, or unknown to it; all are
            named.
    """
    proof = read_proof(folder)
    if proof is None:
        raise ModelError(
            f"{folder}: has no usable {PROOF_NAME}",
            expected="a folder made by `tuneserve merge`",
            hint="an unfinished merge has none: run the merge again",
        )
    problems = []
    checked_bytes = 0
    for name, entry in proof["outputs"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}")
        elif file_sha256(path) != entry["sha256"]:
            problems.append(f"{name} has other bytes")
        else:
            checked_bytes += entry["bytes"]
    known = {*proof["outputs"], PROOF_NAME, "manifest.json"}
    found = {p.name for pattern in _READ_BY_LOADERS for p in folder.glob(pattern)}
    added = sorted({*found, *tokenizer_files(folder)} - known)
    problems += [f"{name} is not part of the merge" for name in added]
    if not problems:
        Checkpoint.open(folder)
    if problems:
        raise ModelError(
            f"{folder}: does not match its {PROOF_NAME}: {'; '.join(problems[:10])}",
            expected="the files as the merge wrote them",
            hint="merge again; the folder was changed after the merge",
            details={"problems": problems},
        )
    return {"files": len(proof["outputs"]), "bytes": checked_bytes}
