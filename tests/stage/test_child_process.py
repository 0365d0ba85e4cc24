"""The child protocol with real processes: results, errors, kills, and nobody left behind."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shim import executed, run_file
from tuneserve.artifacts import Store, artifact_id
from tuneserve.errors import (
    DataError,
    DiskFull,
    HubError,
    InputError,
    ModelError,
    OutOfMemory,
    StageCrashed,
    StageKilled,
    StageTimeout,
    TuneserveError,
)
from tuneserve.process import StageCall, StageResult, run_stage

WAIT_SECONDS = 60


def call(folder: Path, **settings: Any) -> StageCall:
    """A quantize stage (it needs neither base nor files) that behaves as told."""
    return StageCall("quantize", run_file(folder), settings=settings)


def kept(folder: Path) -> set[str]:
    """What the store shows to others."""
    root = folder / "store"
    return (
        {p.name for p in root.iterdir() if not p.name.startswith(".")} if root.exists() else set()
    )


def drafts(folder: Path) -> list[Path]:
    return list((folder / "store" / ".drafts").glob("*"))


def test_a_stage_gives_an_artifact_and_the_second_time_it_is_there(tmp_path: Path) -> None:
    lines: list[str] = []
    asked = call(tmp_path)
    first = run_stage(asked, log_line=lines.append)
    assert "quantize at work" in lines
    assert first.artifact and first.path and not first.cached
    assert first.metrics["rows"] == 3 and first.metrics["peak_rss_bytes"] > 5 * 2**20
    assert (Path(first.path) / "result.txt").read_text() == "done"
    second = run_stage(asked)
    assert second.cached and second.artifact == first.artifact
    assert executed(tmp_path) == ["quantize"]
    assert StageResult(**json.loads(json.dumps(second.to_json()))) == second
    assert len(json.dumps(second.to_json())) < 5_000


def test_other_settings_are_another_artifact(tmp_path: Path) -> None:
    one = run_stage(call(tmp_path, text="one"))
    two = run_stage(call(tmp_path, text="two"))
    assert one.artifact != two.artifact and len(kept(tmp_path)) == 2


def test_a_damaged_artifact_is_made_again(tmp_path: Path) -> None:
    asked = call(tmp_path)
    first = run_stage(asked)
    (Path(str(first.path)) / "result.txt").write_text("DONE")
    again = run_stage(asked)
    assert not again.cached and again.artifact == first.artifact
    assert (Path(str(again.path)) / "result.txt").read_text() == "done"


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("data error", DataError, "data.jsonl:1:1: found x"),
        ("hub error", HubError, "the hub did not answer"),
        ("disk full", DiskFull, "the disk is full"),
        ("out of memory", OutOfMemory, "cannot allocate 1 TiB"),
        ("bug", StageCrashed, "KeyError: 'our bug'"),
        ("killed", StageKilled, "last words"),
    ],
)
def test_errors_arrive_typed_and_nothing_half_written_remains(
    tmp_path: Path, do: str, kind: type[TuneserveError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        run_stage(call(tmp_path, do=do), log_line=lambda line: None)
    assert type(caught.value) is kind
    assert message in str(caught.value)
    assert caught.value.hint
    assert kept(tmp_path) == set()
    if do != "killed":  # a killed child cannot tidy up: the next attempt clears its draft
        assert drafts(tmp_path) == []
    fixed = run_stage(call(tmp_path))
    assert Store(tmp_path / "store").find(str(fixed.artifact), rehash=True) is not None


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("inbox/one.jsonl", DataError),
        ("inbox/new.jsonl", DataError),  # not there yet when the stage was asked for
        ("template.jinja", ModelError),
        ("base/generation_config.json", ModelError),
        ("base/model.safetensors", ModelError),
    ],
)
def test_what_changed_while_it_was_read_is_refused(
    tmp_path: Path, pico_model: Path, file: str, kind: type[TuneserveError]
) -> None:
    base = Path(shutil.copytree(pico_model, tmp_path / "base"))
    (base / "generation_config.json").write_text("{}")
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "one.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    run = run_file(
        tmp_path,
        data={"train": str(tmp_path / "inbox")},
        model={"base": str(base), "chat_template": str(tmp_path / "template.jinja")},
    )
    settings = {"do": "change", "file": str(tmp_path / file)}
    with pytest.raises(kind, match="changed while stage validate read") as caught:
        run_stage(StageCall("validate", run, base, settings=settings), log_line=lambda line: None)
    assert type(caught.value) is kind and not caught.value.retryable
    named = f"the weights in {base}" if file.endswith(".safetensors") else str(tmp_path / file)
    assert caught.value.message.startswith(f"{named}: changed")
    assert kept(tmp_path) == set() and drafts(tmp_path) == []
    again = run_stage(StageCall("validate", run, base), log_line=lambda line: None)
    assert kept(tmp_path) == {again.artifact}


def test_a_template_that_goes_while_it_is_read_is_named(tmp_path: Path, pico_model: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    run = run_file(tmp_path, model={"base": str(pico_model), "chat_template": str(template)})
    asked = StageCall("validate", run, pico_model)
    request = {"key": asked.key(), "sources": asked.sources(), "base_files": asked.base_files()}
    asked.check_unchanged(request)
    template.unlink()
    with pytest.raises(ModelError) as caught:
        asked.check_unchanged(request)
    assert caught.value.message.startswith(f"{template}: changed while stage validate read")


def test_a_file_that_changed_between_key_and_sources_is_named(
    tmp_path: Path, pico_model: Path
) -> None:
    asked = StageCall("validate", run_file(tmp_path), pico_model)
    key = asked.key()
    (tmp_path / "data.jsonl").write_text('{"messages": [1]}\n')
    request = {"key": key, "sources": asked.sources(), "base_files": asked.base_files()}
    with pytest.raises(DataError, match=r"data\.jsonl: changed while stage validate read"):
        asked.check_unchanged(request)


def test_a_remote_file_is_read_once_for_key_and_check(
    tmp_path: Path, pico_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    from tuneserve import calls

    files = fsspec.filesystem("memory")
    place = f"memory:///{tmp_path.name}/rows.jsonl"
    files.pipe(place, b'{"messages": []}\n')
    read: list[str] = []
    digest = calls._stream_digest
    monkeypatch.setattr(calls, "_stream_digest", lambda path: read.append(path) or digest(path))
    asked = StageCall("validate", run_file(tmp_path, data={"train": place}), pico_model)
    key = asked.key()
    request = {"key": key, "stamps": asked.stamps(), "sources": asked.sources()}
    request["base_files"] = asked.base_files()
    monkeypatch.setattr(calls, "_known", {})  # the check is made in another process
    asked.check_unchanged(json.loads(json.dumps(request)))
    assert read == [place]
    files.pipe(place, b'{"messages": {}}\n')
    with pytest.raises(DataError, match="changed while stage validate read the data"):
        asked.check_unchanged(request)


def test_training_is_not_thrown_away_for_a_base_that_changed_afterwards(
    tmp_path: Path, pico_model: Path
) -> None:
    base = Path(shutil.copytree(pico_model, tmp_path / "base"))
    settings = {"do": "change", "file": str(base / "config.json")}
    asked = StageCall("train", run_file(tmp_path), base, settings=settings)
    key = asked.key()
    request = {"key": key, "sources": {}, "base_files": asked.base_files()}
    made = run_stage(asked, log_line=lambda line: None)
    assert kept(tmp_path) == {made.artifact} and made.artifact == artifact_id("adapter", key)
    with pytest.raises(ModelError, match="changed while stage train read"):  # before it begins
        asked.check_unchanged(request)


@pytest.mark.parametrize(
    ("status", "kind", "how"),
    [
        (255, StageCrashed, "ended with status 255"),
        (200, StageCrashed, "ended with status 200"),
        (137, StageKilled, r"was killed by signal 9 \(SIGKILL\)"),
        (139, StageCrashed, r"was killed by signal 11 \(SIGSEGV\)"),
        (1, StageCrashed, "ended with status 1"),
    ],
)
def test_only_signals_are_called_so(
    tmp_path: Path, status: int, kind: type[StageCrashed], how: str
) -> None:
    script = tmp_path / "wrapper"
    asked = f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi'  # for its packages
    script.write_text(f"#!/bin/sh\n{asked}\nexit {status}\n")
    script.chmod(0o755)
    run = run_file(tmp_path, engines={"quantize": {"python": str(script)}})
    with pytest.raises(StageCrashed, match=how) as caught:
        run_stage(StageCall("quantize", run), log_line=lambda line: None)
    assert type(caught.value) is kind


def test_a_file_that_comes_to_the_base_does_not_cost_a_finished_stage(
    tmp_path: Path, pico_model: Path
) -> None:
    base = Path(shutil.copytree(pico_model, tmp_path / "base"))
    settings = {"do": "change", "file": str(base / "notes.txt")}
    asked = StageCall("validate", run_file(tmp_path), base, settings=settings)
    before = asked.key()
    made = run_stage(asked, log_line=lambda line: None)
    assert kept(tmp_path) == {made.artifact} and made.artifact == artifact_id("dataset", before)
    assert asked.key() != before, "the next run sees another base"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGTERM, StageKilled),
        (signal.SIGHUP, StageKilled),
        (signal.SIGSEGV, StageCrashed),
        (signal.SIGABRT, StageCrashed),
        (signal.SIGILL, StageCrashed),
        (signal.SIGBUS, StageCrashed),
    ],
)
def test_only_a_signal_from_outside_can_pass_by_itself(
    tmp_path: Path, number: signal.Signals, kind: type[TuneserveError]
) -> None:
    with pytest.raises(StageCrashed, match=rf"signal {int(number)} \({number.name}\)") as caught:
        asked = call(tmp_path, do="raise signal", signal=int(number))
        run_stage(asked, log_line=lambda line: None)
    assert type(caught.value) is kind and caught.value.retryable == (kind is StageKilled)
    assert "last words" in caught.value.message and kept(tmp_path) == set()


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    run = run_file(tmp_path, engines={"quantize": {"python": str(tmp_path / "no-python")}})
    with pytest.raises(InputError, match="no-python") as caught:
        run_stage(StageCall("quantize", run))
    assert "engines" in caught.value.hint
    assert kept(tmp_path) == set()


def test_a_log_that_nobody_reads_does_not_stop_the_stage(tmp_path: Path) -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError

    made = run_stage(call(tmp_path, do="talk"), log_line=gone, timeout_seconds=120)
    assert made.artifact in kept(tmp_path)


class Watch:
    """The reading end of the pipe that a hanging stage and its grandchild hold open."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fifo"
        os.mkfifo(self.path)
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def pids(self) -> list[int]:
        """Wait until stage and grandchild run."""
        assert select.select([self.descriptor], [], [], WAIT_SECONDS)[0]
        return list(json.loads(os.read(self.descriptor, 1000)))

    def wait_until_both_are_gone(self) -> None:
        """The pipe ends when its last writer does."""
        assert select.select([self.descriptor], [], [], WAIT_SECONDS)[0], "somebody survived"
        assert os.read(self.descriptor, 1000) == b""
        os.close(self.descriptor)


