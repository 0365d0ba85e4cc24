"""How long an answer may be; what keeps it short is named, with what to set."""

from __future__ import annotations

from typing import Any

import pytest

from tuneserve.config import GatesSection, ServeSection
from tuneserve.errors import GateRefused
from tuneserve.release import ready
from tuneserve.release.answer_room import AnswerRoom, answer_room
from tuneserve.release.behaviour import Answer, judge_answers
from tuneserve.release.heldout import Row


def row(answer: int) -> Row:
    return Row([1] * (5 + answer), [-100] * 5 + [1] * answer, "a:1", [], None)


def test_room_is_twice_the_longest_known_answer_within_bounds() -> None:
    serve = ServeSection()
    for answer, tokens in ((10, 64), (40, 80), (200, 400), (900, 512)):
        assert answer_room([row(3), row(answer)], serve, None, 4096) == AnswerRoom(tokens)
    assert answer_room([], serve, None, 4096) == AnswerRoom(64)
    assert answer_room([row(40)], serve, 80, 160) == AnswerRoom(80, 80)


@pytest.mark.parametrize(
    ("given", "most", "length", "room", "cut", "setting"),
    [
        (
            {"max_tokens": 32}, 32, 4096, 32,
            "serve.max_tokens is 32, and known answers have up to 40 tokens",
            "serve.max_tokens: 80",
        ),
        (
            {}, 20, 4096, 20,
            "generation_config.json of the model has max_new_tokens 20, and known answers have up "
            "to 40 tokens",
            "serve.max_tokens: 80",
        ),
        (
            {"max_model_len": 100}, 60, 100, 50,
            "serve.max_model_len is 100, half of it for the answer, and generation_config.json of "
            "the model has max_new_tokens 60, and known answers have up to 40 tokens",
            "serve.max_model_len: 160 and serve.max_tokens: 80",
        ),
        (
            {"max_tokens": 90}, 90, 100, 50,
            "the server takes 100 tokens, half of them for the answer, and known answers have up "
            "to 40 tokens",
            "serve.max_model_len: 160",
        ),
    ],
)  # fmt: skip
def test_what_cuts_is_named(
    given: dict[str, Any], most: int | None, length: int, room: int, cut: str, setting: str
) -> None:
    found = answer_room([row(40)], ServeSection.model_validate(given), most, length)
    assert (found.asked, found.setting) == (room, setting)
    assert found.cut == f"{cut}: set {setting}, or more"


def test_the_gates_say_what_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Answer("on and on", False, ["on"], [-0.1])
    short = answer_room([row(40)], ServeSection(max_tokens=32), 32, 4096)
    ended = next(g for g in judge_answers(GatesSection(), [endless], short))
    assert ended.would_pass == "gates.min_ended: 0, or perhaps serve.max_tokens: 80"
    assert "serve.max_tokens is 32" in ended.found
    passed = next(g for g in judge_answers(GatesSection(), [Answer("a", True)], short))
    assert passed.passed and "serve.max_tokens" not in passed.found + passed.would_pass

    def cut(*_: Any) -> ready.Sample:
        return ready.Sample("length", "on and on", 32, 0.1)

    monkeypatch.setattr(ready, "_one_answer", cut)
    child: Any = None
    for room, hint in ((short, "set serve.max_tokens: 80"), (AnswerRoom(64), "train longer")):
        with pytest.raises(GateRefused, match=f"within {room.asked} tokens") as caught:
            ready.check_answers(child, child, "m", [[]], room=room, must_stop=True)
        assert caught.value.hint is not None and hint in caught.value.hint
        assert ("train longer" in caught.value.hint) is (room is not short)
        settings = ["perhaps serve.max_tokens: 80"] if room is short else None
        assert caught.value.details.get("would_pass") == settings
