"""The tool calls in an answer, in the forms that chat templates write them. Pure text.

Stricter than the parsers that servers have, which must make something of whatever they get: a call
that is cut off, or whose tags do not close, makes the whole answer one that does not parse. Forms
are those that TRL's copies of the families' templates write and vLLM's tool parsers read.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# The tools of a chat: name -> parameter -> JSON type ("" where the schema leaves it open); None for
# a tool that takes whatever it is given.
Tools = dict[str, dict[str, str] | None]


class Written(str):
    """A value that a form writes without quotes, whatever its type."""


@dataclass(frozen=True)
class Call:
    """A call, and where in the answer it stands."""

    name: str
    arguments: dict[str, Any]
    span: tuple[int, int] = field(default=(0, 0), compare=False)


class Broken(ValueError):
    """Something begins as a call and does not go on as one."""


def tools_of(tools: list[dict[str, Any]] | None) -> Tools | None:
    """What calls are held against, from a chat's tools in OpenAI's form; None without any."""
    found: Tools = {}
    for tool in tools or []:
        function = tool.get("function") or {}
        schema = function.get("parameters")
        schema = schema if isinstance(schema, dict) else {}
        known = schema.get("properties")
        types = None
        if isinstance(known, dict) and not schema.get("additionalProperties"):
            types = {key: _type(value) for key, value in known.items()}
        if isinstance(function.get("name"), str):
            found[function["name"]] = types
    return found or None


def form_of(text: str, tools: Tools | None) -> str | None:
    """The form of the calls in a reference answer, the one that begins first; None without calls.

    Inside of one form's arguments another form's may stand, as text.
    """
    found = {form: calls for form in FORMS if (calls := calls_in(text, form, tools))}
    return min(found, key=lambda form: found[form][0].span[0], default=None)


def calls_in(text: str, form: str, tools: Tools | None = None) -> list[Call]:
    """The calls of an answer; none when one of them is broken, or `tools` do not take it.

    Args:
        text: The answer, special tokens included, with or without its end token.
        form: One of `FORMS`.
        tools: What may be called; None for anything. Forms without a mark of their own need it.
    """
    text = text.rpartition("</think>")[2]
    try:
        calls = list(FORMS[form](text, tools))
    except (Broken, RecursionError):
        return []
    rest, end = "", 0
    for call in calls:
        rest, end = rest + text[end : call.span[0]], call.span[1]
    rest += text[end:]
    if _LEFT_OVER.search(rest) or any(rest.count(a) != rest.count(b) for a, b in _AROUND):
        return []
    return calls if tools is None or all(_fits(call, tools) for call in calls) else []


# Around calls, in pairs.
_AROUND = (
    ("<tool_call>", "</tool_call>"),
    ("<tool_calls>", "</tool_calls>"),
    ("<longcat_tool_call>", "</longcat_tool_call>"),
    ("<function_calls>", "</function_calls>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<atem:function_calls>", "</atem:function_calls>"),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|python_start|>", "<|python_end|>"),
    ("<|tools_prefix|>", "<|tools_suffix|>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<|action_start|>", "<|action_end|>"),
)
# What stands in calls alone: beside those that were read, it is of one that was not.
_LEFT_OVER = re.compile(
    r'"(?:arguments|parameters)"\s*:|\[ARGS\]|</?(?:[\w-]+:|｜DSML｜)?(?:function|invoke|parameter)[=\s>]'
    r"|</?arg_(?:key|value)\b|<｜tool▁call▁|<\|tool_call_(?:argument_)?begin|\bto=functions\."
    r"|<\|tool_call>|<tool_call\||<(?:start|end)_function_call>"
)
_NAME = r"[\w./:-]+"
_decoder = json.JSONDecoder()


def _json_objects(text: str, _: Tools | None) -> Iterator[Call]:
    """Objects with a name and arguments, in whatever tags: Hermes, Qwen, Llama 3, Granite, Phi-4,
    Cohere, Mistral's older list."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _decoder.raw_decode(text, at)
        except ValueError:
            at = text.find("{", at + 1)
            continue
        if call := _object_call(value):
            yield Call(*call, (at, end))
        at = text.find("{", end)


def _object_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


