"""The model card of a release: what it is, what made it, what was measured. Read from manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneserve.artifacts import MANIFEST
from tuneserve.checkpoint.licence import Licence, base_licence
from tuneserve.release.gate_report import (
    KL_PLOT,
    LOSS_PLOT,
    MODULES_PLOT,
    escaped,
    loss_table,
    verdict,
)
from tuneserve.release.gates import GateReport

CARD_NAME = "README.md"


@dataclass(frozen=True)
class CardFacts:
    """What a card is about.

    Attributes:
        release: Its id.
        name: The served name.
        model: Folder of the served model.
        base: Local folder of the base model; None: not known.
        inputs: Artifact ids by kind.
        created: When the release was made.
    """

    release: str
    name: str
    model: Path
    base: Path | None
    inputs: Mapping[str, str]
    created: str


def write_card(folder: Path, facts: CardFacts, report: GateReport) -> Path:
    """Write README.md beside the report it quotes."""
    path = folder / CARD_NAME
    pictures = [name for name in (LOSS_PLOT, KL_PLOT, MODULES_PLOT) if (folder / name).is_file()]
    path.write_text(card(facts, report, _lineage(facts), pictures), encoding="utf-8")
    return path


def card(
    facts: CardFacts,
    report: GateReport,
    lineage: list[tuple[str, dict[str, Any]]],
    pictures: list[str],
) -> str:
    """The card's Markdown, with the front matter that hubs read."""
    base = next((str(m["base"]) for _, m in lineage if m.get("base")), "")
    hub_id = base if not base.startswith(("/", ".", "~")) else ""
    base = hub_id or Path(base).name  # a card may be shared, where a folder lies may not
    licence = _licence(facts.base, base)
    front = ["---"]
    if hub_id:
        front.append(f"base_model: {hub_id}")
    front.append(f"license: {licence.id}")
    front += [f"license_name: {licence.name}"] * bool(licence.name)
    front += [f"license_link: {licence.link}"] * bool(licence.link)
    front += ["pipeline_tag: text-generation", "---", ""]
    lines = [*front, f"# {facts.name}, release {facts.release}", ""]
    lines += [f"Made {facts.created}. {verdict(report)} See [gates.md](gates.md).", ""]
    lines += ["| | |", "|---|---|", f"| base model | {base or 'not known'} |"]
    said = " ".join(part for part in (licence.id, licence.name, licence.link) if part)
    if licence.id == "unknown":
        said = "not stated; look it up before you share this"
    lines.append(f"| licence of the base | {said} |")
    lines.append(f"| served weights | {_weights(facts.model)} |")
    lines += ["", "## Measured on held-out rows", "", *loss_table(report)]
    for gate in report.gates:
        lines.append(
            f"- {escaped(gate.name)}: {escaped(gate.found)}" + ("" if gate.passed else " (refused)")
        )
    lines.append("")
    for name in pictures:
        lines += [f"![{name.removesuffix('.png')}]({name})", ""]
    lines += _data(lineage) + _settings(lineage) + _steps(lineage)
    return "\n".join(lines).rstrip() + "\n"


def _licence(folder: Path | None, base: str) -> Licence:
    return base_licence(folder, base) if folder and folder.is_dir() else Licence()


def _lineage(facts: CardFacts) -> list[tuple[str, dict[str, Any]]]:
    """Manifests of the model and of all it was made from, nearest first."""
    found: dict[str, dict[str, Any]] = {}
    todo = [facts.model.name, *facts.inputs.values()]
    while todo:
        id = todo.pop(0)
        path = facts.model.parent / id / MANIFEST
        if id in found or not path.is_file():
            continue
        found[id] = json.loads(path.read_text(encoding="utf-8"))
        todo += list(found[id].get("inputs", {}).values())
    return list(found.items())


def _weights(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    scheme = config.get("quantization_config")
    kind = str((config.get("architectures") or [config.get("model_type")])[0])
    if not scheme:
        return f"{kind}, 16 bits"
    method, bits, group = (scheme.get(k) for k in ("quant_method", "bits", "group_size"))
    return f"{kind}, {method}, {bits} bits, group size {group}"


def _data(lineage: list[tuple[str, dict[str, Any]]]) -> list[str]:
    lines = ["## Data", ""]
    for _, manifest in lineage:
        if manifest.get("stage") != "validate":
            continue
        metrics = manifest.get("metrics", {})
        numbers = [
            f"{name.replace('_', ' ')} {metrics[name]}"
            for name in ("rows_read", "rows_kept", "rows_rejected", "train_rows", "eval_rows")
            if name in metrics
        ]
        lines += [f"- {', '.join(numbers)}"] if numbers else []
        for side, files in (manifest.get("sources") or {}).items():
            lines += [
                f"- {side}: {Path(file['path']).name}, SHA-256 `{file['sha256']}`" for file in files
            ]
    return [*lines, ""] if len(lines) > 2 else []


def _settings(lineage: list[tuple[str, dict[str, Any]]]) -> list[str]:
    config = next((m["config"] for _, m in lineage if m.get("config")), None)
    if config is None:
        return []
    shown = {
        name: config[name] for name in ("train", "merge", "quantize", "gates") if name in config
    }
    return ["## Settings", "", "```json", json.dumps(shown, indent=1, sort_keys=True), "```", ""]


def _steps(lineage: list[tuple[str, dict[str, Any]]]) -> list[str]:
    if not lineage:
        return []
    lines = ["## Made from", "", "| artifact | step | finished | versions |", "|---|---|---|---|"]
    for id, manifest in lineage:
        versions = ", ".join(f"{k} {v}" for k, v in manifest.get("versions", {}).items() if v)
        lines.append(f"| `{id}` | {manifest['stage']} | {manifest['finished']} | {versions} |")
    return [*lines, ""]
