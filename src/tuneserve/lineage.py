"""From an artifact back to the files, settings, versions and metrics that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuneserve.artifacts import MANIFEST, Artifact, Store
from tuneserve.errors import InputError
from tuneserve.progress import human_bytes, human_seconds


def open_artifact(store: Store, text: str) -> Artifact:
    """An artifact by its folder, its id, or a unique beginning of the id.

    Raises:
        InputError: There is none, or it is damaged.
    """
    folder = Path(text).absolute()
    if (folder / MANIFEST).is_file():
        return Store(folder.parent).get(folder.name)
    return store.get(text)


def trace(store: Store, text: str, *, verify: bool = False) -> dict[str, Any]:
    """The artifact and, under `inputs`, everything it was made from, down to the data files.

    Args:
        store: Where ids are looked up.
        text: A folder, an id, or the beginning of one.
        verify: Hash every file of every artifact again.

    Raises:
        InputError: The artifact, or one it was made from, is not in the store or is damaged.
    """
    artifact = open_artifact(store, text)
    store = Store(artifact.path.parent)
    if verify and store.find(artifact.id, rehash=True) is None:
        raise InputError(
            f"{artifact.id}: its files are not the ones it was made with; it was set aside",
            hint="run the stage that made it again",
        )
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
        "sources": manifest["sources"],
        "inputs": {
            kind: trace(store, input_id, verify=verify)
            for kind, input_id in manifest["inputs"].items()
        },
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
    for side, files in found["sources"].items():
        lines += [f"{pad}  {side}: {file['path']} sha256 {file['sha256']}" for file in files]
    if found["key"].get("base"):
        lines.append(f"{pad}  base: {found['base']} ({found['key']['base'][:16]})")
    for child in found["inputs"].values():
        lines.append(lineage_text(child, indent + 1))
    return "\n".join(lines)
