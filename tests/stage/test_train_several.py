"""Two processes train what one does: the same rows in the same steps, the same losses.

On a machine without GPUs they talk through gloo; on one with two, through NCCL. Losses of two
processes equal those of one within 1e-4 of their size: sums are taken in another order. All compute
in float32, also where the processor has bfloat16, whose rounding is coarser than that.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from train_rows import IGNORED, make_context
from tuneserve.artifacts import Artifact
from tuneserve.errors import AdapterError, DataError, OutOfMemory, StageKilled
from tuneserve.stages import StageContext
from tuneserve.train import launch
from tuneserve.train.checkpoints import SEAL
from tuneserve.train.job import job_of
from tuneserve.train.stage import run

pytestmark = pytest.mark.usefixtures("one_thread", "float32_ranks")

TRAIN = {
    "effective_batch": 8,
    "max_steps": 4,
    "learning_rate": 4e-3,
    "save_steps": 2,
    "optimizer": "adamw_torch",
    "lora": {"r": 8},
}
TOLERANCE = 1e-4
SHIM = Path(__file__).parents[1] / "rank_shim.py"


Trained = tuple[StageContext, dict[str, Any]]


@pytest.fixture(scope="module")
def float32_ranks(float32: None) -> Iterator[None]:
    """Also in the ranks that this process starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_RANK", (str(SHIM),))
        patch.setenv("RANK_SHIM_DTYPE", "float32")
        yield


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory,
    pico_model: Path,
    dataset: Artifact,
    float32_ranks: None,
) -> Trained:
    context = make_context(
        tmp_path_factory.mktemp("one"), pico_model, {"dataset": dataset}, TRAIN, {"micro_batch": 2}
    )
    return context, run(context)


def several(
    folder: Path, base: Path, dataset: Artifact, *, micro_batch: int = 2, **train: Any
) -> StageContext:
    return make_context(
        folder,
        base,
        {"dataset": dataset},
        {**TRAIN, "gpus": 2, **train},
        {"micro_batch": micro_batch},
    )


def losses(context: StageContext) -> dict[int, float]:
    points = map(json.loads, (context.out / "loss.jsonl").read_text().splitlines())
    return {point["step"]: point["loss"] for point in points if "loss" in point}


def assert_the_same(found: StageContext, wanted: StageContext) -> None:
    assert losses(found) == pytest.approx(losses(wanted), rel=TOLERANCE)
    name = "adapter_model.safetensors"
    ours, theirs = load_file(found.out / name), load_file(wanted.out / name)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-4)


def going_on(context: StageContext, other: StageContext, step: int) -> None:
    """Leave in `context` what `other` had written when it was at `step`."""
    name = f"checkpoint-{step}"
    shutil.copytree(other.work / name, context.work / name)
    shutil.copyfile(other.work / "loss.jsonl", context.work / "loss.jsonl")


def test_the_losses_of_two_are_those_of_one(
    tmp_path: Path, pico_model: Path, dataset: Artifact, alone: Trained
) -> None:
    import pyarrow.parquet as pq

    labels = pq.read_table(dataset.path / "train.parquet")["labels"].to_pylist()
    assert len({sum(label != IGNORED for label in row) for row in labels}) > 1  # unequal counts
    one, by_one = alone
    two = several(tmp_path / "two", pico_model, dataset)
    by_two = run(two)
    assert_the_same(two, one)
    assert by_two["eval_loss"] == pytest.approx(by_one["eval_loss"], rel=TOLERANCE)
    assert (by_two["gpus"], by_two["micro_batch"], by_two["gradient_accumulation"]) == (2, 2, 2)
    for name in ("effective_batch", "steps", "supervised_tokens_seen", "trainable_parameters"):
        assert by_two[name] == by_one[name]
    assert {path.name for path in two.out.iterdir()} == {path.name for path in one.out.iterdir()}
    memory = json.loads((two.out / "memory.json").read_text())
    assert len(memory["ranks"]) == 2
    for each in memory["ranks"]:
        assert {"load", "smoke", "train", "evaluate"} <= {p["phase"] for p in each["timeline"]}
    assert memory["peak_rss_bytes"] == max(each["peak_rss_bytes"] for each in memory["ranks"])

    sealed = json.loads((two.work / "checkpoint-2" / SEAL).read_text())
    assert sealed["shape"] == {
        "steps": 4,
        "effective_batch": 8,
        "products": "bfloat16 or float32",
    }

    # What two wrote, one goes on with.
    context = several(tmp_path / "resumed", pico_model, dataset, gpus=1)
    going_on(context, two, 2)
    assert run(context)["gpus"] == 1
    assert_the_same(context, one)


