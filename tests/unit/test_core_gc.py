"""What gc keeps and removes, and what changed between two chains."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gc_house import DAY, House
from tuneserve.compare import difference, difference_text
from tuneserve.errors import InputError
from tuneserve.gc import remove, survey, sweep_text
from tuneserve.lineage import lineage_of, lineage_text
from tuneserve.runs import RunRecord
from tuneserve.stages import STAGES


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    return House(tmp_path)


def test_an_empty_store_has_nothing_to_remove(house: House) -> None:
    for removed in (False, True):
        text = sweep_text(survey(house.store, keep_days=14), removed=removed)
        assert text == "nothing to remove"


def test_a_release_and_all_it_was_made_from_stay(house: House) -> None:
    serving, old = house.chain("serving"), house.chain("old")
    before = house.chain("before")
    house.releases("r2", r1=before[-1], r2=serving[-1])
    sweep = survey(house.store, keep_days=14)
    assert set(sweep.artifacts) == set(old)
    assert set(sweep.kept) == {*serving, *before}
    assert house.ids() == {*serving, *before, *old}, "a survey removes nothing"
    assert "add --yes to do it" in sweep_text(sweep, removed=False)
    freed = sum(
        f.stat().st_size for id in old for f in (house.store.root / id).rglob("*") if f.is_file()
    )
    assert sweep.bytes == freed
    remove(house.store, sweep)
    assert house.ids() == {*serving, *before}
    assert all(house.store.find(id, rehash=True) for id in house.ids())
    assert not list((house.store.root / ".trash").iterdir())


def test_what_a_running_flow_uses_stays(house: House) -> None:
    chain = house.chain("now")
    evaluation = house.make("evaluation-now", "evaluate", inputs={"merged": chain[-1]})
    record = RunRecord("run-1", "weekly", "support", used=[evaluation])
    with house.runs.recording(record):
        sweep = survey(house.store, keep_days=14)
        assert sweep.artifacts == {} and "run run-1 is under way" in sweep.kept[evaluation]
        record.state = "cancelled"
    assert set(survey(house.store, keep_days=14).artifacts) == {*chain, evaluation}


def test_the_last_run_of_a_name_can_be_repeated(house: House) -> None:
    chain = house.chain("refused")
    record = RunRecord("run-1", "weekly", "support", used=chain)
    with house.runs.recording(record):
        record.state = "refused"
    assert set(survey(house.store, keep_days=14).kept) == set(chain)


def test_what_was_used_lately_stays_and_what_is_taken_up_meanwhile_too(house: House) -> None:
    chain = house.chain("old")
    house.store.note_use(chain[1])
    assert set(survey(house.store, keep_days=14).kept) == set(chain[:2])
    sweep = survey(house.store, keep_days=0)
    house.store.note_use(chain[0])  # a run starts between the look and the removal
    remove(house.store, sweep)
    assert sweep.busy == [chain[0]] and house.ids() == {chain[0]}


def test_leftovers_of_killed_attempts_go_when_nobody_works_on_them(house: House) -> None:
    house.store.root.mkdir()
    old = time.time() - 100 * DAY
    for name in (".drafts/adapter-a", ".work/adapter-b", ".damaged/adapter-c-1"):
        path = house.store.root / name
        path.mkdir(parents=True)
        (path / "half").write_text("x" * 10)
        os.utime(path, (old, old))
    with house.store.lock("adapter-b"):
        sweep = survey(house.store, keep_days=14)
    assert sweep.leftovers == {".drafts/adapter-a": 10, ".damaged/adapter-c-1": 10}


def test_a_store_that_others_use_is_not_swept_blindly(house: House, tmp_path: Path) -> None:
    chain = house.chain("theirs")
    other = House(tmp_path / "elsewhere")
    other.releases("r1", r1=chain[-1])
    users = house.store.root / ".users"
    users.mkdir()
    (users / "them").write_text(f"another-host\n{other.home}\n")
    # A folder of that path is here, but it is not theirs: two hosts may use one path.
    (other.home / "home-id").write_text("somebody else")
    with pytest.raises(InputError, match="which cannot be seen here"):
        survey(house.store, keep_days=14)
    (other.home / "home-id").write_text("them")
    assert survey(house.store, keep_days=14).artifacts == {}
    (users / "them").write_text("another-host\n/nowhere/to/be/seen\n")
    with pytest.raises(InputError, match="which cannot be seen here"):
        survey(house.store, keep_days=14)
    assert house.ids() == set(chain)


def test_a_home_that_was_moved_goes_on_being_asked(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = house.chain("theirs")
    other = House(tmp_path / "elsewhere")
    monkeypatch.setenv("TUNESERVE_HOME", str(other.home))
    other.releases("r1", r1=chain[-1])
    house.store.note_use(chain[-1])
    other.home.rename(tmp_path / "moved")  # or not mounted: what it serves cannot be seen
    monkeypatch.setenv("TUNESERVE_HOME", str(house.home))
    with pytest.raises(InputError, match="cannot be seen here") as caught:
        survey(house.store, keep_days=14)
    assert str(other.home) in caught.value.message and house.ids() == set(chain)
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "moved"))
    for path in house.store.root.glob(".used/*"):
        os.utime(path, (0, 0))
    assert set(survey(house.store, keep_days=14).kept) == set(chain), "from itself at any time"
    house.store.note_use()  # a run that had nothing to do
    monkeypatch.setenv("TUNESERVE_HOME", str(house.home))
    assert survey(house.store, keep_days=14).artifacts == {}
    (note,) = (p for p in house.store.root.glob(".users/*") if "moved" in p.read_text())
    note.unlink()  # a person says that it is gone
    assert set(survey(house.store, keep_days=14).artifacts) == set(chain)


def test_unreadable_release_state_stops_the_sweep(house: House) -> None:
    chain = house.chain("a")
    (house.home / "run").mkdir(parents=True)
    (house.home / "run" / "releases.json").write_text('{"names"')
    with pytest.raises(InputError, match="nobody knows what serves"):
        survey(house.store, keep_days=14)
    assert house.ids() == set(chain)


def test_a_chain_says_what_it_cost(house: House) -> None:
    chain = house.chain("a")
    found = lineage_of(house.store, chain[-1])
    assert (found["gpu_seconds"], found["cost"]) == (3600.0, 2.0)  # half an hour on two cards
    assert found["total"] == {"seconds": 5400.0, "gpu_seconds": 10800.0, "cost": 6.0}
    assert "in all: 1 h 30 min, 3 h 00 min of GPU, cost 6.00" in lineage_text(found)
    assert found["inputs"]["adapter"]["inputs"]["dataset"]["id"] == "dataset-a"


def test_a_release_says_what_its_runs_cost_on_top_of_its_chain(house: House) -> None:
    chain = house.chain("a")  # half an hour each, on two cards, 2.00 an hour
    lost = house.make("merged-lost", "merge", inputs={"adapter": chain[1]}, seconds=600.0)
    evaluation = house.make("evaluation-a", "evaluate", inputs={"merged": chain[-1]}, seconds=360.0)
    house.releases("r1", r1=chain[-1])
    path = house.home / "run" / "releases.json"
    known = json.loads(path.read_text())
    known["names"]["support"] = {"active": "r1"}
    known["releases"]["r1"]["artifact"] = chain[-1]
    path.write_text(json.dumps(known))
    used = [*chain, lost, evaluation, "quantized-swept"]
    runs: list[tuple[str, dict[str, Any]]] = [
        # It lost an hour in training, and got no further.
        ("failed", {"seconds": {"fetch": 10.0, "train": 3600.0}, "used": chain[:1]}),
        ("promoted", {"release": "r1", "used": used, "seconds": {
            "validate": 1.0, "train": 1800.0, "merge": 5.0, "evaluate": 9.0, "release": 720.0}}),
        ("confirmed", {"release": "r1", "seconds": {"release": 50.0}}),
        ("unchanged", {"release": "r1", "seconds": {"fetch": 50.0}}),
        ("failed", {"inputs": "others", "seconds": {"train": 99.0}}),
    ]  # fmt: skip
    for number, (state, facts) in enumerate(runs):
        record = RunRecord(f"run-{number}", "n", "support", gpus=2, **{"inputs": "same", **facts})
        with house.runs.recording(record):
            record.state = state
    found = lineage_of(house.store, "r1")
    assert {stage: took["seconds"] for stage, took in found["stages"].items()} == {
        "fetch": 10.0,
        "validate": 1800.0,  # the artifact's, which both runs only found
        "train": 5400.0,  # lost and useful
        "merge": 2400.0,  # both ways
        "evaluate": 360.0,
        "release": 720.0,
    }
    assert list(found["stages"]) == [s for s in STAGES if s in found["stages"]]
    assert found["stages"]["release"]["gpu_seconds"] == 1440.0
    assert found["stages"]["release"]["cost"] == 0.8
    seconds = 10 + 1800 + 5400 + 2400 + 360 + 720
    assert found["total"] == {
        "seconds": seconds, "gpu_seconds": 2.0 * seconds, "cost": pytest.approx(11.8778, abs=1e-3)
    }  # fmt: skip
    assert "release: 12 min 00 s, 24 min 00 s of GPU, cost 0.80" in lineage_text(found)


def test_a_difference_names_rows_settings_versions_and_metrics(house: House) -> None:
    source = {"train": [{"path": "d.jsonl", "sha256": "a" * 64}]}
    one = house.chain("a", rows={"train": ["x", "y", "y"], "eval": ["e"]}, sources=source)
    source = {"train": [{"path": "d.jsonl", "sha256": "b" * 64}]}
    facts = {"metrics": {"rows_kept": 4}, "versions": {"torch": "2.14.0"}, "sources": source}
    config = {"budget": {"price_per_gpu_hour": 2.0}, "train": {"seed": 1}}
    two = house.chain("b", rows={"train": ["x", "y", "z", "z"], "eval": ["e"]}, **facts)
    last = house.make("merged-c", "merge", inputs={"adapter": two[1]}, config=config)
    found = difference(house.store, one[-1], last)
    # One of the two y is gone, and z came twice.
    assert found["data"]["train"] == {
        "before": 3,
        "after": 4,
        "added": 2,
        "removed": 1,
        "added_examples": ["d.jsonl:4"],
        "removed_examples": ["d.jsonl:3"],
    }
    assert found["data"]["eval"]["added"] == found["data"]["eval"]["removed"] == 0
    assert found["files"] == {"d.jsonl": ["a" * 16, "b" * 16]}
    assert found["config"] == {"train.seed": [0, 1]}
    assert found["versions"] == {"validate.torch": ["2.13.0", "2.14.0"]}
    assert found["metrics"] == {"validate.rows_kept": [None, 4]}
    text = difference_text(found)
    assert "train rows: 3 -> 4, 2 added, 1 removed" in text and "train.seed: 0 -> 1" in text
    assert difference_text(difference(house.store, last, last)).endswith("nothing changed")


def test_a_release_of_known_artifacts_has_the_settings_of_its_own_run(house: House) -> None:
    """The first was refused, and the second serves the same merged model for another setting."""
    chain = house.chain("a")
    house.releases("r2", r1=chain[-1], r2=chain[-1])
    path = house.home / "run" / "releases.json"
    known = json.loads(path.read_text())
    for release in known["releases"].values():
        release["artifact"] = chain[-1]
    path.write_text(json.dumps(known))
    report = house.home / "run" / "releases" / "r1" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text('{"losses": {"served": 1.75}, "gates": []}')
    settings = {**house.store.get(chain[-1]).manifest["config"], "quantize": {"methods": ["none"]}}
    record = RunRecord("run-2", "n", "support", config=settings, release="r2")
    with house.runs.recording(record):
        record.state = "promoted"
    found = difference(house.store, "r1", "r2")
    assert found["config"] == {"quantize.methods": [None, ["none"]]}
    assert found["metrics"] == {"release.served": [1.75, None]}
