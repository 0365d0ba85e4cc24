"""The `validate` stage: from data files to a dataset artifact, or to what is wrong with them."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tuneserve.data.pool import prepare_workers, process_count, run_blocks
from tuneserve.data.prepare import (
    TOKENIZER,
    Prepared,
    discard_tokenizer,
    finish_tokenizer,
    save_tool_template,
    start_tokenizer,
)
from tuneserve.data.report import Findings, write_report
from tuneserve.data.sources import Sources, open_sources
from tuneserve.data.spill import Spill
from tuneserve.data.split import begun_by_trained, families, first_occurrences, held_out, outliers
from tuneserve.data.worker import Settings
from tuneserve.data.writing import write_rows
from tuneserve.errors import DataError
from tuneserve.progress import Progress
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

QUARANTINE = "quarantine.jsonl"
_FIRST_FINDINGS = 10


def run(context: StageContext) -> dict[str, Any]:
    """Read, check, tokenize, prove, split and write.

    Raises:
        DataError: The data cannot be used; the message says where and why.
        ModelError: The base's tokenizer or template cannot be used.
    """
    child = start_tokenizer(context)
    try:
        sources = open_sources(context.run.data)
        processes = process_count(sources.size_bytes, context.hints.get("processes"))
        if processes > 1:
            prepare_workers()
    except BaseException:
        discard_tokenizer(context, child)
        raise
    prepared = finish_tokenizer(context, child)
    started, cpu_started = time.monotonic(), time.process_time()
    findings = Findings(sources)
    quarantine_path = context.out / QUARANTINE
    with (
        Spill(context.work / "spill") as spill,
        quarantine_path.open("w", encoding="utf-8", newline="\n") as quarantine,
    ):
        try:
            _first_pass(context, sources, prepared, spill, findings, quarantine, processes)
            spill.close()
            side_of_row = _second_pass(context, sources, spill, findings, quarantine)
        except DataError as error:
            quarantine.flush()
            raise _with_quarantine(error, context, quarantine_path, findings) from error
        seconds = {
            "row_seconds": round(time.monotonic() - started, 3),
            "row_cpu_seconds": round(time.process_time() - cpu_started, 3),  # of this process alone
        }
        if prepared.tool_template is not prepared.template and findings.tool_rows:
            save_tool_template(context, prepared)
        metrics = write_report(context, prepared, spill, findings, side_of_row)
    return {**metrics, "tokenizer": TOKENIZER, **seconds}


def settings_of(context: StageContext, sources: Sources, prepared: Prepared) -> Settings:
    """What a worker is told."""
    data = context.run.data
    return Settings(
        sources=prepared.template.sources,
        tool_sources=prepared.tool_template.sources,
        variables=prepared.template.variables,
        vocab_rows=prepared.vocab_rows,
        frames=frozenset(prepared.facts.frames.around),
        files=tuple(sources.names),
        max_length=data.max_length,
        too_long=data.too_long,
        control_tokens=data.control_tokens,
        system=data.system,
        opener=prepared.facts.frames.opener,
    )


def _first_pass(
    context: StageContext,
    sources: Sources,
    prepared: Prepared,
    spill: Spill,
    findings: Findings,
    quarantine: IO[str],
    processes: int,
) -> None:
    """Every row through every check that needs no other row."""
    settings = settings_of(context, sources, prepared)
    finished_bytes, last_file, last_bytes = 0, 0, 0
    with Progress("validate", total=None, unit="row") as progress:
        for result in run_blocks(sources.blocks(), settings, processes, prepared.engine):
            if result.file != last_file:
                finished_bytes, last_file = finished_bytes + last_bytes, result.file
            last_bytes = result.read_bytes
            findings.add(result)
            spill.add(result)
            quarantine.writelines(
                json.dumps(record, ensure_ascii=False) + "\n" for record in result.rejected
            )
            seen_bytes = max(finished_bytes + last_bytes, 1)
            rows = findings.rows_read
            # How many rows there are shows only at the end; until then their mean size says it.
            progress.total = max(int(rows * sources.size_bytes / seen_bytes), rows)
            progress.advance(result.rows_read, f"{findings.rows_rejected} rejected")
        progress.total = findings.rows_read


def _second_pass(
    context: StageContext,
    sources: Sources,
    spill: Spill,
    findings: Findings,
    quarantine: IO[str],
) -> npt.NDArray[np.int8]:
    """What needs all rows: duplicates, the split, thresholds; then the row files are written."""
    data = context.run.data
    pieces = spill.column("pieces")
    _check_counts(context, sources, spill, findings)
    first, duplicate_of = first_occurrences(spill.digests())
    from_eval = spill.column("files") >= sources.train_count
    _check_overlap(sources, spill, findings, first, duplicate_of, from_eval)
    keep = first if data.drop_duplicates else np.ones(len(first), dtype=bool)
    findings.reject_duplicates(int((~keep).sum()))
    side = np.where(from_eval, 1, 0).astype(np.int8)
    if not data.eval and data.eval_fraction > 0:
        groups, trained = _families(spill, keep)
        try:
            side[keep & ~trained] = held_out(groups[keep & ~trained], data.seed, data.eval_fraction)
        except ValueError as error:
            raise DataError(
                f"data.eval_fraction {data.eval_fraction} needs at least 2 conversations with "
                f"different prompts to hold one out, but {error}",
                expected="at least 2 different conversations",
                hint="add data, name a file in data.eval, or set data.eval_fraction: 0",
            ) from error
    side[~keep] = -1
    side_of_row = np.repeat(side, pieces)
    lengths = spill.column("lengths")
    unusual = outliers(lengths) & (side_of_row >= 0)
    findings.warn_rows("length_outlier", np.flatnonzero(unusual), spill)
    write_rows(spill, side_of_row, sources.names, context.out, quarantine, duplicate_of)
    log.info(
        "%d rows to train on, %d held out, %d rejected",
        int((side_of_row == 0).sum()),
        int((side_of_row == 1).sum()),
        findings.rows_rejected,
    )
    return side_of_row


def _families(
    spill: Spill, keep: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Groups of all conversations, and which must be trained on; those not kept decide nothing."""
    counts = spill.column("beginning_counts")
    groups, trained = spill.column("groups").copy(), np.zeros(len(keep), dtype=bool)
    groups[keep], trained[keep] = families(
        groups[keep],
        spill.digests()[keep, 0],
        spill.column("beginnings")[np.repeat(keep, counts)],
        counts[keep],
    )
    return groups, trained