# A name in tags of its own, then an object of arguments; what closes it, if anything must. In no
# pattern here may two \s* meet: a model that loops writes blanks by the thousand, and every way to
# share them out between the two would be tried.
_NAMED = [
    (re.compile(opening.replace("NAME", f"(?P<name>{_NAME})")), re.compile(closing))
    for opening, closing in (
        # Mistral, tokenizers v11 and later
        (r"\[TOOL_CALLS\]\s*NAME\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)", ""),
        # DeepSeek V3 and R1, V3.1
        (
            r"<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>\s*NAME\s*```json\s*",
            r"\s*```\s*<｜tool▁call▁end｜>",
        ),
        (r"<｜tool▁call▁begin｜>\s*NAME\s*<｜tool▁sep｜>\s*(?=\{)", r"\s*<｜tool▁call▁end｜>"),
        # Kimi K2: functions.look:0
        (
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w./-]+)(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>\s*",
            r"\s*<\|tool_call_end\|>",
        ),
        # gpt-oss; its <|call|> is an end token
        (
            r"to=functions\.NAME\s*(?:<\|channel\|>\w+\s*)?(?:<\|constrain\|>\s*)?(?:json\s*)?"
            r"<\|message\|>",
            r"\s*(?:<\|call\|>|\Z)",
        ),
        # Llama 3.1's own calls, functionary 3.1
        (r"<function=NAME>\s*(?=\{)", r"\s*</function>"),
    )
]
# functionary 3.2: the prompt ends with the first >>>
_RECIPIENT = (
    re.compile(rf"(?:\A\s*|>>>)(?P<name>{_NAME})\n(?=\{{)"),
    re.compile(r"\s*(?=>>>|<|\Z)"),
)


def _named_objects(text: str, tools: Tools | None) -> Iterator[Call]:
    """A name in tags, then its arguments as JSON."""
    forms = [*_NAMED, _RECIPIENT] if tools else _NAMED
    opening, closing = next((form for form in forms if form[0].search(text)), forms[0])
    end = 0
    for match in opening.finditer(text):
        if match.start() < end:
            continue
        try:
            arguments, end = _decoder.raw_decode(text, match.end())
        except ValueError as error:
            raise Broken from error
        if not isinstance(arguments, dict) or not (close := closing.match(text, end)):
            raise Broken
        end = close.end()
        yield Call(match["name"], arguments, (match.start(), end))


_XML_CALL = re.compile(
    r"<(?P<space>[\w-]+:|｜DSML｜|)(?P<tag>function|invoke)(?:=|\s+name\s*=\s*)"
    rf"(?P<quote>[\"']?)(?P<name>{_NAME})(?P=quote)\s*>"
)
_XML_PARAMETER = re.compile(
    r"\s*<(?P<space>[\w-]+:|｜DSML｜|)(?P<tag>parameter|param)(?:=|\s+name\s*=\s*)"
    r"(?:(?P<quote>[\"'])(?P<quoted>[^\"'<>]+)(?P=quote)(?:\s+\w+=\"[^\"]*\")*\s*"
    r"|(?P<bare>[^\"'<>]+))>"
    r"(?P<value>.*?)</(?P=space)(?P=tag)>",
    re.DOTALL,
)
_PARAMETER_OPENS = re.compile(r"<(?:[\w-]+:|｜DSML｜|)param(?:eter)?(?:=|\s+name\s*=)")


def _xml(text: str, _: Tools | None) -> Iterator[Call]:
    """A tag for the call and one for each parameter: Qwen3-Coder, Qwen3.5, Nemotron 3, MiniMax,
    Seed-OSS, Step, DeepSeek V3.2."""
    at = 0
    while match := _XML_CALL.search(text, at):
        arguments: dict[str, Any] = {}
        at = match.end()
        while value := _XML_PARAMETER.match(text, at):
            key = (value["quoted"] or value["bare"]).strip()
            if key in arguments or _PARAMETER_OPENS.search(value["value"]):
                raise Broken
            arguments[key] = Written(_line(value["value"]))
            at = value.end()
        close = re.compile(rf"\s*</{match['space']}{match['tag']}>").match(text, at)
        if not close:
            raise Broken
        at = close.end()
        yield Call(match["name"], arguments, (match.start(), at))


_KEYED_CALL = re.compile(rf"<tool_call(?P<kind>[^<>\s]*)>\s*(?P<name>{_NAME})\s*(?:<tool_sep\1>)?")
_KEYED_VALUE = re.compile(
    r"\s*<arg_key(?P<kind>[^<>]*)>(?P<key>[^<>]+)</arg_key(?P=kind)>"
    r"\s*<arg_value(?P=kind)>(?P<value>.*?)</arg_value(?P=kind)>",
    re.DOTALL,
)


def _keyed(text: str, _: Tools | None) -> Iterator[Call]:
    """A name, then keys and values in turns: GLM 4.5 and later, Hunyuan."""
    at = 0
    while match := _KEYED_CALL.search(text, at):
        arguments: dict[str, Any] = {}
        at = match.end()
        while value := _KEYED_VALUE.match(text, at):
            key = value["key"].strip()
            if key in arguments:
                raise Broken
            arguments[key] = Written(_line(value["value"]))
            at = value.end()
        close = re.compile(rf"\s*</tool_call{re.escape(match['kind'])}>").match(text, at)
        if not close:
            raise Broken
        at = close.end()
        yield Call(match["name"], arguments, (match.start(), at))


