"""What a launcher makes of ranks that ended, and which run files it never gets to see."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuneserve.errors import (
    DataError,
    DiskFull,
    OutOfMemory,
    ResourceError,
    RunFileError,
    StageCrashed,
    StageKilled,
)
from tuneserve.runfile import parse_run
from tuneserve.stages import StageContext
from tuneserve.train import launch, rank, stage
from tuneserve.train.job import context_of, job_of
from tuneserve.train.memory import of_ranks

LOST = {"crash": "RuntimeError: Connection closed by peer", "errno": None}
OURS = {"error": DataError("row 7 is bad", hint="mend it").to_json()}


@pytest.mark.parametrize(
    ("outcomes", "died", "kind", "text"),
    [
        ({0: LOST, 1: OURS}, {0: 1, 1: 1}, DataError, "row 7 is bad"),
        ({0: LOST}, {0: 1, 1: -9}, StageKilled, "rank 1 .* signal 9.*too little memory"),
        ({0: LOST, 2: LOST}, {0: 1, 1: -15, 2: 1}, StageKilled, "rank 1 .* signal 15(?!.*memory)"),
        ({0: LOST}, {0: 1, 1: -2}, StageKilled, "rank 1 .* signal 2 *;"),
        ({0: LOST}, {1: -11}, StageCrashed, "rank 1 .* signal 11 .*Segmentation"),
        ({0: LOST}, {1: -6}, StageCrashed, "rank 1 .* signal 6 "),
        ({0: LOST}, {1: -7}, StageCrashed, "rank 1 .* signal 7 .*/dev/shm"),
        # A rank that the agent itself had to kill is not among those that died before.
        ({0: LOST, 1: LOST}, {0: 1}, StageCrashed, "rank 0 .* Connection"),
        ({1: {"crash": "OSError", "errno": 28}, 0: LOST}, {0: 1, 1: 1}, DiskFull, "rank 1"),
        ({}, {0: 1}, StageCrashed, "without a result"),
    ],
)
def test_the_cause_is_raised_not_what_followed(
    outcomes: dict[int, Any], died: dict[int, int], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=f"(?s){text}") as caught:
        raise launch._error(outcomes, died)
    assert type(caught.value) is kind


# Ranks without torch: how they go, and what they do when they are told to.
_RANKS = """
import os, signal, sys, time
from pathlib import Path
rank, ready = int(os.environ["RANK"]), Path(sys.argv[1]) / "ready"
if rank == 1:
    if {deaf}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.touch()
    time.sleep(60)
