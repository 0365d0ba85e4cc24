"""What was found: counts, thresholds, lengths, and three rows as the model will see them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tuneserve.artifacts import write_json_atomic
from tuneserve.data.codes import CODES
from tuneserve.data.engine import Engine
from tuneserve.data.lengthplot import plot_lengths
from tuneserve.data.prepare import Prepared
from tuneserve.data.sources import Sources
from tuneserve.data.spill import Spill
from tuneserve.data.split import length_strata
from tuneserve.data.supervise import IGNORED
from tuneserve.data.worker import Result
from tuneserve.stages import StageContext

_METRIC_REPORT_BYTES = 4000
_SAMPLES = 3
_SAMPLE_CHARS = 1200
_PLACES = 5


class Findings:
    """Counts that grow with every block; the first findings are kept whole."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.rows_read = self.rows_kept = self.rows_neutralized = self.tool_rows = 0
        self.reasons: Counter[str] = Counter()
        self.reasons_of_file: list[Counter[str]] = [Counter() for _ in sources.paths]
        self.warnings: Counter[str] = Counter()
        self.warning_places: dict[str, list[str]] = {}
        self.first: list[dict[str, Any]] = []

    @property
    def rows_rejected(self) -> int:
        """Rows that were read and not kept, whatever for."""
        return sum(self.reasons.values())

    @property
    def rows_bad(self) -> int:
        """Rejected rows that count against `data.max_rejected`."""
        return sum(self.bad_reasons().values())

    def bad_reasons(self) -> Counter[str]:
        """The counts of codes of level reject."""
        return Counter({c: n for c, n in self.reasons.items() if CODES[c].level == "reject"})

    def add(self, result: Result) -> None:
        """Count a block."""
        self.rows_read += result.rows_read
        self.rows_kept += len(result.lines)
        self.rows_neutralized += result.rows_neutralized
        self.tool_rows += result.tool_rows
        for record in result.rejected:
            self.reasons[record["code"]] += 1
            self.reasons_of_file[result.file][record["code"]] += 1
            if len(self.first) < 20:
                self.first.append({k: record[k] for k in ("source", "code", "message")})
        for code, line in result.warnings:
            self.warn(code, f"{self.sources.names[result.file]}:{line}")

    def warn(self, code: str, place: str) -> None:
        """Count a warning."""
        self.warnings[code] += 1
        places = self.warning_places.setdefault(code, [])
        if len(places) < _PLACES and place not in places:
            places.append(place)

    def warn_rows(self, code: str, rows: npt.NDArray[np.int64], spill: Spill) -> None:
        """Count a warning for rows of the spill."""
        pieces = spill.column("pieces")
        ends = np.cumsum(pieces)
        files, lines = spill.column("files"), spill.column("lines")
        for row in rows:
            owner = int(np.searchsorted(ends, row, side="right"))
            self.warn(code, f"{self.sources.names[files[owner]]}:{lines[owner]}")

    def reject_duplicates(self, count: int) -> None:
        """Rows that turned out to be duplicates after all were read."""
        if count:
            self.reasons["duplicate"] += count
            self.rows_kept -= count


def write_report(
    context: StageContext,
    prepared: Prepared,
    spill: Spill,
    findings: Findings,
    side_of_row: npt.NDArray[np.int8],
) -> dict[str, Any]:
    """Write report.json, report.md and lengths.png; the metrics of the stage are returned."""
    lengths = spill.column("lengths").astype(np.int64)
    supervised = spill.column("supervised").astype(np.int64)
    kept = side_of_row >= 0
    train, held = side_of_row == 0, side_of_row == 1
    owners = np.repeat(np.arange(len(pieces := spill.column("pieces"))), pieces)
    sources = findings.sources
    metrics: dict[str, Any] = {
        "rows_read": findings.rows_read,
        "rows_kept": findings.rows_kept,
        "rows_rejected": findings.rows_rejected,
        "rows_neutralized": findings.rows_neutralized,
        "reasons": dict(findings.reasons.most_common()),
        "warnings": dict(findings.warnings.most_common()),
        "train_rows": int(train.sum()),
        "eval_rows": int(held.sum()),
        "eval_conversations": len(np.unique(owners[held])),
        "train_tokens": int(lengths[train].sum()),
        "eval_tokens": int(lengths[held].sum()),
        "total_tokens": int(lengths[kept].sum()),
        "supervised_tokens": int(supervised[kept].sum()),
        "longest_tokens": int(lengths[kept].max(initial=0)),
        "tool_rows": findings.tool_rows,
        "formats": dict(zip(sources.names, sources.formats, strict=True)),
    }
    percentiles = [50, 90, 99, 100]
    values = np.percentile(lengths[kept], percentiles) if kept.any() else [0] * len(percentiles)
    report = {
        **metrics,
        "max_rejected": context.run.data.max_rejected,
        "rejected_share": findings.rows_bad / max(findings.rows_read, 1),
        "max_length": context.run.data.max_length,
        "too_long": context.run.data.too_long,
        "length_percentiles": {str(p): float(v) for p, v in zip(percentiles, values, strict=True)},
        "length_histogram": _histogram(lengths[kept]),
        "supervised_histogram": _histogram(supervised[kept]),
        "length_strata": length_strata(lengths[kept], held[kept]),
        "first_findings": findings.first,
        "warning_places": findings.warning_places,
        "ignored_files": [path.rsplit("/", 1)[-1] for path in sources.ignored],
        "template_notes": prepared.facts.notes,
        "end_token": {"id": prepared.facts.end_id, "text": prepared.facts.end_text},
        "vocab_rows": prepared.vocab_rows,
    }
    write_json_atomic(context.out / "report.json", report)
    plot_lengths(
        context.out / "lengths.png",
        lengths[kept],
        supervised[kept],
        max_length=context.run.data.max_length,
        title=", ".join(sources.names[:3]) + (" ..." if len(sources.names) > 3 else ""),
    )
    text = markdown(report)
    samples = sample_rows(context.out / "train.parquet", prepared.engine)
    (context.out / "report.md").write_text(text + samples, encoding="utf-8")
    metrics["report"] = _cut(text, _METRIC_REPORT_BYTES)
    return metrics


