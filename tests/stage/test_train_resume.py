"""A killed run goes on where it was: the same weights as one that nobody disturbed (B06, B07)."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from train_rows import make_context
from tuneserve.artifacts import Artifact, file_sha256
from tuneserve.errors import AdapterError
from tuneserve.stages import StageContext
from tuneserve.train.stage import run

pytestmark = pytest.mark.usefixtures("one_thread")

# Rows of an adapter with dropout need the random state of the checkpoint as well; a paged
# optimizer gives way to another one on a CPU, with all of its state kept.
TRAIN = {
    "effective_batch": 4,
    "max_steps": 7,
    "learning_rate": 4e-3,
    "save_steps": 2,
    "optimizer": "paged_adamw_8bit",
    "lora": {"r": 8, "dropout": 0.1},
}
FILES = ("adapter_model.safetensors", "loss.jsonl", "training.json")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, pico_model: Path, dataset: Artifact
) -> dict[str, str]:
    context = make_context(
        tmp_path_factory.mktemp("whole"), pico_model, {"dataset": dataset}, TRAIN
    )
    run(context)
    return {name: file_sha256(context.out / name) for name in FILES}


@pytest.fixture(scope="module")
def killed_after_5(
    tmp_path_factory: pytest.TempPathFactory, pico_model: Path, dataset: Artifact
) -> Path:
    """The work folder of a run that was killed in step 6: checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("killed")
    killed_at(make_context(folder, pico_model, {"dataset": dataset}, TRAIN), step=5)
    return folder / "work"


def killed_at(context: StageContext, step: int) -> None:
    """Run the stage in a forked child that is killed with signal 9 once `step` is done."""
    from tuneserve.train.watch import Watch

    child = os.fork()
    if child == 0:
        record = Watch.on_log

        def on_log(self: Any, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            record(self, args, state, *rest, **kwargs)
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

        Watch.on_log = on_log  # type: ignore[method-assign]
        run(context)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def going_on(folder: Path, base: Path, dataset: Artifact, work: Path, **train: Any) -> StageContext:
    context = make_context(folder, base, {"dataset": dataset}, {**TRAIN, **train})
    shutil.copytree(work, context.work, dirs_exist_ok=True)
    return context


def test_it_ends_with_the_same_bytes(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    undisturbed: dict[str, str],
    killed_after_5: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = going_on(tmp_path, pico_model, dataset, killed_after_5)
    assert {p.name for p in context.work.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    with caplog.at_level(logging.INFO):
        metrics = run(context)
    first = caplog.text.index("7 steps of 4 rows: micro-batch ")
    assert "; goes on from the checkpoint of step 4, once it is checked\n" in caplog.text[first:]
    tried = caplog.text.index("trying the longest rows once")
    assert first < tried < caplog.text.index("going on from the checkpoint of step 4")
    assert "adamw_torch instead of paged_adamw_8bit" in caplog.text
    assert metrics["steps"] == 7
    assert {name: file_sha256(context.out / name) for name in FILES} == undisturbed


def test_a_curve_that_the_disk_lost_is_the_checkpoints(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    undisturbed: dict[str, str],
    killed_after_5: Path,
) -> None:
    """Of a machine that lost its power: the checkpoint was flushed, the curve beside it was not."""
    context = going_on(tmp_path, pico_model, dataset, killed_after_5)
    (context.work / "loss.jsonl").unlink()
    assert run(context)["steps"] == 7
    assert {name: file_sha256(context.out / name) for name in FILES} == undisturbed


@pytest.mark.parametrize("damage", ["cut", "unsealed"])
def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    undisturbed: dict[str, str],
    killed_after_5: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    context = going_on(tmp_path, pico_model, dataset, killed_after_5)
    newest = context.work / "checkpoint-4"
    if damage == "cut":
        state = newest / "optimizer.pt"
        state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    else:
        (newest / "sealed.json").unlink()
    with caplog.at_level(logging.INFO):
        run(context)
    named = 4 if damage == "cut" else 2  # an unfinished one is known without reading it
    assert f"; goes on from the checkpoint of step {named}, once it is checked\n" in caplog.text
    assert "step 4 is damaged" in caplog.text
    assert "going on from the checkpoint of step 2" in caplog.text
    assert {name: file_sha256(context.out / name) for name in FILES} == undisturbed


def test_a_checkpoint_of_another_adapter_is_refused(
    tmp_path: Path, pico_model: Path, dataset: Artifact, killed_after_5: Path
) -> None:
    context = going_on(tmp_path, pico_model, dataset, killed_after_5, lora={"r": 4})
    with pytest.raises(AdapterError, match=r"8x\d+ in the file, 4x\d+ in the model"):
        run(context)
    assert list(context.out.iterdir()) == []
