"""The store: an artifact is whole or absent, whatever happened."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tuneserve.artifacts import Store, artifact_id, write_json_atomic
from tuneserve.calls import StageCall
from tuneserve.errors import InputError
from tuneserve.runfile import parse_run

FACTS = {
    "key": {},
    "inputs": {},
    "base": "b",
    "run": "r",
    "config": {},
    "versions": {},
    "metrics": {"rows": 3},
    "started": "2026-01-01T00:00:00+00:00",
    "finished": "2026-01-01T00:00:01+00:00",
    "seconds": 1.0,
}


def make(store: Store, id: str = "thing-0123456789abcdef", text: str = "hello") -> Path:
    with store.lock(id), store.draft(id) as draft:
        (draft.path / "sub").mkdir()
        (draft.path / "sub" / "a.txt").write_text(text)
        return store.commit(draft, "make", FACTS).path


def names(root: Path) -> set[str]:
    return {p.name for p in root.iterdir() if not p.name.startswith(".")}


def test_commit_lists_every_file_with_its_hash(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = make(store)
    manifest = json.loads((path / "manifest.json").read_text())
    (entry,) = manifest["files"]
    assert (entry["path"], entry["size"]) == ("sub/a.txt", 5)
    assert entry["sha256"] == hashlib.sha256(b"hello").hexdigest()
    found = store.find(path.name)
    assert found is not None and found.metrics == {"rows": 3}
    assert not (tmp_path / ".drafts" / path.name).exists()
    assert not (tmp_path / ".work" / path.name).exists()


def test_the_id_is_a_digest_of_the_key_and_nothing_else() -> None:
    text = '{"a":1,"b":[2],"kind":"adapter"}'
    expected = "adapter-" + hashlib.sha256(text.encode()).hexdigest()[:16]
    assert artifact_id("adapter", {"b": [2], "a": 1}) == expected


def test_a_folder_without_manifest_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "thing-1").mkdir()
    (tmp_path / "thing-1" / "weights").write_text("half")
    store = Store(tmp_path)
    assert store.find("thing-1") is None
    assert names(tmp_path) == set()  # set aside, or it would bar the way of the real one
    assert make(store, "thing-1").name == "thing-1"


@pytest.mark.parametrize("damage", ["shorter", "same size", "gone", "manifest cut"])
def test_damage_is_found_set_aside_and_made_again(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    path = make(store)
    file = path / "sub" / "a.txt"
    if damage == "gone":
        file.unlink()
    elif damage == "manifest cut":
        (path / "manifest.json").write_text('{"format": 1, "fi')
    else:
        file.write_text("hell" if damage == "shorter" else "hellO")
    assert store.find(path.name) is None
    assert names(tmp_path) == set()
    assert len(list((tmp_path / ".damaged").iterdir())) == 1
    assert make(store) == path
    assert store.find(path.name) is not None


def test_a_touched_but_equal_file_is_a_hit(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = make(store)
    os.utime(path / "sub" / "a.txt", (1, 1))
    assert store.find(path.name) is not None


def test_damage_that_keeps_size_and_time_is_found_on_demand(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = make(store) / "sub" / "a.txt"
    stat = file.stat()
    file.write_text("hellO")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.find(file.parent.parent.name) is not None  # sizes and times alone cannot tell
    assert store.find(file.parent.parent.name, rehash=True) is None


def test_a_body_that_raises_leaves_nothing_but_its_scratch(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="boom"), store.draft("thing-2") as draft:
        (draft.path / "half").write_text("half")
        (draft.work / "checkpoint").write_text("kept")
        raise RuntimeError("boom")
    assert names(tmp_path) == set()
    assert not (tmp_path / ".drafts" / "thing-2").exists()
    with store.draft("thing-2") as draft:
        assert list(draft.path.iterdir()) == []
        assert (draft.work / "checkpoint").read_text() == "kept"


def _die_in_draft(root: str) -> None:
    store = Store(Path(root))
    with store.lock("thing-3"), store.draft("thing-3") as draft:
        (draft.path / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_kill_nine_in_a_draft_leaves_no_artifact_and_no_lock(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_die_in_draft, args=[str(tmp_path)])
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    store = Store(tmp_path)
    assert store.find("thing-3") is None
    make(store, "thing-3")
    found = store.find("thing-3")
    assert found is not None
    assert sorted(p.name for p in found.path.rglob("*")) == ["a.txt", "manifest.json", "sub"]


def _make_in(root: str, started: multiprocessing.queues.Queue[int]) -> None:
    store = Store(Path(root))
    started.put(os.getpid())
    with store.lock("thing-4"):
        if store.find("thing-4") is None:
            with store.draft("thing-4") as draft:
                (draft.path / "who").write_text(str(os.getpid()))
                store.commit(draft, "make", FACTS)


def test_two_processes_make_one_artifact(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Queue()
    store = Store(tmp_path)
    children = [context.Process(target=_make_in, args=[str(tmp_path), started]) for _ in range(2)]
    with store.lock("thing-4"):  # both arrive while the lock is held
        for child in children:
            child.start()
        pids = {started.get(timeout=60) for _ in children}
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    found = store.find("thing-4", rehash=True)
    assert found is not None
    assert int((found.path / "who").read_text()) in pids


def test_get_takes_a_unique_beginning_and_explains_otherwise(tmp_path: Path) -> None:
    store = Store(tmp_path)
    make(store, "adapter-aaaa")
    make(store, "adapter-abbb")
    assert store.get("adapter-aa").id == "adapter-aaaa"
    with pytest.raises(InputError, match="2 artifacts begin so"):
        store.get("adapter-a")
    with pytest.raises(InputError, match="there is none") as caught:
        store.get("merged-1")
    assert str(tmp_path) in caught.value.expected


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json_atomic(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_the_kept_step_and_what_it_depends_on_make_another_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StageCall, "_base_digest", lambda self: "base")

    def key(keep: str, steps: int, rows: int) -> str:
        spec = {
            "name": "r",
            "model": {"base": "a/b"},
            "data": {"train": "x.jsonl"},
            "train": {"keep": keep, "eval_steps": steps},
            "gates": {"eval_rows": rows},
        }
        return json.dumps(StageCall("train", parse_run(spec)).key(), sort_keys=True)

    keys = [key("last", 20, 64), key("best", 20, 64), key("best", 10, 64), key("best", 20, 32)]
    assert len(set(keys)) == 4
    assert key("last", 10, 32) == keys[0]  # nothing is chosen, so when it is looked at is the same


def test_what_is_not_there_names_the_newest_that_are(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(InputError) as caught:
        store.get("merged-9")
    assert caught.value.expected == f"an artifact id in {store.root}, which is empty"
    for age, id in enumerate(("merged-4", "merged-3", "dataset-2", "adapter-1")):
        (store.root / id).mkdir(parents=True)
        (store.root / id / "manifest.json").write_text("{}")
        os.utime(store.root / id, (1000 - age, 1000 - age))
    with pytest.raises(InputError) as caught:
        store.get("merged-9")
    assert caught.value.expected == (
        f"an artifact id in {store.root}, such as merged-4, merged-3, dataset-2"
    )
