"""From a release or an artifact back to the files, settings, versions and metrics that made it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tuneserve.artifacts import MANIFEST, Artifact, Store
from tuneserve.errors import InputError
from tuneserve.places import run_root
from tuneserve.progress import human_bytes, human_seconds
from tuneserve.runs import RunRecord, Runs
from tuneserve.stages import STAGES

_NONE = (0.0, 0.0)
# Ends of runs that had something to do.
_WORKED = ("promoted", "refused", "failed", "cancelled", "stale")


def open_artifact(store: Store, text: str) -> Artifact:
    """An artifact by its folder, its id, or a unique beginning of the id.

    Raises:
        InputError: There is none, or it is damaged.
    """
    folder = Path(text).absolute()
    if (folder / MANIFEST).is_file():
        return Store(folder.parent).get(folder.name)
    return store.get(text)


def find_release(text: str) -> dict[str, Any] | None:
    """A release of this TUNESERVE_HOME by its id, its beginning, or the served name it answers
    under; None when there is no such thing.
    """
    from tuneserve.release.layout import layout
    from tuneserve.release.state import read

    if not run_root().is_dir():
        return None
    known = read(layout())
    if text in known.names and known.names[text].active:
        text = str(known.names[text].active)
    matches = (
        [text] if text in known.releases else [r for r in known.releases if r.startswith(text)]
    )
    if len(matches) != 1:
        return None
    record = known.releases[matches[0]]
    measured = record.report
    if not measured:  # of a refused release only its folder knows
        with contextlib.suppress(OSError, ValueError):
            report = layout().release_folder(record.id) / "report.json"
            measured = json.loads(report.read_text(encoding="utf-8"))
    return {
        "release": record.id,
        "served": record.name,
        "artifact": record.artifact or record.model,
        "proven": record.proven,
        "created": record.created,
        "losses": measured.get("losses"),
        "gates": measured.get("gates"),
    }


def lineage_of(store: Store, text: str, *, verify: bool = False) -> dict[str, Any]:
    """The chain of a release or an artifact: see `trace`; a release's own facts under `release`,
    and under `stages` what each stage of the runs that led to it took (see `spent`).

    Raises:
        InputError: There is no such thing, or a part of the chain is damaged or gone.
    """
    release = find_release(text) if text else None
    found = trace(store, release["artifact"] if release else text, verify=verify)
    if release is None:
        return {**found, "total": totals(each(found).values())}
    # An artifact that was found has the settings of the run that made it, not of this one.
    ran = [r.config for r in _records_of(release["release"]) if r.release and r.config]
    found = {**found, "config": ran[-1] if ran else found["config"]}
    stages = spent(store, found, release["release"])
    return {**found, "release": release, "stages": stages, "total": totals(stages.values())}


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
            expected="files with the hashes of the manifest",
            hint="run the stage that made it again",
        )
    manifest = artifact.manifest
    return {
        "id": artifact.id,
        "stage": manifest["stage"],
        "path": str(artifact.path),
        "base": manifest["base"],
        "key": manifest["key"],
        "config": manifest["config"],
        "versions": manifest["versions"],
        "metrics": manifest["metrics"],
        "finished": manifest["finished"],
        "seconds": manifest["seconds"],
        **cost(manifest),
        "bytes": sum(entry["size"] for entry in manifest["files"]),
        "files": {entry["path"]: entry["sha256"] for entry in manifest["files"]},
        "sources": manifest["sources"],
        "inputs": {
            kind: trace(store, input_id, verify=verify)
            for kind, input_id in manifest["inputs"].items()
        },
    }


def cost(manifest: Any) -> dict[str, float | None]:
    """GPU seconds of an artifact's making, and their price; None where no price was given."""
    gpu_seconds = float(manifest["seconds"]) * int(manifest.get("gpus") or 0)
    return _priced(gpu_seconds, manifest["config"])


def spent(store: Store, found: dict[str, Any], release: str) -> dict[str, dict[str, Any]]:
    """Seconds, GPU seconds and cost of each stage of a release.

    A stage took what its artifacts took (the chain's, and whatever else those runs used: the
    evaluation, a second merge, an export that was refused), or what the runs spent on it, if that
    is more: failed attempts and the proof of the release, which makes no artifact.

    Args:
        store: Where the artifacts are looked up.
        found: The chain, from `trace`.
        release: The release's id.
    """
    records = _records_of(release)
    taken: dict[str, tuple[float, float]] = {}
    for part in _made(store, found, records):
        seconds, gpu_seconds = taken.get(part["stage"], (0.0, 0.0))
        own = float(part["seconds"])
        taken[part["stage"]] = seconds + own, gpu_seconds + own * int(part.get("gpus") or 0)
    by_runs: dict[str, tuple[float, float]] = {}
    for record in records:
        for stage, own in record.seconds.items():
            seconds, gpu_seconds = by_runs.get(stage, (0.0, 0.0))
            by_runs[stage] = seconds + own, gpu_seconds + own * record.gpus
    known = {*taken, *by_runs}
    stages = [*(name for name in STAGES if name in known), *sorted(known - {*STAGES})]
    most = {stage: max(taken.get(stage, _NONE), by_runs.get(stage, _NONE)) for stage in stages}
    return {
        stage: {"seconds": round(seconds, 3), **_priced(gpu_seconds, found["config"])}
        for stage, (seconds, gpu_seconds) in most.items()
    }


