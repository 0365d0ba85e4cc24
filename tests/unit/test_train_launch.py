"""What a launcher makes of ranks that ended, and which run files it never gets to see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tuneserve.errors import (
    DataError,
    DiskFull,
    ResourceError,
    RunFileError,
    StageCrashed,
    StageKilled,
)
from tuneserve.runfile import parse_run
from tuneserve.train import launch
from tuneserve.train.memory import of_ranks
from tuneserve.train.rank import _context, job_of

LOST = {"crash": "RuntimeError: Connection closed by peer", "errno": None}
OURS = {"error": DataError("row 7 is bad", hint="mend it").to_json()}


@pytest.mark.parametrize(
    ("outcomes", "died", "kind", "text"),
    [
        ({0: LOST, 1: OURS}, {0: 1, 1: 1}, DataError, "row 7 is bad"),
        ({0: LOST}, {0: 1, 1: -9}, StageKilled, "rank 1 .* signal 9"),
        ({0: LOST, 2: LOST}, {0: 1, 1: -15, 2: 1}, StageCrashed, "rank 0 .* Connection"),
        ({1: {"crash": "OSError", "errno": 28}, 0: LOST}, {0: 1, 1: 1}, DiskFull, "rank 1"),
        ({}, {0: 1}, StageCrashed, "without a result"),
    ],
)
def test_the_cause_is_raised_not_what_followed(
    outcomes: dict[int, Any], died: dict[int, int], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        raise launch._error(outcomes, died)


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


def test_timelines_of_ranks_become_one() -> None:
    one = {"planned_peak_bytes": None, "peak_rss_bytes": 5, "timeline": [{"seconds": 0}]}
    two = {"planned_peak_bytes": None, "peak_rss_bytes": 7, "timeline": [{"seconds": 1}]}
    both = of_ranks([one, two])
    assert both["peak_rss_bytes"] == 7 and both["ranks"] == [one, two]
    assert both["timeline"] == one["timeline"]


def test_a_job_survives_the_way_to_a_rank(tmp_path: Path) -> None:
    from tuneserve.artifacts import Artifact
    from tuneserve.stages import StageContext

    context = StageContext(
        run_of(gpus=2), tmp_path, {"dataset": Artifact("d-1", tmp_path / "d", {})},
        tmp_path / "out", tmp_path / "work", {}, {"micro_batch": 2},
    )  # fmt: skip
    job = job_of(context, launcher=os.getpid())
    assert _context(job) == context and job["launcher"] == os.getpid()


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