def test_what_does_not_fit_on_one_rank_is_tried_smaller_on_all(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    alone: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Begun by one process, gone on with by two, of which one has room for two rows only."""
    monkeypatch.setenv("RANK_SHIM", "1 room 2")
    context = several(tmp_path, pico_model, dataset, micro_batch=4)
    going_on(context, alone[0], 2)
    metrics = run(context)
    assert (metrics["micro_batch"], metrics["gradient_accumulation"]) == (2, 2)
    [tried] = metrics["did_not_fit"]
    assert tried.startswith("micro-batch 4 x 1 accumulated x 2 processes")
    assert "rank 1: CUDA out of memory" in tried
    assert_the_same(context, alone[0])


def test_what_fits_nowhere_on_one_rank_is_told_by_it(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_SHIM", "1 room 0")
    context = several(tmp_path, pico_model, dataset, micro_batch=1)
    with pytest.raises(OutOfMemory, match="rank 1: CUDA out of memory"):
        run(context)
    report = json.loads((context.work / "first_oom.json").read_text())
    assert report["rank"] == 1 and "smoke: forward" in report["phases"]
    assert not (context.work / "rung.json").exists()  # the next call begins where this one did
    assert list(context.out.iterdir()) == []
    assert ranks_of(context) == {}


@pytest.mark.full
@pytest.mark.parametrize(("shim", "kind"), [("1 room 0", OutOfMemory), ("1 smoke 0", DataError)])
def test_the_call_after_a_smoke_step_that_failed_on_one_rank_begins_at_the_top(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    shim: str,
    kind: type[Exception],
) -> None:
    monkeypatch.setenv("RANK_SHIM", shim)
    context = several(tmp_path, pico_model, dataset, max_steps=1)
    with pytest.raises(kind):
        run(context)
    monkeypatch.undo()
    metrics = run(context)
    assert (metrics["micro_batch"], metrics["did_not_fit"]) == (2, [])


_STAGE = """
import json, logging, sys
from pathlib import Path
from tuneserve.train import stage
from tuneserve.train.job import context_of
logging.basicConfig(level=logging.INFO)
stage.run(context_of(json.loads(Path(sys.argv[1]).read_text())))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_no_rank_outlives_the_stage(
    tmp_path: Path, pico_model: Path, dataset: Artifact, number: signal.Signals
) -> None:
    context = several(tmp_path, pico_model, dataset, max_steps=10**6, save_steps=10**6)
    job = tmp_path / "job.json"
    job.write_text(json.dumps(job_of(context)))
    command = [sys.executable, "-c", _STAGE, str(job)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            assert any("loss" in line for line in child.stderr)  # they train
            ranks = [os.pidfd_open(pid) for pid in ranks_of(context)]
            assert len(ranks) == 2
            child.send_signal(number)
            assert child.wait(15) == -number
            for alive in ranks:
                assert select.select([alive], [], [], 15)[0], "a rank is still alive"
                os.close(alive)
        finally:
            child.kill()
    assert ranks_of(context) == {}


def test_a_checkpoint_of_other_steps_is_refused(
    tmp_path: Path, pico_model: Path, dataset: Artifact, alone: Trained
) -> None:
    context = several(tmp_path, pico_model, dataset, gpus=1, max_steps=6)
    going_on(context, alone[0], 2)
    with pytest.raises(AdapterError, match="steps 4, now 6"):
        run(context)
    assert (context.work / "checkpoint-2").is_dir()


def test_the_error_of_one_rank_ends_all(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_SHIM", "1 error 2")
    context = several(tmp_path, pico_model, dataset)
    with pytest.raises(DataError, match="row 2 is bad") as caught:
        run(context)
    ended = time.time()
    assert caught.value.hint == "mend it"
    died = json.loads((context.work / "ranks" / "rank-1.json").read_text())["at"]
    assert ended - died < 15  # the others wait in a collective, and would for half an hour
    assert list(context.out.iterdir()) == []
    assert ranks_of(context) == {}


@pytest.mark.full
def test_a_killed_rank_ends_all_and_the_next_call_goes_on(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    alone: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK_SHIM", "1 kill 3")
    context = several(tmp_path, pico_model, dataset)
    with pytest.raises(StageKilled, match="rank 1 .* signal 9") as caught:
        run(context)
    assert caught.value.retryable
    assert list(context.out.iterdir()) == []
    assert ranks_of(context) == {}
    monkeypatch.undo()
    run(context)
    assert_the_same(context, alone[0])


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed not installed")
def test_zero_spreads_the_optimizer_and_changes_no_loss(
    tmp_path: Path, pico_model: Path, dataset: Artifact
) -> None:
    """ZeRO-2 on two processes against one without it, and its checkpoint on one process."""
    one = several(tmp_path / "one", pico_model, dataset, gpus=1, method="lora")
    run(one)
    two = several(tmp_path / "two", pico_model, dataset, method="lora", zero=2)
    run(two)
    assert_the_same(two, one)
    state = load_file(two.work / "checkpoint-2" / "zero.safetensors")
    adapter = load_file(two.work / "checkpoint-2" / "adapter_model.safetensors")
    assert len(state) == 3 * len(adapter)  # master weight and two moments each
    again = several(tmp_path / "again", pico_model, dataset, method="lora", zero=2, gpus=1)
    going_on(again, two, 2)
    run(again)
    assert_the_same(again, one)


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed not installed")
def test_zero_goes_on_with_more_processes(
    tmp_path: Path, pico_model: Path, dataset: Artifact
) -> None:
    one = several(tmp_path / "one", pico_model, dataset, method="lora", zero=2, gpus=1)
    run(one)
    two = several(tmp_path / "two", pico_model, dataset, method="lora", zero=2)
    going_on(two, one, 2)
    assert run(two)["gpus"] == 2
    assert_the_same(two, one)


def ranks_of(context: StageContext) -> dict[int, str]:
    """Processes that still work on this training, by number: their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(context.work) in command:
            found[int(path.parent.name)] = command
    return found