# The tags around Python calls.
_PYTHON = re.compile(
    r"<\|tool_call_start\|>(.*?)<\|tool_call_end\|>|<\|python_start\|>(.*?)<\|python_end\|>"
    r"|<function_calls>(.*?)</function_calls>|<\|python_tag\|>(.*?)(?=<\||\Z)",
    re.DOTALL,
)


def _python(text: str, tools: Tools | None) -> Iterator[Call]:
    """Calls with keyword arguments, in a list or one a line: Llama 3.2 and 4, LFM2, OLMo 3."""
    blocks = [(m[m.lastindex or 0], m.span(m.lastindex or 0)) for m in _PYTHON.finditer(text)]
    bare = re.fullmatch(r"\s*(\[.*\])(?:\s|<\|\w+\|>|</s>|<end_of_turn>)*", text, re.DOTALL)
    if not blocks and bare and tools:
        blocks = [(bare[1], bare.span(1))]
    for block, span in blocks:
        for name, arguments in _python_calls(block):
            yield Call(name, arguments, span)


def _python_calls(block: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            lines = ast.parse(block.strip()).body
        for line in lines:
            value = line.value if isinstance(line, ast.Expr) else None
            for call in value.elts if isinstance(value, ast.List) else [value]:
                if not isinstance(call, ast.Call) or call.args:
                    raise Broken
                arguments = {
                    word.arg: ast.literal_eval(_Constants().visit(word.value))
                    for word in call.keywords
                }
                if None in arguments:  # **these
                    raise Broken
                yield ast.unparse(call.func).removesuffix(".call"), arguments  # type: ignore[misc]
    except (SyntaxError, ValueError, TypeError, MemoryError) as error:
        raise Broken from error


class _Constants(ast.NodeTransformer):
    """JSON's true, false and null, which models write for Python's."""

    VALUES = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


_BRACED_OPENS = re.compile(
    rf"(?:<\|tool_call>|<start_function_call>)\s*call:(?P<name>{_NAME})(?=\{{)"
)
_BRACED_CLOSES = re.compile(r"\}\s*(?:<tool_call\|>|<end_function_call>)")


def _braced(text: str, _: Tools | None) -> Iterator[Call]:
    """JSON without quotes around keys, and with tags around strings: Gemma 4, FunctionGemma."""
    at = 0
    while match := _BRACED_OPENS.search(text, at):
        if not (close := _BRACED_CLOSES.search(text, match.end())):
            raise Broken
        at = close.end()
        parts = re.split(r'<\|"\|>|<escape>', text[match.end() : close.start() + 1])
        for place, part in enumerate(parts):  # every second one is a string
            quoted = re.sub(r"(?<![\w.$-])([\w.$-]+)\s*:", r'"\1":', part)
            parts[place] = json.dumps(part) if place % 2 else quoted
        try:
            arguments = json.loads("".join(parts))
        except ValueError as error:
            raise Broken from error
        yield Call(match["name"], arguments, (match.start(), at))


def _keys(text: str, _: Tools | None) -> Iterator[Call]:
    """A list of objects whose one key is the name: Apertus."""
    for match in re.finditer(r"<\|tools_prefix\|>(.*?)<\|tools_suffix\|>", text, re.DOTALL):
        try:
            listed = json.loads(match[1])
        except ValueError as error:
            raise Broken from error
        for item in listed if isinstance(listed, list) else [listed]:
            if not isinstance(item, dict) or len(item) != 1:
                raise Broken
            ((name, arguments),) = item.items()
            if not isinstance(arguments, dict):
                raise Broken
            yield Call(name, arguments, match.span())


FORMS: dict[str, Callable[[str, Tools | None], Iterator[Call]]] = {
    "tool_call": _json_objects,
    "named_call": _named_objects,
    "xml_call": _xml,
    "keyed_call": _keyed,
    "python_call": _python,
    "braced_call": _braced,
    "call_by_key": _keys,
}


def _line(value: str) -> str:
    """A value without the line breaks that templates put around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _type(schema: Any) -> str:
    found = schema.get("type") if isinstance(schema, dict) else None
    return found if isinstance(found, str) else ""


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (),
}  # fmt: skip


def _fits(call: Call, tools: Tools) -> bool:
    """Whether a tool has this name and these parameters, and unquoted values are of their types."""
    if call.name not in tools:
        return False
    known = tools[call.name]
    if known is None:
        return True
    return all(
        key in known and (not isinstance(value, Written) or _is_a(value, known[key]))
        for key, value in call.arguments.items()
    )


def _is_a(written: str, kind: str) -> bool:
    if kind not in _TYPES:
        return True
    for read in (json.loads, ast.literal_eval):  # some templates write Python's True and None
        try:
            value = read(written.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return value is None or type(value) in _TYPES[kind]  # True is no integer
    return False
