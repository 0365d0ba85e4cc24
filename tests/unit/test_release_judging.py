"""What a candidate is asked: rows of many conversations, within what the server takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuneserve.config import GatesSection
from tuneserve.errors import InputError
from tuneserve.lm.conversations import round_robin
from tuneserve.release import behaviour, judging
from tuneserve.release.answer_room import AnswerRoom
from tuneserve.release.behaviour import Answer
from tuneserve.release.heldout import Row
from tuneserve.release.judging import Subject, judge_candidate, rows_to_score

CALL = '{"name": "look", "arguments": {}}'


def row(source: str, length: int = 40, *, tools: Any = None, answer: int = 10) -> Row:
    ids = list(range(length))
    labels = [-100] * (length - answer) + ids[length - answer :]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return Row(ids, labels, source, chat, tools)


def test_conversations_take_turns() -> None:
    sources = ["a", "a", "a", "b", "c", "c"]
    assert round_robin(sources, 3) == [0, 3, 4]
    assert round_robin(sources, 4) == [0, 1, 3, 4]  # the second turn begins with the first
    assert round_robin(sources, 5) == [0, 1, 3, 4, 5]
    assert round_robin(sources, 99) == [0, 1, 2, 3, 4, 5]
    assert round_robin([], 3) == [] == round_robin(sources, 0)


def test_a_long_conversation_leaves_room_for_the_others() -> None:
    """Sixty rows of one and one each of nine: the first 16 rows would be of one alone."""
    rows = [row("long") for _ in range(60)] + [row(f"short-{i}") for i in range(9)]
    chosen = rows_to_score(rows, True, None, GatesSection(eval_rows=16))
    assert len(chosen) == 16 and len({r.source for r in chosen}) == 10
    assert rows_to_score(rows, False, None, GatesSection()) == []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a server that always calls the tool is asked."""
    found: dict[str, Any] = {"ids": [], "canaries": []}

    def ids(_: Path, __: str, prompts: Any, **___: Any) -> list[Answer]:
        found["ids"] += prompts
        return [Answer(CALL, True, ["x"], [-0.1]) for _ in prompts]

    def canaries(_: Path, __: str, asked: Any, **___: Any) -> list[Answer]:
        found["canaries"] += asked
        return [Answer("fine", True) for _ in asked]

    monkeypatch.setattr(behaviour, "ask_ids", ids)
    monkeypatch.setattr(behaviour, "ask_canaries", canaries)
    return found


def evaluation(folder: Path, lines: list[dict[str, Any]], **losses: Any) -> Path:
    folder.mkdir()
    (folder / "losses.json").write_text(json.dumps({"rows": 0, **losses}))
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "answers.jsonl").write_text(text)
    return folder


def line(at: int, source: str, most: int, **more: Any) -> dict[str, Any]:
    known = {"row": at, "source": source, "kind": "tool_call", "max_tokens": most}
    return {**known, "merged": CALL, "parses": True, **more}


def ask(
    rows: list[Row], folder: Path, longest: int, served: int = 1 << 30, **gates: Any
) -> tuple[Any, list[str]]:
    config = GatesSection.model_validate({"answers": 0, "allow_undecided": True, **gates})
    skipped: list[str] = []
    room = AnswerRoom(8, served)
    subject = Subject(Path("/s"), "m", config, rows, True, folder, room=room, longest=longest)
    report, _ = judge_candidate(subject, skipped, {})
    return report, report.skipped