def _histogram(values: npt.NDArray[np.int64]) -> dict[str, list[int]]:
    if not len(values):
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(values, bins=20)
    return {"edges": [int(e) for e in edges], "counts": [int(c) for c in counts]}


def _cut(text: str, limit_bytes: int) -> str:
    data = text.encode()
    if len(data) <= limit_bytes:
        return text
    return data[: limit_bytes - 8].decode("utf-8", "ignore").rsplit("\n", 1)[0] + "\n...\n"


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        "# Data report",
        "",
        f"{report['rows_read']} rows read, {report['rows_kept']} kept, "
        f"{report['rows_rejected']} rejected ({report['rejected_share']:.1%} are bad; at most "
        f"{report['max_rejected']:.1%} are allowed).",
        "",
        "| | train | held out |",
        "|---|---|---|",
        f"| rows | {report['train_rows']} | {report['eval_rows']} |",
        f"| tokens | {report['train_tokens']} | {report['eval_tokens']} |",
        "",
        f"Supervised: {report['supervised_tokens']} of {report['total_tokens']} tokens; each "
        f"answer ends with `{_code(report['end_token']['text'])}` ({report['end_token']['id']}). "
        f"Longest row: {report['longest_tokens']} of at most {report['max_length']} tokens "
        f"(too_long: {report['too_long']}).",
        "",
        "| tokens a row | " + " | ".join(f"p{p}" for p in report["length_percentiles"]) + " |",
        "|---" * (1 + len(report["length_percentiles"])) + "|",
        "| | " + " | ".join(f"{v:.0f}" for v in report["length_percentiles"].values()) + " |",
    ]
    if report["rows_neutralized"]:
        lines += ["", f"Control tokens were defused in {report['rows_neutralized']} rows."]
    for title, counts in (("Rejected", report["reasons"]), ("Warnings", report["warnings"])):
        if not counts:
            continue
        lines += [
            "",
            f"## {title}",
            "",
            "| code | rows | meaning | what to do |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {code} | {count} | {CODES[code].meaning} | {CODES[code].hint} |"
            for code, count in counts.items()
        ]
        places = report["warning_places"] if title == "Warnings" else {}
        lines += ["", *(f"- {code}: {', '.join(found)}" for code, found in places.items())]
    if report["first_findings"]:
        lines += ["", "## First findings", ""]
        lines += [
            f"- `{f['source']}` {f['code']}: {_plain(f['message'], 160)}"
            for f in report["first_findings"][:10]
        ]
    lines += ["", "## Files", ""]
    files = list(report["formats"].items())
    lines += [f"- {_plain(name, 120)}: {format}" for name, format in files[:20]]
    if len(files) > 20:
        lines.append(f"- and {len(files) - 20} more")
    lines += [f"- {_plain(name, 120)}: not read" for name in report["ignored_files"][:10]]
    if report["template_notes"]:
        lines += ["", "## Chat template", ""] + [f"- {note}" for note in report["template_notes"]]
    return "\n".join(lines) + "\n"


def _plain(text: str, limit: int) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _code(text: str) -> str:
    return text.replace("`", "'")


def sample_rows(path: Path, engine: Engine) -> str:
    """Three training rows, their supervised tokens between double brackets."""
    lines = ["", "## Three rows", "", "Supervised tokens stand between `[[` and `]]`.", ""]
    with pq.ParquetFile(path) as table:
        batch = next(table.iter_batches(batch_size=_SAMPLES), None)
        rows = batch.to_pylist() if batch is not None else []
    for row in rows:
        text = mark_supervised(row["input_ids"], row["labels"], engine)
        if len(text) > _SAMPLE_CHARS:
            text = text[:_SAMPLE_CHARS] + "..."
        # Indented rather than fenced: the text may hold fences itself.
        lines += [f"{row['source']}:", "", *(f"    {line}" for line in text.split("\n")), ""]
    return "\n".join(lines)


def mark_supervised(ids: list[int], labels: list[int], engine: Engine) -> str:
    """The row's text with its supervised tokens marked."""
    parts: list[str] = []
    begin = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or (labels[at] == IGNORED) != (labels[begin] == IGNORED):
            text = engine.decode(np.array(ids[begin:at], dtype=np.int32))
            parts.append(text if labels[begin] == IGNORED else f"[[{text}]]")
            begin = at
    return "".join(parts)
