"""Gates on what the candidate says: answers, structured rows, canaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tuneserve.config import GatesSection
from tuneserve.errors import RunFileError
from tuneserve.lm.structured import parses, recognize
from tuneserve.release import behaviour
from tuneserve.release.behaviour import (
    Answer,
    StructuredRow,
    gibberish,
    judge_answers,
    judge_canary,
    judge_structured,
    loops,
)
from tuneserve.release.decisions import rounded_down, rounded_up
from tuneserve.runfile import parse_run
from tuneserve.thresholds import CanarySection


def answer(*tokens: str, ended: bool = True, nats: float = 0.1) -> Answer:
    return Answer("".join(tokens), ended, tokens, [-nats] * len(tokens))


def test_loops_are_one_token_or_a_phrase_to_the_end() -> None:
    assert loops(answer(*["!"] * 16))
    assert not loops(answer(*["!"] * 15))
    phrase = ["I", " do", " not", " know", "."]
    assert loops(answer("Well", *phrase * 6, ended=False))
    assert not loops(answer("Well", *phrase * 6))  # it came to an end
    assert not loops(answer(*phrase, *"abcdefghijklmnop", ended=False))


def test_gibberish_is_broken_text_or_a_guess() -> None:
    assert not gibberish(answer("All", " well", "\n", "\u4f60\u597d"), 2.5)
    assert gibberish(answer("\ufffd\x01", "a"), 2.5)
    assert gibberish(answer("kjh", " qq", nats=2.6), 2.5)
    cut = Answer("caf\ufffd", False, ["caf", "\ufffd"], [-0.1, -0.1])
    assert not gibberish(cut, 2.5)  # the limit fell between two bytes
    assert gibberish(answer(), 2.5) and gibberish(answer("\n", "\n", " "), 2.5)  # says nothing


def test_a_model_that_ends_every_answer_at_once_is_refused() -> None:
    """It ends, it does not loop, and it is sure of it."""
    gates = judge_answers(GatesSection(), [answer()] * 8)
    assert [gate.passed for gate in gates] == [True, True, False]
    assert "8 of 8 greedy answers are no text" in gates[2].found


def test_tokens_of_answers_are_told_apart_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of characters that the tokenizer does not know whole are the same replacement text."""
    asked: list[Any] = []

    def post(_: Path, __: str, body: Any, *___: Any) -> Any:
        asked.append(body)
        tokens = [f"token_id:{200 + n}" for n in range(18)]
        found = {"tokens": tokens, "token_logprobs": [-0.1] * 18}
        return {"choices": [{"text": "\u0f42" * 6, "finish_reason": "stop", "logprobs": found}]}

    monkeypatch.setattr(behaviour, "_post", post)
    (said,) = behaviour.ask_ids(Path("s"), "m", [([1, 2], 32)])
    assert asked[0]["return_tokens_as_token_ids"] is True and asked[0]["temperature"] == 0
    assert said.ended and len(said.tokens) == 18
    assert not loops(said) and not gibberish(said, 2.5)


def test_answers_are_judged_by_shares() -> None:
    good, endless = answer("fine"), answer("on", " and", " on", ended=False)
    gates = judge_answers(GatesSection(), [good, good, endless])
    assert [gate.passed for gate in gates] == [True, True, True]
    gates = judge_answers(GatesSection(min_ended=0.9), [good, good, endless])
    assert [g.name for g in gates if not g.passed] == ["answers end"]
    assert gates[0].would_pass == "gates.min_ended: 0.66" and "on and on" in gates[0].found
    assert judge_answers(GatesSection(), []) == []


def test_shares_keep_two_digits_and_their_side() -> None:
    """29 of 100 is 0.29 both ways, though 0.29 x 100 is 28.999999999999996."""
    for value, down, up in (
        (29 / 100, "0.29", "0.29"), (7 / 100, "0.07", "0.07"), (2 / 3, "0.66", "0.67"),
        (1 / 3, "0.33", "0.34"), (1, "1", "1"), (0, "0", "0"), (0.996, "0.99", "1"),
        (-0.0123, "-0.013", "-0.012"), (1234.0, "1200", "1300"),
    ):  # fmt: skip
        assert (rounded_down(value), rounded_up(value)) == (down, up)