def test_structured_prompts_stay_within_what_is_served(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    rows = [row("a", 40), row("b", 62), row("c", 75), row("d", 40)]
    lines = [
        line(0, "a", 26),  # 30 + 26 of 64
        line(1, "b", 26, merged_tokens=5),  # 52 leave 12
        line(2, "c", 26),  # 65 leave nothing
        line(3, "d", 26, start=20),  # a call before the last answer
        line(1, "b", 26, merged_tokens=20),  # 12 are too few for what merged says
    ]
    report, skipped = ask(rows, evaluation(tmp_path / "e", lines), 64)
    assert asked["ids"] == [
        (rows[0].ids[:30], 26), (rows[1].ids[:52], 12), (rows[3].ids[:20], 26),
    ]  # fmt: skip
    (gate,) = [g for g in report.gates if g.name == "structured answers parse"]
    assert gate.passed and "3 of 3 parse" in gate.found
    assert "structured answers: 2 do not fit into the 64 tokens served" in skipped


def test_what_merged_says_must_fit_into_what_the_server_gives(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    """An answer cut by serve.max_tokens would not parse, and quantizing would be blamed."""
    rows = [row("a"), row("b")]
    lines = [line(0, "a", 26, merged_tokens=12), line(1, "b", 26, merged_tokens=11)]
    report, skipped = ask(rows, evaluation(tmp_path / "e", lines), 64, 12)
    assert asked["ids"] == [(rows[1].ids[:30], 12)]
    assert [g.found for g in report.gates if g.name == "structured answers parse"] == [
        "1 of 1 parse, 1 with the merged model"
    ]
    assert (
        "structured answers: 1 do not fit into the 64 tokens served, or the 12 of an answer "
        "(serve.max_tokens or the model's max_new_tokens)"
    ) in skipped


def test_merged_answers_are_read_by_the_rules_of_today(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    """An evaluation of the version before knew no tools, and took a call that was cut for one."""
    old = line(0, "a", 26, merged='{"name": "x", "arguments": "{"}')
    known = line(1, "b", 26, tools={"look": {"at": "string"}})
    folder = evaluation(tmp_path / "e", [old, known])
    found, _ = judging.read_structured(folder, [row("a"), row("b")], 64)
    assert [(r.merged_parses, r.tools) for r in found] == [
        (False, None),
        (True, {"look": {"at": "string"}}),
    ]


def test_canaries_leave_half_for_their_prompt(tmp_path: Path, asked: dict[str, Any]) -> None:
    canaries = [
        {"prompt": "a", "contains": "fine", "max_tokens": 256},
        {"prompt": "b", "contains": "fine", "max_tokens": 7},
    ]
    report, _ = ask([row("a")], evaluation(tmp_path / "e", []), 65, canaries=canaries)
    assert [canary.max_tokens for canary in asked["canaries"]] == [32, 7]
    assert [g.passed for g in report.gates if "canary" in g.name] == [True, True]


def test_tools_without_a_call_that_is_json_are_said(tmp_path: Path, asked: dict[str, Any]) -> None:
    folder = evaluation(tmp_path / "e", [])
    _, skipped = ask([row("a", tools=[{"type": "function"}])], folder, 64)
    assert any(why.startswith("structured answers: none found") for why in skipped)
    called = row("a")
    called.messages[1]["tool_calls"] = [{"function": {"name": "look", "arguments": {}}}]
    assert any("none found" in why for why in ask([called], folder, 64)[1])
    for rows, gates in (([row("a")], {}), ([called], {"structured_answers": 0})):
        assert not any("none found" in why for why in ask(rows, folder, 64, **gates)[1])


def test_an_evaluation_of_other_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers would be of other conversations than the served model's."""
    import numpy as np

    from tuneserve.lm.scores import TOP, TopScores

    rows = [row("a"), row("b")]
    empty = np.zeros((20, TOP))
    served = TopScores(
        np.array([0, 10, 20]), np.zeros(20, np.int32), np.zeros(20, np.float32),
        empty.astype(np.int32), empty.astype(np.float32),
    )  # fmt: skip
    monkeypatch.setattr(judging, "served_scores", lambda *_, **__: served)
    per_row = {"source": ["a", "c"], "base": [1.0, 1.0]}
    folder = evaluation(tmp_path / "e", [], rows=2, supervised_tokens=20, per_row=per_row)
    with pytest.raises(InputError, match="other rows than the 2 measured here"):
        ask(rows, folder, 64)
