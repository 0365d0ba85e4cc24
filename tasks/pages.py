"""What people see of a stage in Prefect's UI: a summary, tables, plots, progress and links."""

from __future__ import annotations

import base64
import contextlib
import contextvars
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

from tuneserve.calls import StageCall, StageResult
from tuneserve.errors import GateRefused
from tuneserve.progress import human_bytes, human_seconds

log = logging.getLogger(__name__)

_PROGRESS_LINE = re.compile(r"^[\w. -]+: (\d+)/(\d+) ")
_LARGEST_PLOT_BYTES = 300_000
_TEXTS = ("report", "table")


@contextlib.contextmanager
def quietly(what: str) -> Iterator[None]:
    """A page that cannot be stored is a pity, not a failure of the run."""
    try:
        yield
    except (PrefectException, httpx.HTTPError, OSError, ValueError) as error:
        log.warning("%s is not shown in the UI: %s", what, error)


def page_key(*parts: str) -> str:
    """An artifact key: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def show_stage(call: StageCall, result: StageResult) -> None:
    """Store the pages of a finished stage."""
    name = call.run.name
    with quietly(f"the page of {call.stage}"):
        create_markdown_artifact(
            key=page_key(name, call.stage),
            markdown=summary(result),
            description=f"{call.stage} of {name}",
        )
        for title, rows in tables(result).items():
            create_table_artifact(
                key=page_key(name, call.stage, title), table=rows, description=f"{title} of {name}"
            )
        # An artifact's own pictures; a release has none, its report has a folder.
        folder = result.path or result.metrics.get("report_folder")
        for plot in sorted(Path(folder).glob("*.png")) if folder else ():
            if plot.stat().st_size <= _LARGEST_PLOT_BYTES:
                data = base64.b64encode(plot.read_bytes()).decode()
                create_image_artifact(
                    image_url=f"data:image/png;base64,{data}",
                    key=page_key(name, call.stage, plot.stem),
                    description=f"{plot.stem} of {name}",
                )
        if result.metrics.get("release") and result.metrics.get("endpoint"):
            create_link_artifact(
                link=f"{result.metrics['endpoint']}/models",
                link_text=f"{result.metrics['model']}: {result.metrics['release']}",
                key=page_key(name, "endpoint"),
                description="The endpoint; clients use its address without /models",
            )


def show_refusal(call: StageCall, error: GateRefused) -> None:
    """Store what a candidate was refused for: its report, gates and pictures."""
    folder = error.details.get("report_folder")
    text = str(error)
    if folder:
        with quietly("the gates' report"):
            text = (Path(folder) / "gates.md").read_text(encoding="utf-8")
    metrics = {"report": text, "gates": error.details.get("gates"), "report_folder": folder}
    show_stage(call, StageResult(call.stage, metrics))


def tables(result: StageResult) -> dict[str, list[dict[str, Any]]]:
    """The tables of a stage's metrics: rejections, gates, planned memory."""
    metrics = result.metrics
    found: dict[str, list[dict[str, Any]]] = {}
    if isinstance(metrics.get("reasons"), dict) and metrics["reasons"]:
        found["rejections"] = [
            {"reason": reason, "rows": count}
            for reason, count in sorted(metrics["reasons"].items())
        ]
    if isinstance(metrics.get("gates"), list) and metrics["gates"]:
        found["gates"] = [
            {
                "gate": gate["name"],
                "decision": gate.get("decision", "passed")
                if gate["passed"]
                else gate.get("decision", "refused").upper(),
                "found": gate["found"],
                "wanted": gate["wanted"],
            }
            for gate in metrics["gates"]
        ]
    if isinstance(metrics.get("stages"), dict):
        found["planned"] = [
            {
                "stage": stage,
                "planned peak": human_bytes(planned["peak_bytes"]),
                "available": human_bytes(planned["available_bytes"]),
                "fits": planned["fits"],
            }
            for stage, planned in metrics["stages"].items()
        ]
    return found


def summary(result: StageResult) -> str:
    """A stage's result as Markdown: its report when it wrote one, and its numbers."""
    lines = [f"# {result.stage}", ""]
    if result.artifact:
        lines += [f"`{result.artifact}` ({'re-used' if result.cached else 'made now'})", ""]
    for name in _TEXTS:
        text = result.metrics.get(name)
        if text:
            lines += [text if name == "report" else f"```\n{text}\n```", ""]
    rows = [
        f"| {name.replace('_', ' ')} | {_value(name, value)} |"
        for name, value in result.metrics.items()
        if isinstance(value, int | float | str) and name not in _TEXTS
    ]
    if rows:
        lines += ["| measured | |", "|---|---|", *rows]
    return "\n".join(lines)


def planned_and_measured(results: list[StageResult]) -> list[dict[str, Any]]:
    """One row a stage that ran: time, and its memory as planned and as measured."""
    planned: dict[str, Any] = {}
    rows = []
    for result in results:
        if isinstance(result.metrics.get("stages"), dict):
            planned = result.metrics["stages"]
        if not result.artifact:
            continue
        plan = planned.get(result.stage, {})
        on_gpu = plan.get("device") == "GPU"
        peak = result.metrics.get("peak_gpu_bytes" if on_gpu else "peak_rss_bytes")
        rows.append(
            {
                "stage": result.stage,
                "artifact": result.artifact,
                "made in": "re-used" if result.cached else human_seconds(result.seconds),
                "planned peak": human_bytes(plan["peak_bytes"]) if plan else "",
                "measured peak": human_bytes(peak) if peak else "",
            }
        )
    return rows


def show_run(name: str, results: list[StageResult]) -> None:
    """Store the table of a whole run."""
    rows = planned_and_measured(results)
    if rows:
        with quietly("the table of the run"):
            create_table_artifact(
                key=page_key(name, "planned-and-measured"),
                table=rows,
                description=f"Planned and measured, {name}",
            )


def watch_progress(call: StageCall, log_line: Callable[[str], None]) -> Callable[[str], None]:
    """`log_line` that also moves a progress bar in the UI; lines arrive on another thread."""
    context = contextvars.copy_context()
    bar: list[UUID] = []

    def show(percent: float, line: str) -> None:
        about = f"{call.stage} of {call.run.name}: {line}"
        if bar:
            update_progress_artifact(artifact_id=bar[0], progress=percent, description=about)
        else:
            made = create_progress_artifact(
                progress=percent,
                key=page_key(call.run.name, call.stage, "progress"),
                description=about,
            )
            bar.append(made if isinstance(made, UUID) else UUID(str(made)))

    def watched(line: str) -> None:
        log_line(line)
        match = _PROGRESS_LINE.match(line)
        if match and int(match[2]):
            with quietly("progress"):
                context.run(show, round(100 * int(match[1]) / int(match[2]), 1), line)

    return watched


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return human_bytes(value)
    if name.endswith("seconds") and isinstance(value, int | float):
        return human_seconds(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
