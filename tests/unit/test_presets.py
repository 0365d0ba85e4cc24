"""Every run file that is shipped fits, by prediction, on the card that it is named after."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tuneserve.checkpoint.base import peek_base
from tuneserve.plan.build import plan_for
from tuneserve.plan.machine import Gpu, GpuProcess, Machine
from tuneserve.plan.plan import Plan
from tuneserve.plan.speed import step_seconds
from tuneserve.plan.times import stage_times
from tuneserve.runfile import load_run_file

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "deploy" / "runs"
SHAPES = ROOT / "tests" / "shapes"
GIB = 2**30

# What `nvidia-smi` reports as total on the smallest cards of each size, in GiB: A10 and L4, RTX
# 5090, A100 40 GB, L40S, H100 80 GB. Names of cards are larger than what they have.
CARDS = {
    "gpu-24gb.yaml": [22.4, 24.0],
    "gpu-32gb.yaml": [31.8],
    "gpu-48gb.yaml": [39.4, 44.9],
    "gpu-80gb.yaml": [79.6, 140.0],
    "two-gpus.yaml": [22.4, 24.0],
}


def planned(path: Path, gib: float, tmp_path: Path) -> Plan:
    run = load_run_file(path)
    shape = SHAPES / f"{run.model.base.rsplit('/', 1)[-1]}.json"
    (tmp_path / "config.json").write_bytes(shape.read_bytes())
    size = int(gib * GIB)
    machine = Machine(Gpu("card", size, size), 64 * GIB, 60 * GIB, 500 * GIB, "/store")
    return plan_for(run, base_dir=tmp_path, machine=machine)


ALL = sorted(RUNS.rglob("*.y*ml"))
ON_CPU = [path for path in ALL if load_run_file(path).model.base.startswith("builtin:")]


def test_every_shipped_run_file_is_a_case() -> None:
    assert {path.name for path in ALL} == {*CARDS, *(path.name for path in ON_CPU)}
    assert RUNS / "demo.yaml" in ON_CPU


@pytest.mark.parametrize(
    ("name", "gib"), [(name, gib) for name, sizes in CARDS.items() for gib in sizes]
)
def test_fits_on_its_card(name: str, gib: float, tmp_path: Path) -> None:
    plan = planned(RUNS / name, gib, tmp_path)
    assert {stage.name: stage.fits for stage in plan.stages.values()} == dict.fromkeys(
        plan.stages, True
    )
    assert plan.blue_green_fits
    gpus = load_run_file(RUNS / name).train.gpus
    assert gpus == (2 if name == "two-gpus.yaml" else 1)
    shared = plan.step.accumulation * plan.step.micro_batch
    assert shared in (16, 16 // gpus)  # rows of a step, on each card


@pytest.mark.parametrize("path", ON_CPU, ids=lambda path: path.name)
def test_fits_without_a_gpu(path: Path) -> None:
    """Two cores and 8 GB, a small laptop."""
    run = load_run_file(path)
    machine = Machine(None, 8 * GIB, 6 * GIB, 20 * GIB, "/store")
    plan = plan_for(run, base_dir=peek_base(run.model), machine=machine)
    assert plan.fits


@pytest.mark.parametrize("name", sorted(CARDS))
def test_the_header_says_what_the_plan_says(name: str, tmp_path: Path) -> None:
    """Within a tenth, or a GiB: the words are rounded, and the plan is fitted again at times."""
    text = (RUNS / name).read_text()
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    said = re.search(
        r"train (\d+) GiB, evaluate (\d+) GiB, serve (\d+) GiB of (?:the|each) card; "
        r"disk (\d+) GiB, (\d+) of it download",
        header,
    )
    card = re.search(rf"tuneserve plan deploy/runs/{name} --gpu-memory ([\d.]+)GiB ", header)
    assert said and card
    # The smallest one is what counts where cards of one name differ.
    assert float(card[1]) == min(CARDS[name])
    plan = planned(RUNS / name, float(card[1]), tmp_path)
    found = [plan.stages[stage].peak.needed_bytes / GIB for stage in ("train", "evaluate", "serve")]
    found += [plan.disk_bytes / GIB, plan.download_bytes / GIB]
    for words, value in zip(map(float, said.groups()), found, strict=True):
        assert words == pytest.approx(value, rel=0.1, abs=1), "run python docs/generate.py"


@pytest.mark.parametrize("name", sorted(CARDS))
def test_the_header_says_how_long_by_the_plan(name: str, tmp_path: Path) -> None:
    plan = planned(RUNS / name, min(CARDS[name]), tmp_path)
    [line] = [t for t in (RUNS / name).read_text().splitlines() if t.startswith("# Time: ")]
    said = re.findall(r"(\d+)(?: min)? on (?:an|(\d) x) (\w+ \d+|\w+)", line)
    assert said and "a million training tokens" in line
    tokens = plan.step.tokens * plan.step.accumulation * plan.step.gpus
    for minutes, cards, device in said:
        assert int(cards or 1) == plan.step.gpus
        seconds = step_seconds(plan.arch, plan.step, f"NVIDIA GeForce {device}")
        assert seconds is not None, device
        expected = 1e6 / tokens * seconds / 60
        assert int(minutes) == pytest.approx(expected, rel=0.1, abs=0.6), "run docs/generate.py"


@pytest.mark.parametrize("name", sorted(CARDS))
def test_the_header_says_what_comes_beside_training(name: str, tmp_path: Path) -> None:
    plan = planned(RUNS / name, min(CARDS[name]), tmp_path)
    [line] = [t for t in (RUNS / name).read_text().splitlines() if "# Beside training: " in t]
    cards, _, merge = line.removeprefix("# Beside training: ").partition("; the merge is ")
    found = re.findall(r"([^,]+?) on an ([^,]+)", cards)
    assert found
    for said, card in found:
        times = stage_times(
            load_run_file(RUNS / name),
            plan.arch,
            plan.step,
            card,
            steps_seconds=None,
            row_tokens=plan.step.length,
        ).stages
        assert times["train"] is None and times["evaluate"] and times["quantize"]
        rest = sum(seconds or 0 for seconds in times.values())
        assert seconds_of(said) == pytest.approx(rest, rel=0.15), "run docs/generate.py"
    assert seconds_of(merge.partition(" of it")[0]) == pytest.approx(
        plan.times.stages["merge"], rel=0.2
    )


def seconds_of(words: str) -> int:
    """Of ``1 h 10 min``, ``40 s``."""
    parts = re.findall(r"(\d+) (h|min|s)", words)
    return sum(int(n) * {"h": 3600, "min": 60, "s": 1}[unit] for n, unit in parts)


def test_the_time_of_a_7b_by_hand(tmp_path: Path) -> None:
    """NF4 on an RTX 4090: 6.53e9 weights in linear layers (1.9e9 of them in down projections) and
    0.54e9 in the head, 40.4e6 of the adapter's; half of 165e12 operations a second.
    """
    plan = planned(RUNS / "gpu-24gb.yaml", 22.4, tmp_path)
    frozen = 4 * (6.53e9 + 0.54e9)
    again = 2 * (6.53e9 - 1.9e9)
    attention = 28 * 3584 * 2048 * (2 * 3) + 28 * 3584 * 2
    by_hand = (frozen + again + 6 * 40.4e6 + attention) / (165e12 / 2)
    seconds = step_seconds(plan.arch, plan.step, "NVIDIA GeForce RTX 4090")
    assert seconds == pytest.approx(by_hand * 16 * 2048, rel=0.03)
    faster = step_seconds(plan.arch, plan.step, "NVIDIA GeForce RTX 5090")
    assert faster == pytest.approx(seconds * 165 / 209, rel=0.01)


@pytest.mark.parametrize("name", sorted(CARDS))
def test_the_second_run_takes_the_card_from_what_serves(name: str, tmp_path: Path) -> None:
    """On the smallest card of its size both do not fit, which the comment says."""
    smallest = min(CARDS[name])
    run = load_run_file(RUNS / name)
    assert run.serve.while_training == "stop"
    first = planned(RUNS / name, smallest, tmp_path)
    served, size = first.serving.peak.needed_bytes, int(smallest * GIB)
    card = Gpu("card", size, size - served, (GpuProcess(7, "vllm", served, ours=True),))
    machine = Machine(card, 64 * GIB, 60 * GIB, 500 * GIB, "/store")
    assert plan_for(run, base_dir=tmp_path, machine=machine).fits
    share = run.model_copy(
        update={"serve": run.serve.model_copy(update={"while_training": "share"})}
    )
    assert not plan_for(share, base_dir=tmp_path, machine=machine).fits


def test_what_is_said_of_recomputing(tmp_path: Path) -> None:
    """The 24 GB file names the rows a pass with it and without."""
    path = RUNS / "gpu-24gb.yaml"
    kept = tmp_path / "run.yaml"
    kept.write_text(path.read_text().replace("checkpointing: true", "checkpointing: false"))
    rows = [planned(each, 22.4, tmp_path).step.micro_batch for each in (kept, path)]
    assert f"without: {rows[0]} rows a pass instead of {rows[1]}" in path.read_text()


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_its_data_is_there(path: Path) -> None:
    run = load_run_file(path)
    assert all(Path(file).is_file() for file in [*run.data.train, *run.data.eval])
