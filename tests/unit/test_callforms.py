"""Tool calls as the families' own templates write them, read back; broken ones are not read."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from tuneserve.lm.callforms import FORMS, Call, Written, calls_in, form_of, tools_of
from tuneserve.lm.structured import parses, recognize

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where"},
                    "days": {"type": "integer", "description": "How many"},
                    "parts": {
                        "type": "array", "items": {"type": "string"}, "description": "Of it",
                    },
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]  # fmt: skip
KNOWN = tools_of(TOOLS)
WEATHER = {"city": 'Paris, "Texas" {it\'s}', "days": 3, "parts": ["sun", "rain"]}
SIMPLE = {"city": "Paris", "days": 3}

# Templates of TRL that write calls, and the form they write.
TEMPLATES = {
    "deepseekv3_training": "named_call",
    "gemma4": "braced_call",
    "glm4moe": "keyed_call",
    "gptoss": "named_call",
    "lfm2_v2": "python_call",
    "llama3_2": "tool_call",
    "muse_glimmer": "xml_call",
    "nemotron_3_nano": "xml_call",
    "qwen2_5": "tool_call",
    "qwen3": "tool_call",
    "qwen3_6": "xml_call",
}
ONE_CALL_A_TURN = ("gptoss", "llama3_2")

# What other families write, by their templates: a call of get_weather and, in most, one of now.
WRITTEN = {
    "Mistral": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}</s>',
        "named_call",
    ),
    "Mistral with ids": (
        '[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]{"city": "Paris", "days": 3}'
        "[TOOL_CALLS]now[CALL_ID]call00001[ARGS]{}",
        "named_call",
    ),
    "Mistral before v11": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": '
        '"call00000"}, {"name": "now", "arguments": {}, "id": "call00001"}]</s>',
        "tool_call",
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "named_call",
    ),
    "DeepSeek V3.2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "xml_call",
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "named_call",
    ),
    "Llama 3.1, its own": (
        '<function=get_weather>{"city": "Paris", "days": 3}</function><function=now>{}</function>',
        "named_call",
    ),
    "functionary 3.2": (
        'get_weather\n{"city": "Paris", "days": 3}>>>now\n{}<|eot_id|>',
        "named_call",
    ),
    "Llama 3.2 in Python": (
        "[get_weather(city='Paris', days=3), now()]<|eot_id|>",
        "python_call",
    ),
    "Llama 4": (
        '<|python_start|>[get_weather(city="Paris", days=3), now()]<|python_end|><|eom|>',
        "python_call",
    ),
    "OLMo 3": (
        '<function_calls>\nget_weather(city="Paris", days=3)\nnow()\n</function_calls><|im_end|>',
        "python_call",
    ),
    "MiniMax M2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>'
        '\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>[e~[",
        "xml_call",
    ),
    "Seed-OSS": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call><seed:eos>",
        "xml_call",
    ),
    "GLM 4.7": (
        "<think></think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        "keyed_call",
    ),
    "FunctionGemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "braced_call",
    ),
    "Apertus": (
        '<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}, {"now": {}}]'
        "<|tools_suffix|>",
        "call_by_key",
    ),
    "Cohere": (
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        '{"city": "Paris", "days": 3}},\n{"tool_call_id": "1", "tool_name": "now", '
        '"parameters": {}}\n]<|END_ACTION|>',
        "tool_call",
    ),
    "OpenAI": (
        '[{"type": "function", "function": {"name": "get_weather", "arguments": '
        '"{\\"city\\": \\"Paris\\", \\"days\\": 3}"}}, {"type": "function", "function": '
        '{"name": "now", "arguments": "{}"}}]',
        "tool_call",
    ),
}


def plain(calls: list[Call]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments, unquoted values as the templates' JSON has them."""
    return [
        (call.name, {key: _value(key, value) for key, value in call.arguments.items()})
        for call in calls
    ]


def _value(key: str, value: Any) -> Any:
    return json.loads(value) if isinstance(value, Written) and key != "city" else value


