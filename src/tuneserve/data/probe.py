"""What the chat template does, found by rendering a few conversations before any row."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2

from tuneserve.data.engine import Engine
from tuneserve.data.supervise import Frames
from tuneserve.data.template import ChatTemplate, Message
from tuneserve.data.tooltemplate import with_tools
from tuneserve.errors import ModelError

_QUESTIONS = ("Which lamp is it?", "And the next one?")
_ANSWERS = ("Quartz lantern number nine.", "Copper lantern number four.")


def _turns(*pairs: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in pairs]


_SHORT = _turns(("user", _QUESTIONS[0]), ("assistant", _ANSWERS[0]))
_LONG = _SHORT + _turns(("user", _QUESTIONS[1]), ("assistant", _ANSWERS[1]))
_THOUGHT = "It shines."
# What a prompt ends with that begins the thinking for the model: <think>, or [THINK].
_OPENER = re.compile(r"(?:<(?P<tag>\w+)>|\[(?P<bracket>\w+)\])\s*\Z")
_SYSTEM = _turns(("system", "Lamps only, please.")) + _SHORT
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lamp_state",
            "description": "State",
            "parameters": {"type": "object"},
        },
    }
]
_CALL = _turns(("user", _QUESTIONS[0])) + [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "lamp_state", "arguments": {"lamp": "nine"}},
            }
        ],
    },
    {"role": "tool", "content": "lit", "tool_call_id": "call00000"},
    {"role": "assistant", "content": _ANSWERS[0]},
]


def _reasoned(turns: list[Message]) -> list[Message]:
    """The turns with thinking beside each answer."""
    thought = {"reasoning": _THOUGHT, "reasoning_content": _THOUGHT}
    return [{**turn, **thought} if turn["role"] == "assistant" else turn for turn in turns]


def _thought_aloud(turns: list[Message], opener: re.Match[str]) -> list[Message]:
    """The turns with thinking at the beginning of each answer's content."""
    closer = f"</{opener['tag']}>" if opener["tag"] else f"[/{opener['bracket']}]"
    head = f"{opener.group().strip()}\n{_THOUGHT}\n{closer}\n\n"
    return [
        {**turn, "content": head + turn["content"]} if turn["role"] == "assistant" else turn
        for turn in turns
    ]


# Rendered by transformers in the tokenizer's child and by us; the texts and ids must be equal.
PROBES: list[dict[str, Any]] = [
    {"messages": _SHORT, "prompt": False},
    {"messages": _SHORT[:1], "prompt": True},
    {"messages": _LONG, "prompt": False},
    {"messages": _SYSTEM, "prompt": False},
    {"messages": _CALL, "prompt": False, "tools": _TOOLS},
    {"messages": _reasoned(_SHORT), "prompt": False},
]


@dataclass
class TemplateFacts:
    """What was found.

    Attributes:
        frames: What the template puts around answers.
        end_id: Id of the token that ends an answer.
        end_text: Its text.
        extra_stop: Whether the base's stop tokens lack it, so that it has to be added to them.
        notes: Sentences for the report.
    """

    frames: Frames
    end_id: int
    end_text: str
    extra_stop: bool
    notes: list[str] = field(default_factory=list)


def check_parity(template: ChatTemplate, engine: Engine, renderings: list[Any]) -> None:
    """Our rendering and ids must be those of transformers on every probe.

    Raises:
        ModelError: They differ.
    """
    for probe, theirs in zip(PROBES, renderings, strict=True):
        text = _try(template, probe)
        if (text is None) != (theirs is None) or (theirs is not None and text != theirs["text"]):
            raise ModelError(
                "the chat template renders differently in transformers and here",
                expected="the same text from both",
                hint="report it on the project's issue tracker on GitHub, with the model's name",
                details={"ours": text, "theirs": theirs and theirs["text"]},
            )
        if theirs is not None and engine.encode(theirs["text"]).ids != theirs["ids"]:
            raise ModelError(
                "the tokenizer gives other ids in transformers than here",
                expected="the same ids from both",
                hint="report it on the project's issue tracker on GitHub, with the model's name",
            )