def _check_counts(
    context: StageContext, sources: Sources, spill: Spill, findings: Findings
) -> None:
    data = context.run.data
    if not findings.rows_read:
        raise DataError(
            "the data files hold no row",
            expected="at least one conversation",
            hint="check data.train",
        )
    kept = np.bincount(spill.column("files").astype(np.int64), minlength=len(sources.paths))
    empty = [i for i, count in enumerate(kept) if not count]
    if empty:
        lines = []
        for index in empty:
            reasons = findings.reasons_of_file[index]
            lines.append(f"{sources.paths[index]}: {_counts(reasons)}")
        about_length = any(
            {"too_long", "no_supervised_token"} & findings.reasons_of_file[i].keys() for i in empty
        )
        raise DataError(
            "no row is left of\n    " + "\n    ".join(lines),
            expected="at least one usable row in every file",
            hint=(
                f"raise data.max_length (now {data.max_length})"
                if about_length
                else "mend the rows, or remove the file"
            ),
            details={"reasons": dict(findings.reasons)},
        )
    share = findings.rows_bad / findings.rows_read
    if share > data.max_rejected:
        raise DataError(
            f"{findings.rows_bad} of {findings.rows_read} rows are rejected ({share:.1%}): "
            f"{_counts(findings.bad_reasons())}",
            expected=f"at most {data.max_rejected:.1%} (data.max_rejected)",
            hint="mend the rows, or raise data.max_rejected",
            details={"reasons": dict(findings.reasons)},
        )


def _check_overlap(
    sources: Sources,
    spill: Spill,
    findings: Findings,
    first: npt.NDArray[np.bool_],
    duplicate_of: npt.NDArray[np.int64],
    from_eval: npt.NDArray[np.bool_],
) -> None:
    """A held-out conversation that is also trained on makes every score too good, be it as the
    beginning of a longer one. A greeting that many begin with is only said.
    """
    if not from_eval.any():
        return
    same = np.flatnonzero(from_eval & ~first & ~from_eval[duplicate_of])
    shared = {int(i): f"is {_source(sources, spill, duplicate_of[i])}" for i in same}
    wholes, beginnings = spill.digests()[:, 0], spill.column("beginnings")
    counts = spill.column("beginning_counts")
    longer, greetings = begun_by_trained(wholes, beginnings, counts, from_eval)
    for index in greetings:
        findings.warn("eval_greeting", _source(sources, spill, index))
    for held, trained in longer.items():
        shared.setdefault(held, f"is the beginning of {_source(sources, spill, trained)}")
    if not shared:
        return
    first_ones = sorted(shared.items())[:_FIRST_FINDINGS]
    shown = [f"{_source(sources, spill, index)} {what}" for index, what in first_ones]
    count = "a held-out conversation is" if len(shared) == 1 else f"{len(shared)} of them are"
    raise DataError(
        f"eval_overlap: {count} also trained on:\n    " + "\n    ".join(shown),
        expected="no conversation on both sides",
        hint="remove them from data.eval or data.train",
        details={"eval_overlap": len(shared)},
    )


def _source(sources: Sources, spill: Spill, index: int) -> str:
    return f"{sources.names[spill.column('files')[index]]}:{spill.column('lines')[index]}"


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{code} {count}" for code, count in reasons.most_common())


def _with_quarantine(
    error: DataError, context: StageContext, quarantine: Path, findings: Findings
) -> DataError:
    """The error with the first findings, and the quarantine saved from the draft that goes away."""
    first = findings.first[:_FIRST_FINDINGS]
    if not first:
        return error
    saved = context.work / QUARANTINE
    with contextlib.suppress(OSError):
        shutil.copyfile(quarantine, saved)
    lines = "\n    ".join(f"{f['source']}: {f['code']}: {f['message']}" for f in first)
    more = "the first findings" if findings.rows_rejected > len(first) else "the findings"
    return DataError(
        f"{error.message}\n  {more}:\n    {lines}",
        expected=error.expected,
        hint=f"{error.hint}; all rejected rows: {saved}",
        details={**error.details, "findings": first, "quarantine": str(saved)},
    )