while not ready.exists():
    time.sleep(0.01)
{goes}
"""


@pytest.mark.parametrize(
    ("deaf", "goes", "first"),
    [
        (True, "sys.exit(1)", {0: 1}),
        (False, "os.kill(os.getpid(), signal.SIGTERM)", {0: -15}),
        (False, "os.kill(os.getpid(), signal.SIGKILL)", {0: -9}),
    ],
    ids=["a peer is deaf to SIGTERM", "ended from outside", "killed"],
)
def test_who_died_first_is_known_and_the_others_are_ended_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool, goes: str, first: dict[int, int]
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANKS.format(deaf=deaf, goes=goes))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(launch, "_RANK", (str(script),))
    monkeypatch.setattr(launch, "_TERM_SECONDS", 1)
    launch._quiet_agent()  # imports it: no part of the time below
    before, began = signal.getsignal(signal.SIGTERM), time.monotonic()
    assert launch._run_ranks(2, tmp_path, lambda: None) == first
    assert time.monotonic() - began < 20  # the agent by itself gives a deaf one 30 s
    assert signal.getsignal(signal.SIGTERM) is before
    assert list((tmp_path / "tmp").iterdir()) == []  # the agent's own folder is ours


def context_in(folder: Path, **train: Any) -> StageContext:
    for name in ("out", "work"):
        (folder / name).mkdir()
    return StageContext(
        run_of(gpus=2, **train), folder, {}, folder / "out", folder / "work", {}, {}
    )


@pytest.mark.parametrize(
    ("outcome", "died", "kind", "told"),
    [
        (OURS, {1: 1}, DataError, True),
        (LOST, {1: 1}, StageCrashed, True),
        (None, {1: -9}, StageKilled, False),
        (LOST, {0: 1, 1: -9}, StageKilled, False),
        (None, {1: -15}, StageKilled, True),  # told to end, as by an operator or a service manager
        (None, {0: -9, 1: -15}, StageKilled, True),
        (None, {1: -2}, StageKilled, True),
    ],
)
def test_only_a_kill_leaves_the_next_call_something_to_conclude(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: dict[str, Any] | None,
    died: dict[int, int],
    kind: type[Exception],
    told: bool,
) -> None:
    """Rank 0, which keeps the note of the phase, is ended before it can correct it."""
    context = context_in(tmp_path)
    top = stage.Rung(stage.recipe_of(context, 64), True)

    def ranks(count: int, folder: Path, ended: Any) -> dict[int, int]:
        stage._note(context, top, "smoke")
        if outcome:
            (folder / "rank-1.json").write_text(json.dumps({**outcome, "at": 1.0}))
        return died

    monkeypatch.setattr(launch, "_run_ranks", ranks)
    with pytest.raises(kind):
        stage._together(context, top)
    if told:
        assert stage._start(context, top) == top
    else:
        assert stage._start(context, top) == top.next()


def test_what_did_not_fit_leaves_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_in(tmp_path)
    bottom = stage.Rung(stage.recipe_of(context, 64).with_micro_batch(1), True)

    def ranks(count: int, folder: Path, ended: Any) -> dict[int, int]:
        stage._note(context, bottom, "smoke")
        (folder / "rank-1.json").write_text('{"did_not_fit": "no room", "at": 1.0}')
        return {1: 1}

    monkeypatch.setattr(launch, "_run_ranks", ranks)
    with pytest.raises(OutOfMemory, match="rank 1: no room"):
        stage._together(context, bottom)
    assert stage._start(context, bottom) == bottom


def test_ranks_share_the_cores_on_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [launch._threads(count) for count in (2, 8, 32)] == [8, 2, 1]


def test_zero_in_an_interpreter_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan cannot look into engines.train.python; the stage, which runs in it, can."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunFileError, match="train.zero: 2 needs DeepSpeed"):
        launch.check_deepspeed()


def test_memory_that_ran_out_in_nccl_is_memory_that_ran_out() -> None:
    from torch.distributed import DistBackendError

    text = (
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.7\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    )
    assert rank._failed(DistBackendError(text)) == {"did_not_fit": "Cuda failure 2 'out of memory'"}
    lost = rank._failed(DistBackendError("NCCL error: remote process exited"))
    assert lost["crash"].startswith("DistBackendError: NCCL error: remote")
    assert rank._failed(OSError(28, "No space left on device"))["errno"] == 28


def test_nccl_has_its_share_of_what_may_be_taken(tmp_path: Path) -> None:
    context = context_in(tmp_path, target_utilization=0.5)
    rung = stage.Rung(stage.recipe_of(context, 64), True)
    alone = stage.Rung(replace(rung.recipe, processes=1), True)
    assert stage.limit_bytes(context, alone, 80 * 2**30) == 40 * 2**30
    assert stage.limit_bytes(context, rung, 80 * 2**30) == 40 * 2**30 - 840 * 2**20
    bottom = stage.Rung(rung.recipe.with_micro_batch(1), True)
    assert stage.limit_bytes(context, bottom, 80 * 2**30) is None


def test_outcomes_come_in_the_order_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text('{"at": 2.5}')
    (tmp_path / "rank-2.json").write_text('{"at": 1.5}')
    (tmp_path / "rank-1.json").write_text('{"at": ')  # cut off
    assert list(launch._outcomes(tmp_path, 3)) == [2, 0]


def test_fewer_gpus_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    launch.check_gpus(2)  # without a GPU: processes share the CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch.check_gpus(1)
    with pytest.raises(ResourceError, match="train.gpus: 2, and 1 can be seen") as caught:
        launch.check_gpus(2)
    assert caught.value.exit_status == 3


def test_each_rank_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """B09: never `auto`, which would put all ranks on the first GPU or one model on all."""
    import torch

    from tuneserve.lm import hardware

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert hardware.device() == torch.device("cuda", 1)
    monkeypatch.delenv("LOCAL_RANK")
    assert hardware.device() == torch.device("cuda", 0)


def test_another_launchers_variables_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B09: as torchrun, Slurm and MPI leave them; accelerate would wait for a second process."""
    for name in [name for name in os.environ if name in launch._OTHERS]:
        monkeypatch.delenv(name)
    launch.leave_other_launchers(1)
    assert not caplog.text
    theirs = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    theirs |= {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_DEEPSPEED": "true"}
    for name, value in {**theirs, "OMPI_COMM_WORLD_SIZE": "2", "RANKS": "3"}.items():
        monkeypatch.setenv(name, value)
    launch.leave_other_launchers(1)
    assert not theirs.keys() & os.environ.keys() and os.environ["RANKS"] == "3"
    assert "LOCAL_RANK=1, OMPI_COMM_WORLD_SIZE=2, RANK=1, WORLD_SIZE=2: " in caplog.text
    assert "ACCELERATE_MIXED_PRECISION=fp16" in caplog.text
    assert "train.gpus: 1 says how many" in caplog.text


def test_timelines_of_ranks_become_one() -> None:
    one = {"planned_peak_bytes": None, "peak_rss_bytes": 5, "timeline": [{"seconds": 0}]}
    two = {"planned_peak_bytes": None, "peak_rss_bytes": 7, "timeline": [{"seconds": 1}]}
    both = of_ranks([one, two])
    assert both["peak_rss_bytes"] == 7 and both["ranks"] == [one, two]
    assert both["timeline"] == one["timeline"]


def test_a_job_survives_the_way_to_a_rank(tmp_path: Path) -> None:
    from tuneserve.artifacts import Artifact

    context = StageContext(
        run_of(gpus=2), tmp_path, {"dataset": Artifact("d-1", tmp_path / "d", {})},
        tmp_path / "out", tmp_path / "work", {}, {"micro_batch": 2},
    )  # fmt: skip
    job = job_of(context, launcher=os.getpid())
    assert context_of(job) == context and job["launcher"] == os.getpid()


def run_of(**train: Any) -> Any:
    return parse_run(
        {"name": "t", "model": {"base": "b"}, "data": {"train": ["a"]}, "train": train}
    )


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ({"gpus": 3}, "16 cannot be shared evenly: not a multiple of 3"),
        ({"gpus": 2, "micro_batch": 16}, "not a multiple of 32"),
        ({"gpus": 2, "fsdp": True}, "FSDP2 cannot shard 4-bit weights"),
        ({"gpus": 2, "fsdp2": True, "method": "lora"}, "FSDP is not supported"),
        ({"gpus": 2, "zero": 3, "method": "lora"}, "zero: 3 is not supported"),
        ({"gpus": 2, "zero": 2}, "zero: 2 needs method: lora"),
        ({"gpus": 2, "zero": 2, "method": "lora", "lora": {"use_dora": True}}, "use_dora"),
    ],
)
def test_run_files_that_are_refused(train: dict[str, Any], text: str) -> None:
    with pytest.raises(RunFileError, match=text):
        run_of(**train)


def test_run_files_that_are_not() -> None:
    assert run_of(gpus=4, micro_batch=2).train.gpus == 4
    assert run_of(gpus=2, zero=2, method="lora").train.zero == 2
