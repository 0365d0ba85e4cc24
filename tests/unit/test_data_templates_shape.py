"""The example data sets keep what their README promises: counts, one voice, no copies."""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "data_templates"
GREETING, SIGN_OFF = "Leafy hello! ", " Stay green, Moss."

CODES = {
    "bad_json",
    "bad_encoding",
    "two_objects",
    "duplicate_key",
    "not_finite",
    "lone_surrogate",
    "too_deep",
    "huge_integer",
    "not_an_object",
    "unknown_format",
    "unknown_role",
    "bad_role_order",
    "no_assistant",
    "empty_content",
    "null_literal",
    "bad_type",
    "not_text_part",
    "control_token",
    "bad_tool_call",
    "unanswered_call",
    "duplicate",
    "preference_pair",
    "placeholder",
    "class_label",
    "too_long",
    "unknown_tool",
}


def rows(name: str) -> list[dict[str, Any]]:
    """Read one JSONL or JSON array file of the folder."""
    text = (FOLDER / name).read_text(encoding="ascii")
    if name.endswith(".json"):
        array: list[dict[str, Any]] = json.loads(text)
        return array
    return [json.loads(line) for line in text.split("\n") if line]


def normalized(text: str) -> str:
    """Lowercase, one space between words, no punctuation: near copies become equal."""
    kept = (c for c in text.lower() if c.isspace() or not unicodedata.category(c).startswith("P"))
    return " ".join("".join(kept).split())


def turns(row: dict[str, Any], role: str) -> list[str]:
    """The contents of one role's turns, in order."""
    return [m["content"] for m in row["messages"] if m["role"] == role]


def conversation(row: dict[str, Any]) -> str:
    """One whole conversation, system turn left out, as normalized text."""
    return "\n".join(
        m["role"] + " " + normalized(m["content"]) for m in row["messages"] if m["role"] != "system"
    )


def test_training_set_has_enough_conversations() -> None:
    train = rows("support.jsonl")
    assert len(train) >= 150
    assert sum(len(turns(row, "user")) > 1 for row in train) >= 35


def test_eval_set_has_24_conversations_of_which_8_are_multi_turn() -> None:
    held_out = rows("support_eval.jsonl")
    assert len(held_out) == 24
    assert sum(len(turns(row, "user")) > 1 for row in held_out) == 8


@pytest.mark.parametrize("name", ["support.jsonl", "support_eval.jsonl"])
def test_conversations_differ_and_alternate(name: str) -> None:
    data = rows(name)
    assert len({conversation(row) for row in data}) == len(data)
    assert len({normalized(turns(row, "user")[0]) for row in data}) == len(data)
    for row in data:
        roles = [m["role"] for m in row["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles


def test_eval_questions_are_not_in_the_training_set() -> None:
    asked = {normalized(text) for row in rows("support.jsonl") for text in turns(row, "user")}
    held_out = {
        normalized(text) for row in rows("support_eval.jsonl") for text in turns(row, "user")
    }
    assert not asked & held_out


@pytest.mark.parametrize("name", ["support.jsonl", "support_eval.jsonl"])
def test_every_answer_has_the_voice_of_moss_and_is_short(name: str) -> None:
    for row in rows(name):
        for answer in turns(row, "assistant"):
            assert answer.startswith(GREETING)
            assert answer.endswith(SIGN_OFF)
            assert 8 <= len(answer.split()) <= 40


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"(\d+) seconds", "12"),
        (r"(\d+) years? warranty", "7"),
        (r"warranty lasts (\d+) years", "7"),
        (r"covered for (\d+) years", "2"),
        (r"within (\d+) days", "45"),
        (r"takes (\d+) working days", "4"),
        (r"Larkspur costs (\d+) dollars", "189"),
        (r"sensor costs (\d+) dollars", "24"),
        (r"lasts (\d+) months", "18"),
        (r"(\d+) liters", "20"),
        (r"(\d+) minutes", "6"),
        (r"below (\d+) degrees", "4"),
        (r"backup battery .*?(\d+) hours", "5"),
        (r"[Vv]ersion (\d\.\d)", "3.8"),
        (r"Saturday, (8 am to \d+ pm)", "8 am to 4 pm"),
    ],
)
def test_a_fact_has_one_value_everywhere(pattern: str, value: str) -> None:
    answers = [
        text
        for name in ("support.jsonl", "support_eval.jsonl")
        for row in rows(name)
        for text in turns(row, "assistant")
    ]
    found = [match for text in answers for match in re.findall(pattern, text)]
    assert found
    assert set(found) == {value}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("messages.jsonl", {"messages"}),
        ("sharegpt.json", {"conversations"}),
        ("alpaca.json", {"instruction", "input", "output"}),
        ("prompt_completion.jsonl", {"prompt", "completion"}),
        ("tools_messages.jsonl", {"messages", "tools"}),
        ("tools_sharegpt.json", {"conversations", "tools"}),
    ],
)
def test_each_format_has_a_small_file_without_placeholders(name: str, fields: set[str]) -> None:
    data = rows(name)
    assert 6 <= len(data) <= 12
    assert all(set(row) == fields for row in data)
    assert "{{" not in (FOLDER / name).read_text(encoding="ascii")


