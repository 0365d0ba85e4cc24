"""Tool calls and their results: which belong together, and how templates write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import data_bases as bases
from tuneserve.data.conversation import check
from tuneserve.data.formats import Conversation, convert, detect
from tuneserve.data.readers import Block

# As Llama 3.1 to 3.3 write them: a tool's result as JSON, a call as an object, one a turn.
LLAMA31 = (
    "{{ '<s>' }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if not (message.role == 'tool' or 'tool_calls' in message) %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"  # noqa: E501
    "{% elif 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}"  # noqa: E501
    "{% else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{% if message.content is mapping or message.content is iterable %}"
    "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"  # noqa: E501
)
RESULT = '{"state": "on", "note": "C:\\\\lamps\\n\tcaf\u00e9"}\n'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def calls(*ids: str | None) -> dict[str, Any]:
    """A turn that calls `look` once for each id."""
    made: list[dict[str, Any]] = []
    for number, id in enumerate(ids):
        function = {"name": "look", "arguments": json.dumps({"n": number})}
        made.append({"type": "function", "function": function, **({"id": id} if id else {})})
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id: str | None = None, content: str = "lit") -> dict[str, Any]:
    """A turn of a result."""
    return {"role": "tool", "content": content, **({"tool_call_id": id} if id else {})}


def row(*turns: dict[str, Any], end: bool = True) -> dict[str, Any]:
    """A question, the turns, and an answer."""
    answer = [{"role": "assistant", "content": "It is."}] if end else []
    return {"messages": [{"role": "user", "content": "Is it?"}, *turns, *answer]}


def made_of(source: dict[str, Any]) -> Conversation:
    """The checked conversation of a row."""
    made = convert(source, detect(source))
    check(made)
    return made


@pytest.mark.parametrize("filter", ["tojson", "tojson(ensure_ascii=true)", "trim | tojson"])
@pytest.mark.parametrize("content", [RESULT, 'say "on"', "two\nlines", "back\\slash", "plain"])
def test_results_that_the_template_writes_as_json_are_present(filter: str, content: str) -> None:
    source = LLAMA31.replace("message.content | tojson", f"message.content | {filter}")
    worker = bases.make_worker(source, stop="<|eot_id|>", bos="<s>")
    line = json.dumps({**row(calls("abc"), result("abc", content)), "tools": TOOLS}).encode()
    made = worker(Block(0, "lines", 1, line, format="messages"))
    assert not made.rejected, made.rejected
    # Two supervised answers: the call and the last turn.
    assert made.supervised[0] == len(
        worker.engine.encode(
            '{"name": "look", "parameters": {"n": 0}}<|eot_id|>It is.<|eot_id|>'
        ).ids
    )


def test_a_result_that_is_not_shown_is_still_missed() -> None:
    # The template shows the results of the probe, but none that is longer.
    source = LLAMA31.replace("message.content | tojson", "message.content[:9] | tojson")
    worker = bases.make_worker(source, stop="<|eot_id|>", bos="<s>")
    line = json.dumps({**row(calls("abc"), result("abc", RESULT)), "tools": TOOLS}).encode()
    (found,) = worker(Block(0, "lines", 1, line, format="messages")).rejected
    assert found["code"] == "turn_dropped" and "turn 3 (tool)" in found["message"]


@pytest.mark.parametrize(
    "source",
    [
        row(calls("A", "B"), result("A"), result("B")),
        row(calls("A", "B"), result("B"), result("A")),
        row(calls("A"), result("A"), calls("B"), result("B")),
        row(calls("A"), result("A"), calls("A"), result("A")),  # exports that number anew
        row(calls("A", "A"), result("A"), result("A")),
        row(calls("A", "B"), result(), result()),
        row(calls("A", "B"), result("B"), result()),
        row(calls("A"), result("A"), result("A")),  # told in two parts
        row(calls(None, None), result()),  # ShareGPT: one observation of all calls
        row(calls(None), result("x")),
        row(calls("A", "B"), end=False),  # the answer to learn is the calls
        row(calls("A"), result("A"), calls("B"), end=False),
        row(calls("A", None), result(), result("A")),
        row(calls("A", None), result("A"), result("B")),
        row(calls(" A", "B\n"), result("A "), result("B")),
        row(calls(" "), result("")),
    ],
)
def test_calls_with_their_results(source: dict[str, Any]) -> None:
    messages = made_of(source).messages
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            turn = max(at for at in range(number) if "tool_calls" in messages[at])
            ids = [call["id"] for call in messages[turn]["tool_calls"]]
            assert message["tool_call_id"] in ids


def test_results_without_an_id_answer_in_order() -> None:
    messages = made_of(row(calls("A", "B", "C"), result("B"), result(), result())).messages
    assert [m["tool_call_id"] for m in messages[2:5]] == ["B", "A", "C"]


@pytest.mark.parametrize(
    ("source", "called", "answered"),
    [
        (row(calls("A", None), result(), result("A")), ["A", "call00001"], ["call00001", "A"]),
        (row(calls(None, "A"), result("A"), result()), ["call00000", "A"], ["A", "call00000"]),
        (row(calls("A", "B"), result(), result("A")), ["A", "B"], ["B", "A"]),
        (row(calls("A", "A", "B"), result("A"), result(), result()), [*"AAB"], [*"AAB"]),
        (row(calls("A", None), result("X"), result("A")), ["A", "X"], ["X", "A"]),
        (row(calls(" A"), result("A\n")), ["A"], ["A"]),
    ],
)
def test_which_call_a_result_answers(
    source: dict[str, Any], called: list[str], answered: list[str]
) -> None:
    messages = made_of(source).messages
    assert [call["id"] for call in messages[1]["tool_calls"]] == called
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == answered


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_id_or_name_is_none(empty: str) -> None:
    source = row(calls("A", "B"), result(), result())
    for number in (2, 3):
        source["messages"][number] |= {"tool_call_id": empty, "name": empty}
    messages = made_of(source).messages
    assert [m["tool_call_id"] for m in messages[2:4]] == ["A", "B"]
    assert not any("name" in message for message in messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            row(calls("A", "B"), result("ZZZ")),
            "turn 3 is the result of a call 'ZZZ', but the ids of turn 2 are A, B",
        ),
        (row(calls("A", "B"), result("A")), "the call 'B' of turn 2 has no result"),
        (row(calls("A", "B"), result()), "the call 'B' of turn 2 has no result"),
        (
            row(calls("A"), result("A"), calls("B"), result("A")),
            "turn 5 is the result of a call 'A', but the ids of turn 4 are B",
        ),
    ],
)
def test_calls_and_results_that_do_not_belong_together(
    source: dict[str, Any], message: str
) -> None:
    from tuneserve.data.codes import RowError

    with pytest.raises(RowError) as caught:
        made_of(source)
    assert (caught.value.code, caught.value.message) == ("unanswered_call", message)


def test_null_fields_of_another_form_hide_nothing() -> None:
    """Columns of several sources in one file: what is null is not there."""
    turns = bases.chat("q", "a")["messages"]
    share = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    empty = {"role": None, "content": None}
    for source in (
        {"messages": None, "conversations": turns},
        {"messages": None, "conversations": share},
        {"messages": turns, "conversations": None, "chosen": None, "rejected": None},
        {"messages": turns, "prompt": None, "completion": None, "label": None},
        {"instruction": None, "output": None, "prompt": "q", "completion": "a"},
        {"instruction": "q", "output": None, "response": "a"},
        {"conversations": [{**empty, **turn} for turn in share]},
        {"messages": [{"from": None, "value": None, "tool_calls": [], **turn} for turn in turns]},
    ):
        assert made_of(source).messages == turns, source
    made = made_of({**bases.chat("q", "a"), "system": None, "system_prompt": "s"})
    assert made.messages == turns  # a row of messages holds its system turn itself
    made = made_of({"prompt": "q", "completion": "a", "system": None, "system_prompt": "s"})
    assert made.messages[0] == {"role": "system", "content": "s"}
    assert detect({"prompt": "q", "chosen": "a", "rejected": None}) == "preference"
    thinking = bases.chat("q", "a")
    thinking["messages"][1] |= {"reasoning": None, "reasoning_content": "hm"}
    assert made_of(thinking).messages[1]["reasoning"] == "hm"
    call = {"type": None, "function": None, "name": "look", "arguments": {"n": 1}}
    source = row({"role": "assistant", "content": None, "tool_calls": [call]}, end=False)
    assert made_of(source).messages[1]["tool_calls"][0]["function"]["name"] == "look"
    source = row({"role": "assistant", "tool_calls": [], "function_call": call}, end=False)
    assert made_of(source).messages[1]["tool_calls"][0]["id"] == "call00000"
    parts = [{"type": "text", "text": None, "value": "q"}, {"type": None, "text": "q"}]
    source = {"messages": [{"role": "user", "content": parts}, turns[1]]}
    assert made_of(source).messages[0]["content"] == "q\nq"