def test_a_run_file_can_limit_a_stage(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    run = run_file(tmp_path)
    engine = run.engines.quantize.model_copy(update={"max_seconds": 6})
    run = run.model_copy(update={"engines": run.engines.model_copy(update={"quantize": engine})})
    settings = {"do": "hang", "fifo": str(watch.path)}
    with pytest.raises(StageTimeout, match="longer than 6 s"):
        run_stage(StageCall("quantize", run, settings=settings))
    watch.pids()
    watch.wait_until_both_are_gone()
    assert kept(tmp_path) == set()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nobody_survives_the_parent(tmp_path: Path, how: signal.Signals) -> None:
    watch = Watch(tmp_path)
    request = tmp_path / "call.json"
    request.write_text(json.dumps(call(tmp_path, do="hang", fifo=str(watch.path)).to_json()))
    code = (
        "import json,sys; from tuneserve.process import StageCall, run_stage\n"
        "run_stage(StageCall.from_json(json.load(open(sys.argv[1]))))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(request)], stderr=subprocess.DEVNULL)
    watch.pids()
    parent.send_signal(how)
    parent.wait(WAIT_SECONDS)
    watch.wait_until_both_are_gone()
    assert kept(tmp_path) == set()
    again = run_stage(call(tmp_path))  # no lock is left behind either
    assert again.artifact in kept(tmp_path)
