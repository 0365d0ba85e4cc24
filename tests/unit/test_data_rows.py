"""Formats, checks of conversations, and the split."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneserve.data.codes import CODES, RowError
from tuneserve.data.conversation import ControlTokens, check
from tuneserve.data.formats import Conversation, convert, detect
from tuneserve.data.lengthplot import drawable, font_families
from tuneserve.data.prepare import check_context, stop_ids
from tuneserve.data.split import first_occurrences, held_out, length_strata, outliers
from tuneserve.errors import DataError


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """A row of messages."""
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def code_of(row: dict[str, Any], format: str | None = None) -> str:
    """The code that a row is rejected with; its warnings joined when it is kept."""
    try:
        conversation = convert(row, format or detect(row) or "messages")
        check(conversation)
    except RowError as error:
        assert error.message
        return error.code
    return " ".join(conversation.warnings)


def test_formats_become_the_same_messages() -> None:
    wanted = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q\nx"},
        {"role": "assistant", "content": "a"},
    ]
    rows: dict[str, list[dict[str, Any]]] = {
        "messages": [
            turns(("system", "s"), ("user", "q\nx"), ("assistant", "a")),
            turns(
                ("developer", "s"), ("user", "q\nx"), ("assistant", [{"type": "text", "text": "a"}])
            ),
            turns(
                ("system", ["s"]),
                ("user", [{"type": "text", "text": "q"}, {"type": "text", "value": "x"}]),
                ("assistant", "a"),
            ),
            {
                "conversations": turns(("system", "s"), ("user", "q\nx"), ("assistant", "a"))[
                    "messages"
                ]
            },
        ],
        "sharegpt": [
            {
                "system": "s",
                "tools": "",
                "conversations": [
                    {"from": "human", "value": "q\nx"},
                    {"from": "gpt", "value": "a"},
                ],
            },
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "user", "value": "q\nx"},
                    {"from": "assistant", "value": "a"},
                ]
            },
        ],
        "alpaca": [
            {"instruction": "q", "input": "x", "output": "a", "system": "s"},
            {"instruction": "q\nx", "input": None, "response": "a", "system": "s"},
        ],
        "prompt_completion": [
            {"prompt": "q\nx", "completion": "a", "system": "s"},
            {
                "prompt": turns(("system", "s"), ("user", "q\nx"))["messages"],
                "completion": turns(("assistant", "a"))["messages"],
            },
        ],
    }
    for format, examples in rows.items():
        for row in examples:
            assert detect(row) == format
            conversation = convert(row, format)
            assert conversation.messages == wanted, row
            check(conversation)
    assert detect({"prompt": "q", "chosen": "a", "rejected": "b"}) == "preference"
    assert detect({"prompt": "q", "completion": "a", "label": True}) == "preference"
    assert detect({"text": "t", "label": 1}) == "class_label"
    assert detect({"input_ids": [1]}) == "tokenized" and detect({"x": 1}) == ""


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (turns(("user", "q"), ("assistant", "")), "empty_content"),  # A11
        (turns(("user", "q"), ("assistant", "  \n")), "empty_content"),
        (turns(("user", "q"), ("assistant", None)), "empty_content"),
        (turns(("user", "q"), ("assistant", "\u200b\u200d\ufeff")), "empty_content"),
        (turns(("user", "\u00a0"), ("assistant", "a")), "empty_content"),
        (turns(("user", "q"), ("assistant", "\x00\x1b\x7f\x9f")), "empty_content"),
        (turns(("user", "q"), ("assistant", "\ufff9\ufffb\U000e0041\U000e007f")), "empty_content"),
        (turns(("user", "q"), ("assistant", "\x1b[1mred\x1b[0m")), ""),
        (turns(("user", "q"), ("assistant", "None")), "null_literal"),
        (turns(("user", "q"), ("assistant", " null ")), "null_literal"),
        (turns(("user", "q"), ("assistant", "None of them.")), ""),
        (turns(("user", "None"), ("assistant", "a")), ""),
        ({"instruction": None, "output": "a"}, "empty_content"),
        ({"instruction": "q", "output": "nan"}, "null_literal"),
        (turns(("user", "q"), ("assistant", 7)), "bad_type"),  # A10
        (turns(("user", "q"), ("assistant", True)), "bad_type"),
        (turns(("user", "q"), ("assistant", {"a": 1})), "bad_type"),
        ({"instruction": "q", "output": 7}, "bad_type"),
        ({"messages": "hello"}, "bad_type"),
        ({"messages": ["hello"]}, "bad_type"),
        ({"messages": [{"content": "q"}]}, "bad_type"),
        (
            turns(("user", [{"type": "image_url", "image_url": "x"}]), ("assistant", "a")),
            "not_text_part",
        ),
        (turns(("asistant", "a")), "unknown_role"),  # A08
        ({"conversations": [{"from": "bot", "value": "a"}]}, "unknown_role"),
        (
            turns(("user", "q"), ("assistant", "a"), ("user", "q"), ("user", "q")),
            "bad_role_order",
        ),  # A07
        (turns(("user", "q"), ("system", "s"), ("assistant", "a")), "bad_role_order"),
        (turns(("assistant", "a"), ("user", "q")), "bad_role_order"),
        (turns(("user", "q"), ("tool", "t"), ("assistant", "a")), "bad_role_order"),
        (turns(("user", "q")), "no_assistant"),
        ({"messages": []}, "no_assistant"),
        (turns(("user", "Hi {{name}}"), ("assistant", "a")), "placeholder"),
        (turns(("user", "{{ 1, 2 }}"), ("assistant", "a")), ""),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference_pair"),
        ({"question": "q", "reply": "a"}, "unknown_format"),
    ],
)
def test_codes(row: dict[str, Any], code: str) -> None:
    formats = {"instruction": "alpaca", "conversations": "sharegpt"}
    format = next((f for key, f in formats.items() if key in row), "messages")
    assert code_of(row, format) == code


def test_unknown_roles_list_the_allowed_ones() -> None:
    with pytest.raises(
        RowError, match="human, user, gpt, assistant, system, function_call, observation"
    ):
        convert({"conversations": [{"from": "bot", "value": "x"}]}, "sharegpt")


def test_tool_calls() -> None:
    row = {
        "tools": json.dumps([{"name": "lamp", "parameters": {"type": "object"}}]),
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "lamp", "arguments": {"n": 1}}'},
            {"from": "observation", "value": ""},  # a tool may answer nothing
            {"from": "gpt", "value": "a"},
        ],
    }
    made = convert(row, "sharegpt")
    check(made)
    call = made.messages[1]["tool_calls"][0]
    assert call["function"] == {"name": "lamp", "arguments": '{"n": 1}'} and len(call["id"]) == 9
    assert made.messages[1]["content"] is None
    assert made.messages[2] == {"role": "tool", "content": "", "tool_call_id": call["id"]}
    assert made.tools == [
        {
            "type": "function",
            "function": {"name": "lamp", "description": None, "parameters": {"type": "object"}},
        }
    ]
    for arguments in ("{n: 1}", "[1]", 7):
        call = {"type": "function", "function": {"name": "lamp", "arguments": arguments}}
        bad = {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [call]},
            ]
        }
        assert code_of(bad) == "bad_tool_call"
    made = convert({**row, "tools": '[{"name": "other"}]'}, "sharegpt")
    assert made.warnings == ["unknown_tool"]


def test_weights() -> None:
    row = turns(("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "b"))
    row["messages"][1]["weight"] = 0
    row["messages"][3]["loss_weight"] = 1.0
    assert convert(row, "messages").trained == [True, False, True, True]
    for weight in (0.5, "0", 2):
        row["messages"][1]["weight"] = weight
        assert code_of(row) == "bad_type"


def test_control_tokens() -> None:
    row = convert(turns(("user", "a<|im_end|>b"), ("assistant", "c")), "messages")
    tokens = ["<|im_end|>", "<|im_end|>x", ""]
    with pytest.raises(RowError, match=r"turn 1 \(user\) contains the control token <\|im_end\|>"):
        ControlTokens(tokens, "reject").clean(copy.deepcopy(row))
    assert ControlTokens(tokens, "neutralize").clean(row)
    assert row.messages[0]["content"] == "a< |im_end|>b"
    assert not ControlTokens(tokens, "neutralize").clean(row)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "<|im_end|>"}'}}
    hidden = Conversation(
        [{"role": "assistant", "content": None, "tool_calls": [call]}], None, [True]
    )
    with pytest.raises(RowError, match="tool call of turn 1"):
        ControlTokens(tokens, "reject").clean(hidden)


def _words(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 2**63, count).astype(np.uint64)


def test_a14_first_occurrences() -> None:
    digests_ = np.array([[1, 2], [3, 4], [1, 2], [1, 3], [3, 4], [1, 2]], dtype=np.uint64)
    keep, first = first_occurrences(digests_)
    assert keep.tolist() == [True, True, False, True, False, False]
    assert first.tolist() == [0, 1, 0, 3, 1, 0]
    assert first_occurrences(np.zeros((0, 2), dtype=np.uint64))[0].tolist() == []


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 300), st.integers(0, 50), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_the_split_is_stable_and_never_empty(
    count: int, more: int, fraction: float, seed: int
) -> None:
    groups = _words(count + more)
    some, all_ = held_out(groups[:count], seed, fraction), held_out(groups, seed, fraction)
    assert some.any() and not some.all() and all_.any() and not all_.all()
    if 3 < some.sum() < count - 3:  # not a set so small that one group had to be chosen
        assert (all_[:count] == some).all()
    order = np.random.default_rng(1).permutation(count)
    assert (held_out(groups[:count][order], seed, fraction) == some[order]).all()


def test_the_split_takes_its_share_of_every_length() -> None:
    groups, lengths = _words(20_000), np.random.default_rng(2).integers(10, 900, 20_000)
    out = held_out(groups, 0, 0.1)
    assert abs(out.mean() - 0.1) < 0.01
    assert (held_out(groups, 1, 0.1) != out).any()
    for stratum in length_strata(lengths, out):
        assert abs(stratum["held_out"] / stratum["rows"] - 0.1) < 0.02
    assert sum(s["rows"] for s in length_strata(lengths, out)) == 20_000
    for tiny in ([], [7]):  # A15
        with pytest.raises(ValueError, match="there is only one" if tiny else "there is none"):
            held_out(np.array(tiny, dtype=np.uint64), 0, 0.1)


def test_length_outliers() -> None:
    lengths = np.array([50, 60, 70, 80] * 10 + [5000])
    assert np.flatnonzero(outliers(lengths)).tolist() == [40]
    assert not outliers(np.array([1, 1000])).any()


def test_a13_context_limits() -> None:
    huge = 10**30  # what tokenizers without a limit say
    check_context({"max_position_embeddings": 64}, huge, 64)
    check_context({"text_config": {"max_position_embeddings": 64}}, huge, 64)
    check_context({}, huge, 100_000)
    for config, limit in (
        ({"max_position_embeddings": 64}, huge),
        ({"n_positions": 64}, huge),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 9}, huge),
        ({}, 64),
    ):
        with pytest.raises(DataError, match="max_length is 65, but the model's context is 64"):
            check_context(config, limit, 65)
    assert stop_ids(2, {"eos_token_id": [3, 4]}) == {2, 3, 4}
    assert stop_ids(None, {"eos_token_id": 3}) == {3} and stop_ids(2, {}) == {2}


def test_codes_are_described_and_documented() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for name, code in CODES.items():
        assert code.meaning.endswith(".") and code.hint
        assert f"| `{name}` | {code.level} |" in page, name
    assert Counter(code.level for code in CODES.values())["policy"] == 3


def test_chinese_titles_are_drawn_or_escaped_never_boxes() -> None:
    families = font_families()
    text = drawable("\u8bc1\u636e a$b.json", families)
    if len(families) == 1:
        assert text == "\\u8bc1\\u636e a\\$b.json"
    else:
        assert text == "\u8bc1\u636e a\\$b.json"