def test_what_would_pass_passes() -> None:
    """Also where a share has more than two digits: a third, three eighths, 29 of 100."""
    good, bad = answer("fine"), Answer("x" * 40, False, ["x"] * 40, [-9.0] * 40)
    call = StructuredRow("c:1", 0, "json", [1], 8, "{}", True)
    for count in (1, 2, 3, 6, 7, 8, 11, 16, 100):
        for wrong in range(1, count + 1):
            said = [bad] * wrong + [good] * (count - wrong)
            strict = {"min_ended": 1, "max_looping": 0, "max_gibberish": 0}
            gates = judge_answers(GatesSection.model_validate(strict), said)
            lost = judge_structured(
                GatesSection(),
                [call] * count,
                [answer("no")] * wrong + [answer("{}")] * (count - wrong),
            )
            assert lost is not None
            refused = [*gates, lost]
            assert [gate.passed for gate in refused] == [False] * 4
            advised = dict(gate.would_pass.removeprefix("gates.").split(": ") for gate in refused)
            config = GatesSection.model_validate({k: float(v) for k, v in advised.items()})
            again = judge_structured(
                config, [call] * count, [answer("no")] * wrong + [answer("{}")] * (count - wrong)
            )
            assert again is not None and again.passed, (count, wrong, advised)
            assert all(gate.passed for gate in judge_answers(config, said)), (count, wrong, advised)


def test_structured_answers_must_parse_as_often_as_before() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert recognize(call) == ("tool_call", None) and recognize('{"a": 1}') == ("json", None)
    assert recognize("The {thing} is red.") is None
    assert parses(call, "tool_call") and not parses(call[:-25], "tool_call")
    assert not parses("```json {}", "json")
    rows = [
        StructuredRow(f"c:{i}", i, "json", [1], 8, "{}" if i else "no", bool(i)) for i in range(4)
    ]
    same = [answer("no"), answer("{}"), answer("[1]"), answer("{}")]
    gate = judge_structured(GatesSection(), rows, same)
    assert gate is not None and gate.passed and "3 of 4 parse, 3" in gate.found
    fewer = judge_structured(GatesSection(), rows, [answer("no"), answer("{"), *same[2:]])
    assert fewer is not None and not fewer.passed and "c:1" in fewer.found
    assert fewer.would_pass == "gates.max_parse_loss: 0.25"
    assert judge_structured(GatesSection(), [], []) is None


def test_calls_are_held_against_the_chats_tools() -> None:
    told = "<function=look><parameter=at>x</parameter></function>"
    tools: dict[str, dict[str, str] | None] = {"look": {"at": "string"}}
    row = StructuredRow("c:1", 0, "xml_call", [1], 8, told, True, tools)
    for text, good in (
        (told, True),
        (told.replace("look", "see"), False),
        (told.replace("=at", "=to"), False),
    ):
        gate = judge_structured(GatesSection(), [row], [answer(text)])
        assert gate is not None and gate.passed is good, text


def test_canaries_say_what_they_miss() -> None:
    canary = CanarySection(
        prompt="What colour is the lamp?",
        contains=["amber"],
        matches=[r"lamp is \w+\."],
        lacks=["I"],
    )
    assert judge_canary(canary, Answer("The lamp is amber.", True)).passed
    gate = judge_canary(canary, Answer("I think red.", True))
    assert not gate.passed and gate.name == "canary 'What colour is the lamp?'"
    for part in ("lacks 'amber'", "does not match", "holds 'I'"):
        assert part in gate.found
    assert "cut" not in gate.found
    for asked, why in ((None, "256 tokens (its max_tokens)"), (9, "9 tokens, by serve.max_tokens")):
        cut = judge_canary(canary, Answer("I think", False), asked)
        assert f"it was cut after {why}" in cut.found
        assert "cut" not in judge_canary(canary, Answer("The lamp is amber.", False), asked).found


def test_canaries_are_checked_with_the_run_file() -> None:
    run = {"name": "x", "model": {"base": "b"}, "data": {"train": "t"}}
    with pytest.raises(RunFileError) as caught:
        parse_run(
            {**run, "gates": {"canaries": [{"prompt": "a", "matches": "("}, {"prompt": "b"}]}}
        )
    assert "no regular expression" in str(caught.value)
    assert "says nothing about the answer" in str(caught.value)
