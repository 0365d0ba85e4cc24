"""From a conversation to rendered text and the places where its answers begin.

Where the template rewrites history, a conversation becomes one piece per answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2

from tuneserve.data.codes import RowError
from tuneserve.data.formats import Conversation
from tuneserve.data.template import ChatTemplate, Message, server_form


@dataclass(slots=True)
class Piece:
    """A row before tokenization.

    Attributes:
        text: The rendered text.
        count: It renders the first `count` messages.
        cuts: (characters before an answer, the answer's message number), for answers to supervise.
        messages: All messages in server form.
    """

    text: str
    count: int
    cuts: list[tuple[int, int]]
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def plan(conversation: Conversation, template: ChatTemplate) -> list[Piece]:
    """Render a conversation and find where its answers begin.

    Raises:
        RowError: The template refuses it, leaves a turn out, or its prompts are not beginnings.
    """
    messages, tools = server_form(conversation.messages), conversation.tools

    def render(count: int, *, prompt: bool) -> str:
        try:
            return template.render(messages[:count], tools, prompt=prompt)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            code = "bad_role_order" if isinstance(error, jinja2.TemplateError) else "template_error"
            text = f"the chat template refuses the row: {error}; the roles are {roles}"
            raise RowError(code, text) from error

    answers = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and conversation.trained[number]
    ]
    if not answers:
        raise RowError("no_supervised_token", "every assistant turn has weight 0")
    text = render(len(messages), prompt=False)
    cuts = _cuts_of_one_row(text, len(messages), answers, render)
    if cuts is not None:
        pieces = [Piece(text, len(messages), cuts, messages, tools)]
    else:
        pieces = [_piece_of_turn(number, messages, tools, render) for number in answers]
    for piece in pieces:
        _check_present(piece)
    return pieces


def _cuts_of_one_row(
    text: str, count: int, answers: list[int], render: Callable[..., str]
) -> list[tuple[int, int]] | None:
    """Where the answers begin in the whole conversation's text; None when history is rewritten."""
    cuts = []
    for number in answers:
        prompt = render(number, prompt=True)
        if not text.startswith(prompt):
            return None
        # An answer that looks otherwise once more turns follow was not trained as it is generated.
        if number + 1 < count and not text.startswith(render(number + 1, prompt=False)):
            return None
        cuts.append((len(prompt), number))
    return cuts


def _piece_of_turn(
    number: int,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    render: Callable[..., str],
) -> Piece:
    text, prompt = render(number + 1, prompt=False), render(number, prompt=True)
    if not text.startswith(prompt):
        pairs = zip(text, prompt, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(prompt)))
        raise RowError(
            "prefix_mismatch",
            f"turn {number + 1}: the prompt is not the beginning of the row's text; the first "
            f"difference is at character {at}: prompt {prompt[at : at + 20]!r}, row "
            f"{text[at : at + 20]!r}",
        )
    return Piece(text, number + 1, [(len(prompt), number)], messages, tools)


def _check_present(piece: Piece) -> None:
    """Every turn but earlier answers must be in the text: templates drop what they ignore."""
    squeezed = None
    for number, message in enumerate(piece.messages[: piece.count]):
        content = message["content"]
        if message["role"] == "assistant" or not content or content in piece.text:
            continue
        squeezed = squeezed or squeeze(piece.text)
        if not any(form in piece.text or squeeze(form) in squeezed for form in _forms(content)):
            text = f"the chat template leaves out turn {number + 1} ({message['role']})"
            raise RowError("turn_dropped", text, path=("messages", number))
    for tool in piece.tools or []:
        if tool["function"]["name"] not in piece.text:
            text = f"the chat template does not show the tool {tool['function']['name']}"
            raise RowError("tools_not_rendered", text, path=("tools",))


def _forms(content: str) -> Iterator[str]:
    """How templates write a text: as it is, or as JSON (Llama 3.1 does so with tools' results)."""
    yield content
    for text in (content, content.strip()):
        for ensure_ascii in (False, True):
            yield json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]


def squeeze(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
