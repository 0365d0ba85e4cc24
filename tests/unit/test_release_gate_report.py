"""The report of the gates: kept, read again, and written for people."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from gate_evidence import evidence
from tuneserve.config import GatesSection
from tuneserve.release.gate_report import markdown, write_report
from tuneserve.release.gates import Gate, GateReport, judge
from tuneserve.release.judging import Measured


def test_a_report_survives_the_state_file_and_an_older_one_is_read() -> None:
    report = judge(GatesSection(), evidence(base=3.0, adapter=1.0, merged=1.0, served=2.0))
    again = GateReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report and again.refused
    old = {"name": "x", "passed": False, "found": "f", "wanted": "w"}
    assert GateReport.from_json({"losses": {}, "gates": [old]}).gates[0].decision == "refused"


def test_the_report_has_pictures_and_all_rungs(tmp_path: Path) -> None:
    report = judge(
        GatesSection(), evidence(base=3.0, merged=1.0, served=2.9, kl_served=1.0, kl_rtn=0.1)
    )
    report.rungs = [
        {"method": "gptq", "decision": "refused", "reason": "a | b\nc",
         "would_pass": "gates.max_quantize_share: 0.31"},
        {"method": "awq", "decision": "passed", "reason": ""},
    ]  # fmt: skip
    model = tmp_path / "model"
    model.mkdir()
    (model / "quant_loss.png").write_bytes(b"png")
    out = tmp_path / "out"
    out.mkdir()
    rng = np.random.default_rng(0)
    measured = Measured(rng.exponential(0.1, 500), rng.exponential(0.02, 500))
    text = write_report(out, "Release r1", report, measured, model).read_text()
    assert "**Refused** by 2 of 3 gates: served keeps the tuning, close to merged." in text
    assert "| export | decision | why | would have passed with |" in text
    assert "| gptq | refused | a \\| b c | gates.max_quantize_share: 0.31 |" in text
    assert "| awq | passed |  |  |" in text
    for name in ("losses.png", "kl.png", "quant_loss.png"):
        assert f"]({name})" in text and (out / name).is_file()
    for name in ("losses.png", "kl.png"):
        from PIL import Image

        with Image.open(out / name) as picture:
            assert picture.mode == "RGBA"  # no ground of its own: light and dark pages alike
            assert picture.getpixel((1, 1))[3] == 0


def test_an_empty_report_is_readable() -> None:
    text = markdown("Release r1", GateReport({}, [Gate("parity", False, "x", "y", "refused")]))
    assert "**Refused** by 1 of 1 gates: parity." in text
    call = Gate("a", True, "'<tool_call> a|b'", "y")
    assert r"| a | passed | '\<tool_call> a\|b' | y |" in markdown("r", GateReport({}, [call]))
