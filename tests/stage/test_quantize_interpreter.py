"""`engines.quantize.python`: only the quantize stage runs in the interpreter it names."""

from __future__ import annotations

import stat
from pathlib import Path

from shim import executed, run_file
from tuneserve.process import StageCall, run_stage


def test_only_quantize_runs_in_the_interpreter_named_for_it(tmp_path: Path) -> None:
    plain = run_file(tmp_path)
    shim = plain.engines.quantize.python
    other = tmp_path / "python-quantize"
    other.write_text(f'#!/bin/sh\necho used >> "{tmp_path}/used"\nexec "{shim}" "$@"\n')
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    engines = {**plain.engines.model_dump(), "quantize": {"python": str(other)}}
    run = run_file(tmp_path, engines=engines)
    used = tmp_path / "used"
    run_stage(StageCall("fetch", run, tmp_path))
    assert not used.exists() and executed(tmp_path) == ["fetch"]
    made = run_stage(StageCall("quantize", run, settings={"method": "awq"}))
    assert made.artifact and executed(tmp_path) == ["fetch", "quantize:awq"]
    assert used.exists()