def test_messages_show_text_parts_a_system_turn_and_a_weight_of_zero() -> None:
    messages = [m for row in rows("messages.jsonl") for m in row["messages"]]
    assert any(isinstance(m["content"], list) for m in messages)
    assert any(m["role"] == "system" for m in messages)
    assert [m["role"] for m in messages if m.get("weight") == 0] == ["assistant"]


def test_openai_tool_calls_are_answered_and_declared() -> None:
    calls = 0
    for row in rows("tools_messages.jsonl"):
        declared = {tool["function"]["name"] for tool in row["tools"]}
        asked: list[str] = []
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in declared
                assert isinstance(call["function"]["arguments"], str)
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                asked.append(call["id"])
                calls += 1
        answered = [m["tool_call_id"] for m in row["messages"] if m["role"] == "tool"]
        assert asked == answered
        assert row["messages"][-1]["content"].startswith(GREETING)
    assert calls


def test_sharegpt_tool_calls_are_declared() -> None:
    calls = 0
    for row in rows("tools_sharegpt.json"):
        declared = {tool["name"] for tool in json.loads(row["tools"])}
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                assert json.loads(turn["value"])["name"] in declared
                calls += 1
    assert calls


def test_rejected_file_has_one_expectation_for_every_row() -> None:
    lines = (FOLDER / "rejected.jsonl").read_bytes().split(b"\n")
    expected = rows("rejected.expected.json")
    assert [e["line"] for e in expected] == [n for n, line in enumerate(lines, 1) if line.strip()]
    assert len(expected) == len(lines) - 1, "one blank line counts as a line and is no row"
    assert {e["code"] for e in expected} == CODES | {None}
    assert sum(e["code"] is None for e in expected) == 3
    assert {e["code"] for e in expected if e.get("severity") == "warning"} == {
        "placeholder",
        "unknown_tool",
    }
    assert all(e["why"].endswith(".") for e in expected)


def test_rejected_file_kept_its_bytes() -> None:
    raw = (FOLDER / "rejected.jsonl").read_bytes()
    lines = raw.split(b"\n")
    by_code: dict[str | None, list[bytes]] = {}
    for entry in rows("rejected.expected.json"):
        by_code.setdefault(entry["code"], []).append(lines[entry["line"] - 1])
    with pytest.raises(UnicodeDecodeError):
        by_code["bad_encoding"][0].decode("utf-8")
    good = [line.decode("utf-8") for line in by_code[None]]
    assert any("\u2028" in line for line in good)
    assert any(line.endswith("\r") for line in good)
    assert [turns(json.loads(line), "assistant")[-1] for line in good].count("007") == 1
    for line in [*by_code["bad_json"], *by_code["two_objects"]]:
        with pytest.raises(json.JSONDecodeError):
            json.loads(line)
    assert not raw.endswith(b"\n")
