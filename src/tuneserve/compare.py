"""What changed between two releases or artifacts: data, settings, versions, metrics, cost."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneserve.artifacts import Store
from tuneserve.lineage import each, lineage_of
from tuneserve.progress import human_seconds

_SHOWN = 3
_SIDES = ("train", "eval")


def difference(store: Store, one: str, other: str) -> dict[str, Any]:
    """What is different in `other`, compared with `one`.

    Returns:
        `data` (conversations added and removed a side, with some of their places), `files`,
        `base`, `config`, `versions`, `metrics` and `total`: each changed value as
        ``[before, after]``.

    Raises:
        InputError: One of them, or a part of its chain, is not there.
    """
    before, after = lineage_of(store, one), lineage_of(store, other)
    stages = {side: _by_stage(chain) for side, chain in (("a", before), ("b", after))}
    metrics, versions = {}, {}
    for stage in sorted(stages["a"].keys() | stages["b"].keys()):
        a, b = stages["a"].get(stage, {}), stages["b"].get(stage, {})
        metrics.update(
            _changes(_numbers(a.get("metrics", {})), _numbers(b.get("metrics", {})), stage)
        )
        versions.update(_changes(a.get("versions", {}), b.get("versions", {}), stage))
    if before.get("release") and after.get("release"):
        a, b = before["release"]["losses"] or {}, after["release"]["losses"] or {}
        metrics.update(_changes(_numbers(a), _numbers(b), "release"))
    return {
        "a": _name(before),
        "b": _name(after),
        "data": _data(stages["a"].get("validate"), stages["b"].get("validate")),
        "files": _changes(_sources(stages["a"]), _sources(stages["b"])),
        "base": _changes({"base": before["base"]}, {"base": after["base"]}),
        "config": _changes(_flat(before["config"]), _flat(after["config"])),
        "versions": versions,
        "metrics": metrics,
        "total": _changes(before["total"], after["total"]),
    }


def difference_text(found: dict[str, Any]) -> str:
    """The difference for people."""
    lines = [f"{found['a']} -> {found['b']}"]
    for side, rows in found["data"].items():
        lines.append(
            f"{side} rows: {rows['before']} -> {rows['after']}, {rows['added']} added, "
            f"{rows['removed']} removed"
        )
        for sign, what in (("+", "added_examples"), ("-", "removed_examples")):
            lines += [f"  {sign} {source}" for source in rows[what]]
    for section in ("files", "base", "config", "versions", "metrics"):
        if found[section]:
            lines.append(f"{section}:")
            lines += [
                f"  {name}: {_shown(a)} -> {_shown(b)}" for name, (a, b) in found[section].items()
            ]
    for name, (a, b) in found["total"].items():
        seconds = name.endswith("seconds")
        a, b = (human_seconds(v) if seconds and v is not None else _shown(v) for v in (a, b))
        lines.append(f"{name.replace('_', ' ')}: {a} -> {b}")
    if len(lines) == 1:
        lines.append("nothing changed")
    return "\n".join(lines)


def _name(chain: Mapping[str, Any]) -> str:
    return str(chain["release"]["release"]) if chain.get("release") else str(chain["id"])


def _by_stage(chain: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["stage"]: part for part in each(chain).values()}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    return {
        f"{prefix}.{name}" if prefix else name: [a.get(name), b.get(name)]
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    }


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found.update(_flat(inner, f"{prefix}.{name}" if prefix else name))
    return found


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float)
        and not name.endswith("seconds")
        and not name.startswith("peak_")
    }


def _sources(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    sources = stages.get("validate", {}).get("sources", {})
    return {file["path"]: file["sha256"][:16] for files in sources.values() for file in files}


def _data(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    if not a or not b or a["id"] == b["id"]:
        return {}
    found = {}
    for side in _SIDES:
        before, after = (_conversations(Path(part["path"]), side) for part in (a, b))
        old, new = (
            Counter({key: len(places) for key, places in known.items()})
            for known in (before, after)
        )
        added, removed = new - old, old - new
        found[side] = {
            "before": old.total(),
            "after": new.total(),
            "added": added.total(),
            "removed": removed.total(),
            "added_examples": [after[key][-1] for key in list(added)[:_SHOWN]],
            "removed_examples": [before[key][-1] for key in list(removed)[:_SHOWN]],
        }
    return found


def _conversations(dataset: Path, side: str) -> dict[str, list[str]]:
    """Where each conversation of a side came from, by a digest of what was said."""
    found: dict[str, list[str]] = {}
    path = dataset / f"{side}_messages.jsonl"
    if not path.is_file():
        return found
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            said = json.dumps([row["messages"], row.get("tools")], sort_keys=True)
            key = hashlib.sha256(said.encode()).hexdigest()
            found.setdefault(key, []).append(row["source"])
    return found


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
