"""What `tuneserve status` says of how the last runs ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tuneserve.__main__ import app
from tuneserve.ask import ask_endpoint
from tuneserve.errors import InputError
from tuneserve.release import control, state
from tuneserve.release.control import status
from tuneserve.release.layout import layout
from tuneserve.release.ready import saying
from tuneserve.release.status_text import status_text
from tuneserve.runs import RunRecord, Runs
from tuneserve.stagelog import kept_log, latest_log

REFUSED = "served loss 2.5\n  expected: below 1.0\n  what to do: see the report"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    return Runs()


def ended(runs: Runs, minute: int, state: str, error: str = "", served: str = "support") -> None:
    at = f"2026-11-30T02:{minute:02}:00.000+00:00"
    record = RunRecord(f"run{minute}", "weekly", served, state, at, error=error, stage="train")
    record.ended = None if state == "running" else at
    runs.save(record)


def test_a_refusal_is_said_aloud_where_nothing_serves_yet(runs: Runs) -> None:
    ended(runs, 1, "promoted")
    ended(runs, 2, "refused", REFUSED)
    ended(runs, 3, "running")
    ended(runs, 4, "failed", "out of memory\nwhile training", served="other")
    found = status()
    assert found["last_runs"]["support"] == {
        "run": "run2",
        "state": "refused",
        "ended": "2026-11-30T02:02:00.000+00:00",
        "stage": "train",
        "error": "served loss 2.5",
    }
    assert status_text(found).splitlines() == [
        "nothing was released yet; `tuneserve run RUN.yaml` does",
        "support: nothing serves; last run: REFUSED, 2026-11-30T02:02:00Z: served loss 2.5",
        "other: nothing serves; last run: FAILED in train, 2026-11-30T02:04:00Z: "
        "out of memory while training",
    ]


def test_it_stands_beside_what_serves(runs: Runs) -> None:
    ended(runs, 1, "still refused", REFUSED)
    entry = {"state": "up", "release": "r1", "since": "then", "health": "healthy", "history": []}
    shown = {
        "endpoint": "http://127.0.0.1:8080/v1",
        "default": "support",
        "names": {"support": {**entry, "memory_bytes": 2**30}},
        "last_runs": runs.last_ends(),
    }
    assert status_text(shown).splitlines()[-1] == (
        "  last run: STILL REFUSED, 2026-11-30T02:01:00Z: served loss 2.5"
    )
    assert status_text(shown).splitlines()[1].startswith("support (default): up")
    asked = {**shown, "asks_for_key": True, "keys": ["mobile", "web"]}
    assert status_text(asked).splitlines()[1] == "  asks for an API key (mobile, web)"
    assert "none is left: `tuneserve keys add`" in status_text({**asked, "keys": []})
    ended(runs, 2, "confirmed")
    shown["last_runs"] = runs.last_ends()
    assert status_text(shown).splitlines()[-1] == "  last run: confirmed, 2026-11-30T02:02:00Z"


def test_runs_shows_the_time_from_start_to_end_and_the_whole_reason(runs: Runs) -> None:
    record = RunRecord("run1", "weekly", "support", "failed", "2026-11-30T02:01:00.000+00:00")
    record.ended, record.stage = "2026-11-30T02:04:05.000+00:00", "train"
    record.seconds, record.error = {"train": 7.0}, "out of memory\nwhile training\n  expected: more"
    runs.save(record)
    ended(runs, 9, "running")  # killed: nobody saw when
    assert CliRunner().invoke(app, ["runs"]).stdout.splitlines() == [
        "2026-11-30T02:01:00  support  failed in train  (3 min 05 s, run run1)",
        "    out of memory while training",
        "2026-11-30T02:09:00  support  stale in train  (run run9)",
    ]


def test_findings_stay_apart_in_one_line_and_no_stage_is_made_up(runs: Runs) -> None:
    said = "2 rejected\n  the findings:\n    a.jsonl:7: x\n    a.jsonl:9: y\n  expected: less"
    record = RunRecord("run1", "weekly", "support", "failed", "2026-11-30T02:01:00.000+00:00")
    record.ended, record.error = "2026-11-30T02:01:02.000+00:00", said  # before any stage
    runs.save(record)
    why = "2 rejected; the findings: a.jsonl:7: x; a.jsonl:9: y"
    assert CliRunner().invoke(app, ["runs"]).stdout.splitlines() == [
        "2026-11-30T02:01:00  support  failed  (2 s, run run1)",
        f"    {why}",
    ]
    assert status_text(status()).splitlines()[-1] == (
        f"support: nothing serves; last run: FAILED, 2026-11-30T02:01:02Z: {why}"
    )


def test_a_run_under_way_is_said(runs: Runs) -> None:
    at = "2026-11-30T02:01:00.000+00:00"
    with runs.recording(RunRecord("run1", "weekly", "support", started=at, stage="merge")):
        assert status_text(status()).splitlines()[1:] == [
            "support: run under way: merge, since 2026-11-30T02:01:00Z"
        ]
    assert status()["runs_under_way"] == {}


def test_what_is_down_is_started_by_up(runs: Runs) -> None:
    with state.change(layout()) as changed:
        made = changed.add("support", "0123456789", "m", "")
        changed.names["support"] = state.Name(active=made.id, since="then", wanted="down")
        changed.default = "support"
    shown = status_text(status()).splitlines()
    assert shown[1] == ("support (default): down, release r0001-01234567; `tuneserve up` starts it")
    with pytest.raises(InputError, match="is down[^`]*`tuneserve up` starts it"):
        ask_endpoint("Hello?")


def test_a_name_that_never_served_has_nothing_to_go_back_to(runs: Runs) -> None:
    with state.change(layout()) as changed:
        changed.add("support", "0123456789", "m", "")
        changed.names["support"] = state.Name()
    before = state.read(layout())
    with pytest.raises(InputError, match="no release of support was promoted yet") as caught:
        control.rollback("support")
    assert "`tuneserve runs`" in caught.value.hint and state.read(layout()) == before


def test_logs_without_a_release_name_the_stages_that_ran(runs: Runs) -> None:
    with pytest.raises(InputError, match="nothing was released yet") as caught:
        control.log_files()
    assert "`tuneserve run RUN.yaml`" in caught.value.hint
    for at, stage in enumerate(("validate", "train", "plan")):
        with kept_log("weekly", stage, lambda _: None) as write:
            if stage != "plan":  # which says nothing
                write("words")
        os.utime(latest_log(stage), (at, at))
    with pytest.raises(InputError, match="nothing was released yet") as caught:
        control.log_files()
    assert caught.value.expected.endswith("a stage that ran here: validate, train")
    assert caught.value.hint == "`tuneserve logs train` shows what ran last"
    with pytest.raises(InputError, match="the stage merge has no log") as caught:
        control.log_files("merge")
    assert "re-used" in caught.value.hint and "`tuneserve logs train`" in caught.value.hint


def test_logs_of_a_name_whose_releases_were_refused(runs: Runs) -> None:
    with state.change(layout()) as changed:
        changed.add("support", "0123456789", "m", "")
        changed.add("support", "123456789a", "m", "")
    newest = layout().server_log("r0002-12345678")
    assert control.log_files("support") == control.log_files() == [newest]
    with pytest.raises(InputError, match="one of support, .*train"):
        control.log_files("suport")


def test_a_message_of_several_lines_is_told_by_its_first(tmp_path: Path) -> None:
    said = "(Core pid=7) INFO 11-30 09:00:00 [omp.py:184] "
    log = tmp_path / "log"
    log.write_text(f"{said}OpenMP thread binding:\n{said}\treserved_cpus=[]\n")
    assert saying(log) == "OpenMP thread binding:"