def examine(template: ChatTemplate, engine: Engine) -> TemplateFacts:
    """Learn the frames and the end token.

    Where the prompt opens the thinking, an answer without any may not follow it: then answers with
    thinking are tried, beside the content and in it.

    Raises:
        ModelError: Answers cannot be supervised with this template.
    """
    try:
        facts = _examine(template, engine, _SHORT, _LONG)
    except ModelError as refusal:
        found = _examine_thinking(template, engine)
        if found is None:
            raise refusal
        facts = found
    facts.frames.opener = _opener_in_content(template)
    return facts


def _examine(
    template: ChatTemplate, engine: Engine, short: list[Message], long: list[Message]
) -> TemplateFacts:
    try:
        text = template.render(short, None, prompt=False)
        prompt = template.render(short[:1], None, prompt=True)
        plain = template.render(short[:1], None, prompt=False)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise _refused(f"it refuses a question and an answer: {error}") from error
    if not text.startswith(prompt):
        at = next(
            (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(text)
        )
        raise _refused(
            f"the prompt for an answer is not the beginning of the conversation with it; they "
            f"differ at character {at}: prompt {prompt[at : at + 20]!r}, conversation "
            f"{text[at : at + 20]!r}"
        )
    ids, own = engine.encode(text).ids, engine.encode(prompt).ids
    if ids[: len(own)] != own:
        differ = (i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b)
        at = next(differ, min(len(own), len(ids)))
        raise _refused(
            "the ids of the prompt for an answer are not the conversation's first ids; the first "
            f"index that differs is {at}"
        )
    if _ANSWERS[0] not in text[len(prompt) :]:
        raise _refused("it does not show the answer")
    before, _, rest = text[len(prompt) :].partition(_ANSWERS[0])
    end_id, after = _end_token(engine, rest)
    frames = Frames({(before, after), ("", after)})
    notes = []
    if prompt == plain and before == "":
        notes.append("the template adds nothing before an answer (no generation prompt)")
    notes += _examine_more(template, frames, after, long)
    extra = not bool(engine.is_stop[end_id])
    end_text = str(engine.tokenizer.id_to_token(end_id))
    if extra:
        notes.append(
            f"answers end with {end_text}, which is not among the base's stop tokens: it was added "
            "to generation_config.json, so that the server stops there"
        )
    notes += _examine_bos(engine, ids)
    if any("strftime_now" in source for source in template.sources.values()):
        notes.append("the template writes today's date: prompts of another day have other tokens")
    return TemplateFacts(frames, end_id, end_text, extra, notes)


def _examine_thinking(template: ChatTemplate, engine: Engine) -> TemplateFacts | None:
    """The facts where every answer has to think; None where such ones are refused as well."""
    opener = _prompt_opener(template)
    tries = [(_reasoned(_SHORT), _reasoned(_LONG))]
    if opener:
        tries.append((_thought_aloud(_SHORT, opener), _thought_aloud(_LONG, opener)))
    for short, long in tries:
        try:
            facts = _examine(template, engine, short, long)
        except ModelError:
            continue
        # The others hold this very thought.
        facts.frames.around = {(b, a) for b, a in facts.frames.around if _THOUGHT not in b}
        facts.notes.append(
            "the template takes only answers that think: give them `reasoning_content`, or begin "
            "their content with the thinking"
        )
        return facts
    return None


def _prompt_opener(template: ChatTemplate) -> re.Match[str] | None:
    try:
        return _OPENER.search(template.render(_SHORT[:1], None, prompt=True))
    except (jinja2.TemplateError, TypeError, ValueError):
        return None


def _opener_in_content(template: ChatTemplate) -> str:
    """The part of an answer's content that the prompt holds already; mostly none."""
    opener = _prompt_opener(template)
    if opener is None:
        return ""
    turns = _thought_aloud(_SHORT, opener)
    prompt, text = opener.string, _try(template, {"messages": turns, "prompt": False})
    if text is None or not text.startswith(prompt):
        return ""
    begin = text.rfind(turns[1]["content"])
    return prompt[begin:] if 0 <= begin < len(prompt) else ""


def _examine_bos(engine: Engine, ids: list[int]) -> list[str]:
    """What to say of the BOS token.

    Raises:
        ModelError: There are two.
    """
    bos = engine.bos_id
    if bos is None:
        return []
    if ids[:2] == [bos, bos]:
        raise _refused("it begins with two BOS tokens")
    if ids[:1] == [bos] or engine.tokenizer.encode("a").ids[:1] != [bos]:
        return []
    return [
        "the template writes no BOS, although the tokenizer puts "
        f"{engine.tokenizer.id_to_token(bos)} before other text: rows have none, as chats that are "
        "served have none; if the base was trained with it, write it at the beginning of "
        "model.chat_template"
    ]


def _end_token(engine: Engine, rest: str) -> tuple[int, str]:
    """The first control token after an answer, and the text up to its end."""
    encoding = engine.encode(rest)
    for id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if engine.is_control[id] or engine.is_stop[id]:
            return id, rest[:end]
    raise _refused(
        f"it ends an answer with {rest!r}, which holds no control token, so a model trained with "
        "it would never stop"
    )


def _examine_more(
    template: ChatTemplate, frames: Frames, after: str, long: list[Message]
) -> list[str]:
    notes = []
    try:
        text = template.render(long, None, prompt=False)
        first = template.render(long[:1], None, prompt=True)
        second = template.render(long[:3], None, prompt=True)
        inner = template.render(long[:2], None, prompt=False)
        if text.startswith(first) and text.startswith(inner) and text.startswith(second):
            before, found, rest = text[len(first) :].partition(_ANSWERS[0])
            if found and after in rest:
                frames.around.add((before, rest[: rest.index(after)] + after))
        else:
            notes.append("the template rewrites history: one row per answer")
    except (jinja2.TemplateError, TypeError, ValueError):
        notes.append("the template takes one question and answer only")
    try:
        if _SYSTEM[0]["content"] not in template.render(_SYSTEM, None, prompt=False):
            notes.append("the template leaves out system turns")
    except (jinja2.TemplateError, TypeError, ValueError):
        notes.append("the template refuses system turns")
    return notes


def add_tools(template: ChatTemplate) -> ChatTemplate | None:
    """The template when it shows tools, else one with a prelude for them, else None."""
    if shows_tools(template):
        return template
    targets: tuple[Literal["system", "user"], ...] = ("system", "user")
    for target in targets:
        source = with_tools(template.sources["default"], target)
        extended = ChatTemplate({"default": source}, template.variables)
        if shows_tools(extended) and all(
            _try(extended, probe) == _try(template, probe)
            for probe in PROBES
            if "tools" not in probe
        ):
            return extended
    return None


def _try(template: ChatTemplate, probe: dict[str, Any]) -> str | None:
    try:
        return template.render(probe["messages"], probe.get("tools"), prompt=probe["prompt"])
    except (jinja2.TemplateError, TypeError, ValueError):
        return None


def shows_tools(template: ChatTemplate) -> bool:
    """Whether tools, calls and results all appear in the rendering."""
    try:
        text = template.render(_CALL, _TOOLS, prompt=False)
    except (jinja2.TemplateError, TypeError, ValueError):
        return False
    return text.count("lamp_state") >= 2 and "nine" in text and "lit" in text


def _refused(why: str) -> ModelError:
    return ModelError(
        f"the chat template cannot be supervised: {why}",
        expected="a template whose answers follow the prompt and end with a control token",
        hint="set model.chat_template to such a template",
    )
