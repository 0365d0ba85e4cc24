"""The chat template, rendered as transformers and vLLM render it, without importing either.

The environment's rules are those of transformers (`utils/chat_template_utils.py`): an immutable
sandbox, trimmed blocks, loop controls, `tojson`, `raise_exception`, `strftime_now` and a
`generation` tag. That ours gives the same text is not assumed: the tokenizer's child renders the
same probes with transformers, and they are compared at every start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.runtime import Context, LoopContext

Message = dict[str, Any]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for trainers; it renders as what is inside it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "previtem", "nextitem", "length"})


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for what templates read all the time.

    `message.role` and `loop.first` are half of a rendering's time in the sandbox's own check,
    although an item of a dictionary and the state of a loop are harmless. The result is the same.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if kind is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _compile(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _renderer(template: jinja2.Template) -> Callable[[dict[str, Any]], str]:
    """`template.render` without what it makes anew at every call: half of a short rendering."""
    shared, run = dict(template.globals), template.root_render_func
    context = Context(template.environment, {}, template.name, template.blocks)

    def render(variables: dict[str, Any]) -> str:
        context.parent = {**shared, **variables}
        context.vars, context.exported_vars = {}, set()  # what the template itself sets
        return "".join(run(context))

    return render


class ChatTemplate:
    """A compiled chat template.

    Args:
        sources: Jinja source by name; ``default``, and ``tool_use`` where a tokenizer has one for
            tools.
        variables: The tokenizer's special tokens, which templates read as variables.

    Raises:
        jinja2.TemplateError: A source is not valid Jinja.
    """

    def __init__(self, sources: dict[str, str], variables: dict[str, Any]) -> None:
        self.sources, self.variables = sources, variables
        self._render = {name: _renderer(_compile(source)) for name, source in sources.items()}

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, prompt: bool
    ) -> str:
        """The text of messages in server form; `prompt` adds the beginning of the next answer.

        Raises:
            jinja2.TemplateError, TypeError: The template refuses the messages.
        """
        name = "tool_use" if tools and "tool_use" in self._render else "default"
        return self._render[name](
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": prompt,
                **self.variables,
            }
        )


def server_form(messages: list[Message]) -> list[Message]:
    """Messages as vLLM hands them to the template: arguments parsed, no content empty."""
    made = []
    for message in messages:
        if len(message) == 2 and message["content"]:  # role and content: nearly all
            made.append(message)
            continue
        new: Message = {"role": message["role"], "content": message["content"] or ""}
        if "tool_calls" in message:
            new["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.loads(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        if "reasoning" in message:
            new["reasoning"] = new["reasoning_content"] = message["reasoning"]
        for key in ("tool_call_id", "name"):
            if key in message:
                new[key] = message[key]
        made.append(new)
    return made
