"""What is stored and what this machine can do."""

from __future__ import annotations

from typing import Annotated

import typer

from tuneserve.cli.app import (
    JsonOption,
    app,
    show,
)


@app.command(epilog="Example: tuneserve lineage adapter-1f0c")
def lineage(
    artifact: Annotated[str, typer.Argument(help="Id, its beginning, or the folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """From an artifact back to every input file, setting, version and metric."""
    from tuneserve.artifacts import Store
    from tuneserve.lineage import lineage_text, trace
    from tuneserve.places import store_root

    found = trace(Store(store_root()), artifact, verify=verify)
    show(found, lineage_text(found), as_json)


@app.command(epilog="Example: tuneserve doctor")
def doctor(
    port: Annotated[int, typer.Option(help="Port the gateway would use.")] = 8080,
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