def answer_by(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What a template of TRL writes after the generation prompt."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    made = [
        {"id": f"call{at:05d}", "type": "function", "function": {"name": n, "arguments": a}}
        for at, (n, a) in enumerate(calls)
    ]
    asked = {"role": "user", "content": "How is it?"}
    chat = [asked, {"role": "assistant", "content": "", "tool_calls": made}]
    known = {"tools": TOOLS, "chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (whole,), _ = render_jinja_template([chat], **known)
    return str(whole).partition("How is it?")[2]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_familys_own_calls_are_read_back(name: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", WEATHER), ("now", {})]
    calls = calls[: 1 if name in ONE_CALL_A_TURN else 2]
    text = answer_by(name, calls)
    assert recognize(text, KNOWN) == (TEMPLATES[name], KNOWN), text
    assert plain(calls_in(text, TEMPLATES[name], KNOWN)) == calls
    # Cut off in the middle of an argument, as a limit does.
    assert not parses(text[: text.index("Texas")], TEMPLATES[name], KNOWN)
    assert not parses("It is fine.", TEMPLATES[name], KNOWN)


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_other_families_are_read(name: str) -> None:
    text, form = WRITTEN[name]
    assert recognize(text, KNOWN) == (form, KNOWN)
    assert plain(calls_in(text, form, KNOWN)) == [("get_weather", SIMPLE), ("now", {})]
    assert not parses(text[: text.index("Paris") + 3], form, KNOWN)
    misnamed = text.replace("now", "later")
    assert not parses(misnamed, form, KNOWN)
    unknown = text.replace("days", "weeks")
    assert not parses(unknown, form, KNOWN) and not parses(unknown, form, tools_of(TOOLS[1:]))
    if name not in ("functionary 3.2", "Llama 3.2 in Python"):  # no mark but the tools' names
        assert form_of(text, None) == form and parses(misnamed, form)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("tool_call", '<tool_call>\n{"name": "now", "arguments": {}}\n'),
        ("tool_call", '{"name": "now", "arguments": "{"}'),
        ("tool_call", '{"name": "now", "arguments": {}} {"name": "now", "arguments": {"a": }}'),
        ("named_call", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{"),
        ("named_call", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]"),
        ("named_call", "<function=now>[]</function>"),
        ("named_call", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"),
        ("xml_call", "<tool_call><function=now></tool_call>"),
        ("xml_call", "<function=now></function></tool_call>"),
        ("xml_call", "<function=get_weather><parameter=city>Paris</function>"),
        (
            "xml_call",
            "<function=get_weather><parameter=city>Paris<parameter=days>3</parameter></function>",
        ),
        (
            "xml_call",
            "<function=get_weather><parameter=days>1</parameter><parameter=days>2</parameter>"
            "</function>",
        ),
        (
            "xml_call",
            "<function=get_weather><parameter=days>three</parameter></function>",
        ),
        ("keyed_call", "<tool_call>now<arg_key>city</arg_key></tool_call>"),
        ("python_call", "[now(), get_weather('Paris')]"),
        ("python_call", "[get_weather(city=Paris)]"),
        ("python_call", "[get_weather(city=open('x'))]"),
        ("python_call", "[now(**{'a': 1})]"),
        ("python_call", "<|python_start|>[now()]"),
        ("python_call", "[" * 5000),
        ("braced_call", "<|tool_call>call:get_weather{city:Paris}<tool_call|>"),
        ("braced_call", "<|tool_call>call:now{}<tool_call|><|tool_call>call:now{"),
        ("call_by_key", "<|tools_prefix|>[{}]<|tools_suffix|>"),
    ],
)
def test_a_broken_call_is_none(form: str, text: str) -> None:
    assert calls_in(text, form, KNOWN) == []


@pytest.mark.parametrize(
    "begun",
    [
        "to=functions.now", "[TOOL_CALLS]", "[TOOL_CALLS]now", "[TOOL_CALLS]now[CALL_ID]a",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now", "<|tool_call_begin|>now:0",
        "<function=now><parameter=a", '<function=now><parameter name="a"', "<tool_call>now",
        "<tool_call>now<arg_key>", "<tool_call>now<arg_key>a", "[now()]", "<|python_tag|>",
        "<start_function_call>call:now{}", ">>>now\n", "{",
    ],
)  # fmt: skip
def test_a_model_that_loops_on_blanks_is_read_at_once(begun: str) -> None:
    """A pattern that tries every way to share the blanks out would take hours for these."""
    assert recognize(f"{begun}{' ' * 20_000}x", KNOWN) is None


@pytest.mark.parametrize("looped", ["[", '{"a":', "<start_function_call>call:now{", "-", "\x00"])
def test_a_model_that_loops_is_no_structure_and_no_fault(looped: str) -> None:
    for text in (looped * 5000, f"<|python_tag|>now(a={looped * 5000}1)", "[" + looped * 5000):
        assert recognize(text, KNOWN) is None
        assert not any(parses(text, kind, KNOWN) for kind in ("json", *FORMS))


def test_blanks_around_names_are_none_of_theirs() -> None:
    for form, text in (
        ("xml_call", "<function=get_weather><parameter= city >Paris</parameter></function>"),
        (
            "keyed_call",
            "<tool_call>get_weather<arg_key>\ncity </arg_key><arg_value>Paris</arg_value>"
            "</tool_call>",
        ),
        (
            "named_call",
            "to=functions.get_weather <|channel|>commentary <|constrain|>json <|message|>"
            '{"city": "Paris"}',
        ),
        ("named_call", '[TOOL_CALLS] get_weather [CALL_ID] a1 [ARGS] {"city": "Paris"}'),
    ):
        assert plain(calls_in(text, form, KNOWN)) == [("get_weather", {"city": "Paris"})], text


def test_values_without_quotes_are_of_their_types() -> None:
    one = "<function=get_weather><parameter={}>{}</parameter></function>"
    for key, value, good in (
        ("city", "3", True), ("days", "3", True), ("days", "3.5", False), ("days", "None", True),
        ("parts", "['sun']", True), ("parts", '["sun"]', True), ("parts", "sun", False),
        ("days", "true", False),
    ):  # fmt: skip
        assert parses(one.format(key, value), "xml_call", KNOWN) is good, (key, value)


def test_another_forms_call_in_an_argument_is_text() -> None:
    code = "<function=now></function> [now()]"
    text = json.dumps({"name": "get_weather", "arguments": {"city": code}})
    assert recognize(text, KNOWN) == ("tool_call", KNOWN)
    outer = f"<function=get_weather><parameter=city>\n{text}\n</parameter></function>"
    assert recognize(outer.replace("<function=now></function>", ""), KNOWN) == (
        "xml_call",
        KNOWN,
    )


def test_thinking_about_a_call_is_none() -> None:
    assert recognize("<think>[now()] or <function=now></function>?</think>No.", KNOWN) is None
    thought = '<think>\nhm {"name": "x", "arguments": {}}\n</think>\n\n{"a": 1}'
    assert recognize(thought, KNOWN) == ("json", None)


def test_calls_that_the_chats_tools_do_not_take_are_held_against_none() -> None:
    text = '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call>'
    assert recognize(text, KNOWN) == ("tool_call", None) and parses(text, "tool_call", None)


def test_schemas_say_what_they_know() -> None:
    loose = {"type": "object", "properties": {"a": {}}, "additionalProperties": True}
    any_of = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}]}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("a", loose), ("b", any_of), ("c", None), ("d", ["a"]), ("e", "a"))
    ]
    assert tools_of(tools) == {"a": None, "b": {"a": ""}, "c": None, "d": None, "e": None}
    assert tools_of([]) is None is tools_of(None) is tools_of([{"type": "function"}])


@pytest.mark.parametrize(
    ("said", "inside"),
    [
        ('```json\n{"a": [1, 2]}\n```', True),
        ('\n```JSON\n{\n  "a": "```"\n}\n```\n', True),
        ("```\n[1]\n```", True),
        ("````json\n[1]\n````", True),
        ("<think>x</think>```json\n[1]\n```", True),
        ('```json\n{"a": [1, 2}\n```', False),
        ('```json\n{"a": 1}', False),
        ("````json\n[1]\n```", False),
        ("Here it is:\n```json\n[1]\n```", False),
        ("```python\n[1]\n```", False),
    ],
)
def test_json_in_a_block_of_markdown(said: str, inside: bool) -> None:
    """Text around the block, an unclosed one or broken JSON in it is no structured answer."""
    assert recognize(said) == (("fenced_json", None) if inside else None)
    assert parses(said, "fenced_json") is inside and not parses(said, "json")


def test_json_without_its_block_is_another_form() -> None:
    assert recognize("[1]") == ("json", None)
    assert not parses("[1]", "fenced_json")