def _records_of(release: str) -> list[RunRecord]:
    """The runs that worked for a release: those that led to it, and those that did not get there
    with the same inputs. A run that only found it serving cost it nothing.
    """
    known = [r for r in Runs().all() if r.state in _WORKED]
    inputs = {r.inputs for r in known if r.release == release} - {""}
    return [r for r in known if r.release == release or (not r.release and r.inputs in inputs)]


def _made(store: Store, found: dict[str, Any], records: list[RunRecord]) -> list[dict[str, Any]]:
    """Manifests of the chain and of all that its runs used, each once."""
    ids = {*each(found), *(id for record in records for id in record.used)}
    manifests = []
    for id in sorted(ids):
        with contextlib.suppress(OSError, ValueError):  # swept since, or damaged
            text = (store.root / id / MANIFEST).read_text(encoding="utf-8")
            manifests.append(json.loads(text))
    return manifests


def _priced(gpu_seconds: float, config: Any) -> dict[str, float | None]:
    price = (config.get("budget") or {}).get("price_per_gpu_hour")
    return {
        "gpu_seconds": round(gpu_seconds, 3),
        "cost": None if price is None else round(gpu_seconds / 3600 * price, 4),
    }


def each(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every artifact of a chain by its id, once."""
    known = {found["id"]: found}
    for child in found["inputs"].values():
        known.update(each(child))
    return known


def totals(parts: Collection[dict[str, Any]]) -> dict[str, float | None]:
    """Seconds, GPU seconds and cost of artifacts or stages together."""
    costs = [part["cost"] for part in parts if part["cost"] is not None]
    return {
        "seconds": round(sum(part["seconds"] for part in parts), 3),
        "gpu_seconds": round(sum(part["gpu_seconds"] for part in parts), 3),
        "cost": round(sum(costs), 4) if costs else None,
    }


def lineage_text(found: dict[str, Any], indent: int = 0) -> str:
    """The trace as an indented tree."""
    pad = "  " * indent
    lines = []
    if release := found.get("release"):
        state = "proven" if release["proven"] else "not proven"
        lines.append(
            f"{release['release']}  ({state}, served as {release['served']}, made "
            f"{release['created']})"
        )
        losses = (release["losses"] or {}).items()
        known = ", ".join(f"{name} {loss:.4f}" for name, loss in losses if loss is not None)
        lines += [f"  held-out loss: {known}"] if known else []
        for gate in release["gates"] or ():
            verdict = "passed" if gate["passed"] else "refused"
            lines.append(f"  {gate['name']}: {verdict} ({gate['found']}; wanted {gate['wanted']})")
    price = f", cost {found['cost']:.2f}" if found["cost"] is not None else ""
    on_gpu = f", {human_seconds(found['gpu_seconds'])} of GPU" if found["gpu_seconds"] else ""
    lines.append(
        f"{pad}{found['id']}  ({found['stage']}, {found['finished']}, "
        f"{human_seconds(found['seconds'])}{on_gpu}{price}, {human_bytes(found['bytes'])})"
    )
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items() if v)
    lines.append(f"{pad}  versions: {versions}")
    for side, files in found["sources"].items():
        lines += [f"{pad}  {side}: {file['path']} sha256 {file['sha256']}" for file in files]
    if found["key"].get("base"):
        lines.append(f"{pad}  base: {found['base']} ({found['key']['base'][:16]})")
    for child in found["inputs"].values():
        lines.append(lineage_text(child, indent + 1))
    lines += [f"{stage}: {_took(took)}" for stage, took in found.get("stages", {}).items()]
    if total := found.get("total"):
        lines.append(f"in all: {_took(total)}")
    return "\n".join(lines)


def _took(what: Mapping[str, Any]) -> str:
    price = f", cost {what['cost']:.2f}" if what["cost"] is not None else ""
    on_gpu = f"{human_seconds(what['gpu_seconds'])} of GPU"
    return f"{human_seconds(what['seconds'])}, {on_gpu}{price}"
