"""What is stored and what this machine can do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuneserve.cli.app import (
    JsonOption,
    app,
    show,
)

# Ends of which the stage says nothing.
_WHOLE = ("promoted", "confirmed", "unchanged", "still refused")

StoreOption = Annotated[
    Path | None,
    typer.Option(help="The run file's store.root; unset: TUNESERVE_HOME/store.", metavar="DIR"),
]


@app.command(
    short_help="From a release back to all that went into it.",
    epilog="Example: tuneserve lineage r0007 --diff r0006",
)
def lineage(
    what: Annotated[
        str,
        typer.Argument(help="Release, served name, artifact id, or folder.", metavar="RELEASE"),
    ],
    diff: Annotated[
        str | None, typer.Option(help="An earlier one: show what changed since.", metavar="OTHER")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file again.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """From a release back to every input file, setting, version, metric and cost."""
    from tuneserve.artifacts import Store
    from tuneserve.compare import difference, difference_text
    from tuneserve.lineage import lineage_of, lineage_text
    from tuneserve.places import store_root

    where = Store(store_root(str(store) if store else None))
    if diff:
        changed = difference(where, diff, what)
        show(changed, difference_text(changed), as_json)
        return
    found = lineage_of(where, what, verify=verify)
    show(found, lineage_text(found), as_json)


@app.command(epilog="Example: tuneserve runs")
def runs(
    last: Annotated[int, typer.Option(min=1, help="How many, newest last.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """What ran here: when, for how long, and how it ended."""
    from tuneserve.progress import human_seconds
    from tuneserve.runs import Runs, in_one_line, now, reason, seconds_taken, summary

    found = Runs()
    alive = {record.id for record in found.running()}
    records = found.all()[-last:]
    lines = []
    for record in records:
        state = record.state
        if state == "running" and record.id not in alive:
            state = "stale"
        where = f" in {record.stage}" if record.stage and state not in _WHOLE else ""
        known = record.ended or record.id in alive  # nobody saw when a killed one ended
        took = f"{human_seconds(seconds_taken(record, at=now()))}, " if known else ""
        about = f"({took}run {record.id})"
        release = f" {record.release}" if record.release else ""
        lines.append(f"{record.started[:19]}  {record.served}  {state}{where}{release}  {about}")
        if record.error:
            lines.append(f"    {in_one_line(reason(record))}")
    data = {"runs": [summary(record) for record in records]}
    show(data, "\n".join(lines) or "nothing ran yet", as_json)


@app.command(
    short_help="Remove artifacts that nothing needs.",
    epilog="Example: tuneserve gc --keep-days 30",
)
def gc(
    keep_days: Annotated[float, typer.Option(help="Keep what was used within so many days.")] = 14,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it only shown.")] = False,
    remote: Annotated[
        str | None,
        typer.Option(help="Sweep this object store instead (store.remote).", metavar="URL"),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove artifacts that no release, running flow or lineage needs; shows them by default."""
    from tuneserve.artifacts import Store
    from tuneserve.gc import remove, survey, sweep_text
    from tuneserve.places import store_root

    where = Store(store_root(str(store) if store else None))
    if remote:
        from tuneserve.remote import RemoteStore
        from tuneserve.remote_gc import remove_remote, survey_remote

        there = RemoteStore(remote)
        sweep = survey_remote(there, where, keep_days=keep_days)
        if yes:
            remove_remote(there, sweep)
    else:
        sweep = survey(where, keep_days=keep_days)
        if yes:
            remove(where, sweep)
    show({**sweep.to_json(), "removed": yes}, sweep_text(sweep, removed=yes), as_json)


@app.command(
    short_help="Look at this machine, and say what to do.",
    epilog="Example: tuneserve doctor",
)
def doctor(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port the gateway would use.")] = 8080,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine: Python, compiler, torch, GPU, disk, ports, versions."""
    from tuneserve.doctor import checkup

    findings = checkup(port=port)
    marks = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.state]}  {finding.name}: {finding.found}")
        if finding.state != "ok" and finding.what_to_do:
            lines.append(f"      what to do: {finding.what_to_do}")
    show({"findings": [vars(f) for f in findings]}, "\n".join(lines), as_json)
    if any(f.state == "fail" for f in findings):
        raise SystemExit(3)
