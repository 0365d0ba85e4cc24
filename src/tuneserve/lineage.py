"""From an artifact back to the files, settings, versions and metrics that made it."""

from __future__ import annotations

from typing import Any

from tuneserve.artifacts import Store
from tuneserve.progress import human_bytes, human_seconds


def trace(store: Store, id: str) -> dict[str, Any]:
    """The artifact and, under `inputs`, everything it was made from, down to the data files.

    Raises:
        InputError: The artifact, or one it was made from, is not in the store.
    """
    artifact = store.get(id)
    manifest = artifact.manifest
    return {
        "id": artifact.id,
        "stage": manifest["stage"],
        "path": str(artifact.path),
        "base": manifest["base"],
        "key": manifest["key"],
        "versions": manifest["versions"],
        "metrics": manifest["metrics"],
        "finished": manifest["finished"],
        "seconds": manifest["seconds"],
        "bytes": sum(entry["size"] for entry in manifest["files"]),
        "data": {side: manifest["config"]["data"][side] for side in ("train", "eval")},
        "inputs": {kind: trace(store, input_id) for kind, input_id in manifest["inputs"].items()},
    }


def lineage_text(found: dict[str, Any], indent: int = 0) -> str:
    """The trace as an indented tree."""
    pad = "  " * indent
    lines = [
        f"{pad}{found['id']}  ({found['stage']}, {found['finished']}, "
        f"{human_seconds(found['seconds'])}, {human_bytes(found['bytes'])})"
    ]
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items() if v)
    lines.append(f"{pad}  versions: {versions}")
    for side, paths in found["data"].items():
        if paths and not found["inputs"]:
            digests = found["key"].get("files", {}).get(side, [])
            lines.append(f"{pad}  {side}: {', '.join(paths)}")
            lines += [f"{pad}    sha256 {digest}" for digest in digests]
    if found["key"].get("base"):
        lines.append(f"{pad}  base: {found['base']} ({found['key']['base'][:16]})")
    for child in found["inputs"].values():
        lines.append(lineage_text(child, indent + 1))
    return "\n".join(lines)
