"""What is noted of the attempts at a training, and what follows from it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tuneserve.artifacts import write_json_atomic
from tuneserve.train import history
from tuneserve.train.checkpoints import seal


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def kill(work: Path, attempt: str, number: int = signal.SIGKILL) -> int:
    return history.note_kill(work, attempt, number, for_memory=True)


def begin(work: Path, attempt: str, rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_ATTEMPT", attempt)
    history.begin(work, rung, "load", micro_batch=4)
    history.begin(work, rung, "train", micro_batch=4)


def checkpoint(work: Path, step: int) -> None:
    (work / f"checkpoint-{step}").mkdir()
    seal(work / f"checkpoint-{step}")


def test_what_counts_as_coming_further(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [kill(work, "a"), kill(work, "b")]  # neither was at any rung
    begin(work, "c", "4", monkeypatch)
    counts.append(kill(work, "c"))  # a rung that is new
    counts.append(kill(work, "d"))
    begin(work, "e", "4", monkeypatch)
    counts.append(kill(work, "e"))  # the same rung, and no step
    begin(work, "f", "4", monkeypatch)
    checkpoint(work, 50)
    counts.append(kill(work, "f"))  # a step
    counts.append(kill(work, "g"))
    begin(work, "h", "4", monkeypatch)
    counts.append(kill(work, "h", signal.SIGTERM))  # whoever sends that asks for an end
    begin(work, "i", "2", monkeypatch)
    checkpoint(work, 100)
    counts.append(kill(work, "i"))
    assert counts == [1, 2, 0, 1, 2, 0, 1, 1, 0]


def test_the_call_after_the_bottom_has_patience_anew(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(work, "a", "4", monkeypatch)
    assert (kill(work, "a"), kill(work, "b")) == (0, 1)
    error = history.give_up(work, {"advice": ["lower this", "lower that"]})
    nowhere = "killed before it began, for want of memory"
    assert error.details["tried"] == ["4: killed later on, for want of memory", nowhere]
    assert "\n    1. lower this\n    2. lower that\n" in error.hint
    assert history.under_way(work) is None and history.did_not_fit(work) == []
    assert (kill(work, "c"), kill(work, "d")) == (1, 2)
    assert [one["rung"] for one in history.to_json(work)] == ["4", "", "", ""]  # all are kept


def test_of_two_who_tell_of_an_attempt_the_later_counts(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(work, "a", "4", monkeypatch)
    history.end(work, "4", 0, "StageKilled: rank 1 was killed")
    assert kill(work, "a") == 0
    assert history.to_json(work) == [
        {
            **{"rung": "4", "from_step": 0, "to_step": 0},
            **{"end": "killed later on, for want of memory", "fits": False},
        }
    ]
    history.end(work, "2", 0, "no room", fits=False)  # another rung in the same process
    assert [one["rung"] for one in history.to_json(work)] == ["4", "2"]
    assert history.is_known(work, "a") and not history.is_known(work, "b")


def test_where_an_attempt_began_is_known_to_its_end(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(work, 50)
    begin(work, "a", "4", monkeypatch)
    checkpoint(work, 100)
    history.begin(work, "4", "ended", micro_batch=4)
    state = history.under_way(work)
    assert state == {
        **{"micro_batch": 4, "rung": "4", "from_step": 50, "phase": "ended", "attempt": "a"}
    }
    history.forget(work)
    history.forget(work)
    assert history.under_way(work) is None


def test_what_cannot_be_kept_is_no_reason_for_another_attempt(work: Path) -> None:
    """As on a full disk: without a count it would never end."""
    (work / "attempts.jsonl").mkdir()
    assert kill(work, "a") == history.MOST_FRUITLESS
    history.end(work, "4", 0, "the disk is full")
    assert history.give_up(work, {}).details["tried"] == []
    assert list(work.iterdir()) == [work / "attempts.jsonl"]


def test_kills_by_hand_are_no_want_of_memory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some of them, the first for want of memory still has the rungs below."""
    counts = []
    for attempt, for_memory in [("a", False), ("b", False), ("c", False), ("d", True)]:
        begin(work, attempt, "4", monkeypatch)
        counts.append(history.note_kill(work, attempt, signal.SIGKILL, for_memory=for_memory))
    begin(work, "e", "2", monkeypatch)
    assert [*counts, kill(work, "e"), kill(work, "f")] == [0, 1, 2, 1, 0, 1]


def test_bytes_that_are_no_text_lose_their_line_alone(work: Path) -> None:
    """Else no attempt would count any more, and the next ones would have no end."""
    assert kill(work, "a") == 1
    with (work / "attempts.jsonl").open("ab") as stream:
        stream.write(b'\xff\xfe\x00\n{"attempt": "b", "rung": "')  # and half a line
    assert (kill(work, "c"), kill(work, "d")) == (2, 3)
    assert len(history.to_json(work)) == 3


def test_half_a_line_is_passed_over(work: Path) -> None:
    kill(work, "a")
    path = work / "attempts.jsonl"
    whole = path.read_text()
    path.write_text(f'{whole}{whole[:20]}\n{{"another": "version"}}\n[]\n')
    write_json_atomic(work / "rung.json", {"micro_batch": 4, "phase": "train"})  # as it once was
    assert json.loads(whole)["attempt"] == "a" and len(history.to_json(work)) == 1
    assert kill(work, "c") == 2


@pytest.mark.parametrize(
    "text",
    ["{}", "null", "[]", "7", "\x00\x00", '{"micro_batch": 0, "phase": "train"}']
    + ['{"micro_batch": 4, "phase": "train", "from_step": "x"}']
    + ['{"micro_batch": "x", "phase": "train"}', '{"micro_batch": 4, "phase": 5}'],
)
def test_a_note_that_is_none_concludes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "rung.json").write_text(text)
    assert history.under_way(tmp_path) is None
