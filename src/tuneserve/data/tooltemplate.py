"""Tools for chat templates that know none: a Jinja prelude that writes them as plain turns.

A base such as SmolLM2 was never taught tools, and its template drops them without a word. The
prelude rewrites the messages before the template sees them: the tools become text of the system
turn, calls become the answer's text, results a user turn. The format is the one of Hermes models
(NousResearch, Hermes-Function-Calling), which vLLM reads back with its `hermes` tool parser. It is
saved with the tokenizer, so the server renders as training did; conversations without tools render
as before.
"""

from __future__ import annotations

import json
from typing import Literal

_INTRODUCTION = (
    "You can call functions. Their signatures are between <tools> and </tools>:\n<tools>"
)
_RULE = (
    "\n</tools>\n\nTo call one, answer with a JSON object between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
)

_PRELUDE = """\
{%- set ts = namespace(used=tools, turns=[], text='') %}
{%- for turn in messages %}
{%- if turn.role == 'tool' or turn.tool_calls %}{% set ts.used = true %}{% endif %}
{%- endfor %}
{%- if ts.used %}
{%- if tools %}
{%- set ts.text = INTRODUCTION %}
{%- for tool in tools %}{% set ts.text = ts.text + '\\n' + (tool | tojson) %}{% endfor %}
{%- set ts.text = ts.text + RULE %}
{%- endif %}
{%- if ts.text and 'TARGET' == 'system' and messages[0].role != 'system' %}
{%- set ts.turns = [{'role': 'system', 'content': ts.text}] %}
{%- set ts.text = '' %}
{%- endif %}
{%- for turn in messages %}
{%- if turn.tool_calls %}
{%- set call = namespace(text=turn.content or '') %}
{%- for item in turn.tool_calls %}
{%- set body = {'name': item.function.name, 'arguments': item.function.arguments} | tojson %}
{%- set call.text = call.text + ('\\n' if call.text else '') %}
{%- set call.text = call.text + '<tool_call>\\n' + body + '\\n</tool_call>' %}
{%- endfor %}
{%- set ts.turns = ts.turns + [{'role': 'assistant', 'content': call.text}] %}
{%- elif turn.role == 'tool' %}
{%- set result = '<tool_response>\\n' + turn.content + '\\n</tool_response>' %}
{%- if loop.previtem is defined and loop.previtem.role == 'tool' %}
{%- set result = ts.turns[-1].content + '\\n' + result %}
{%- set ts.turns = ts.turns[:-1] %}
{%- endif %}
{%- set ts.turns = ts.turns + [{'role': 'user', 'content': result}] %}
{%- elif turn.role == 'TARGET' and ts.text %}
{%- set ts.turns = ts.turns + [{'role': turn.role, 'content': JOINED}] %}
{%- set ts.text = '' %}
{%- else %}
{%- set ts.turns = ts.turns + [turn] %}
{%- endif %}
{%- endfor %}
{%- set messages = ts.turns %}
{%- endif %}
"""


def with_tools(source: str, target: Literal["system", "user"]) -> str:
    """A template that writes tools, calls and results through `source`.

    Args:
        source: A template without tools.
        target: The turn that takes the list of tools; ``user`` for templates without system turns.
    """
    joined = {
        "system": "turn.content + '\\n\\n' + ts.text",
        "user": "ts.text + '\\n\\n' + turn.content",
    }
    prelude = (
        _PRELUDE.replace("INTRODUCTION", json.dumps(_INTRODUCTION))
        .replace("RULE", json.dumps(_RULE))
        .replace("TARGET", target)
        .replace("JOINED", joined[target])
    )
    # The prelude ends with a line feed, which the environment trims: `source` begins on a line of
    # its own, as it did before.
    return prelude + source
