"""Checks of a conversation that need no tokenizer, and what makes two of them the same."""

from __future__ import annotations

import json
import re
import unicodedata
from hashlib import blake2b
from typing import Any, Literal

from tuneserve.data.codes import RowError
from tuneserve.data.formats import Conversation

_PLACEHOLDER = re.compile(r"\{\{\s*[\w.\- ]+\s*\}\}")
# What broken exports write for "no value": str(None), JavaScript's null, pandas' NaN.
_NULLS = {"None", "null", "NULL", "Null", "nan", "NaN"}
# Characters without width: separators, joiners, directional marks, the BOM, the soft hyphen,
# annotations, tags.
_NO_WIDTH = (
    "\u00ad\u034f\u061c\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e0fff"
)
# Beside these nobody sees white space, control characters and letters that are blank.
_UNSEEN = _NO_WIDTH + ("\\s\x00-\x08\x0b-\x1f\x7f-\x9f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_WITHOUT_WIDTH = re.compile(f"[{_NO_WIDTH}]+")
_VISIBLE = re.compile(f"[^{_UNSEEN}]")
BEGINNING_BYTES = 8
_AFTER: dict[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool",),
    "tool": ("tool", "assistant"),
}


def is_blank(text: str | None) -> bool:
    """Whether nothing of a text is visible: empty, white space, or characters without width."""
    return not text or not _VISIBLE.search(text)


def check(conversation: Conversation) -> None:
    """Check roles, order, emptiness and literals; warnings are added to the conversation.

    Raises:
        RowError: The first thing that is wrong, with its path in the row.
    """
    _check_order(conversation.messages)
    for number, message in enumerate(conversation.messages):
        role, content = message["role"], message["content"]
        path = ("messages", number, "content")
        if "tool_calls" in message:
            if not conversation.trained[number]:
                continue
        elif content is None or (is_blank(content) and role != "tool"):
            what = "null" if content is None else "empty"
            if content and not content.isspace():
                what = "only white space and characters that nobody sees"
            raise RowError("empty_content", f"turn {number + 1} ({role}) is {what}", path=path)
        elif role == "assistant" and content.strip() in _NULLS:
            message_text = f"turn {number + 1} (assistant) is the word {content.strip()}"
            raise RowError("null_literal", message_text, path=path)
        if content and "{{" in content and _PLACEHOLDER.search(content):
            conversation.warnings.append("placeholder")


def _check_order(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        shown = f"the roles are {_list(roles)}" if roles else "there is no turn at all"
        raise RowError("no_assistant", f"no assistant turn; {shown}")
    before = ""
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in _AFTER[before]:
            allowed = " or ".join(_AFTER[before])
            after = {"": "at the beginning", "call": "after a tool call"}.get(
                before, f"after {before}"
            )
            text = f"turn {number + 1} is {role} {after}, where {allowed} belongs"
            raise RowError(
                "bad_role_order",
                f"{text}; the roles are {_list(roles)}",
                path=("messages", number, "role"),
            )
        before = "call" if "tool_calls" in message else role
    if roles[-1] != "assistant":
        text = f"the last turn is {roles[-1]}; the roles are {_list(roles)}"
        raise RowError("bad_role_order", text, path=("messages", len(roles) - 1, "role"))


def _list(roles: list[str]) -> str:
    shown = ", ".join(roles[:12])
    return shown if len(roles) <= 12 else f"{shown}, ... ({len(roles)} turns)"


class ControlTokens:
    """Finds control tokens inside text, where they would act as if the template wrote them.

    Args:
        tokens: Contents of the special tokens.
        policy: ``reject`` or ``neutralize``.
    """

    def __init__(self, tokens: list[str], policy: Literal["reject", "neutralize"]) -> None:
        # Longest first, so that one token that begins like another is found whole.
        ordered = sorted(filter(None, set(tokens)), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        # Nearly no text holds one, and looking for a character is many times faster.
        self._beginnings = {token[0] for token in ordered}
        self._neutralize = policy == "neutralize"

    def clean(self, conversation: Conversation) -> bool:
        """Reject or defuse; true when a text was changed.

        Raises:
            RowError: A text holds a control token and the policy is to reject.
        """
        if self._pattern is None:
            return False
        changed = False
        for number, message in enumerate(conversation.messages):
            for key in ("content", "reasoning", "name", "tool_call_id"):
                text = message.get(key)
                if text and (match := self._search(text)):
                    self._refuse(match, f"turn {number + 1} ({message['role']})", number)
                    message[key] = self._pattern.sub(_defused, text)
                    changed = True
            for call in message.get("tool_calls", []):
                changed |= self._clean_call(call, ("id",), number)
                changed |= self._clean_call(call["function"], ("name", "arguments"), number)
        if conversation.tools:
            # A control token in a tool's description is as bad as one in a turn.
            text = json.dumps(conversation.tools, ensure_ascii=False)
            if match := self._search(text):
                self._refuse(match, "tools", None)
                conversation.tools = json.loads(self._pattern.sub(_defused, text))
                changed = True
        return changed

    def _search(self, text: str) -> re.Match[str] | None:
        assert self._pattern is not None
        for beginning in self._beginnings:
            if beginning in text:
                return self._pattern.search(text)
        return None

    def _clean_call(self, part: dict[str, Any], keys: tuple[str, ...], number: int) -> bool:
        assert self._pattern is not None
        changed = False
        for key in keys:
            text = part.get(key)
            if text and (match := self._search(text)):
                self._refuse(match, f"a tool call of turn {number + 1}", number)
                part[key] = self._pattern.sub(_defused, text)
                changed = True
        return changed

    def _refuse(self, match: re.Match[str], where: str, number: int | None) -> None:
        if self._neutralize:
            return
        path: tuple[str | int, ...] = (
            ("tools",) if number is None else ("messages", number, "content")
        )
        raise RowError(
            "control_token", f"{where} contains the control token {match.group()}", path=path
        )


def _defused(match: re.Match[str]) -> str:
    # A visible space: the text stays readable, and no tokenizer takes it for the token.
    text = match.group()
    return f"{text[0]} {text[1:]}" if len(text) > 1 else f"({text})"


def _plain(text: str) -> bytes:
    """The text without outer white space, line ends of Windows, composition, what has no width."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", _WITHOUT_WIDTH.sub("", text))
    return text.strip().replace("\r\n", "\n").encode()


def normalized(message: dict[str, Any]) -> bytes:
    """What a message says, without what makes no difference to it."""
    text = message["role"].encode() + b"\0" + _plain(message["content"] or "")
    if "reasoning" in message:
        text += b"\0" + _plain(message["reasoning"])
    for call in message.get("tool_calls", []):
        function = call["function"]
        arguments = json.dumps(json.loads(function["arguments"]), sort_keys=True)
        text += f"\0{function['name']}\0{arguments}".encode()
    return text


def digests(conversation: Conversation) -> tuple[bytes, bytes, bytes]:
    """What tells of equal conversations, and of those that begin alike.

    Returns:
        Sixteen bytes for the conversation (equal: a duplicate), eight for its prompt, which is all
        but the last answer, and `BEGINNING_BYTES` for it up to each of its other answers: the
        first ones of a conversation's sixteen that ends there.
    """
    tools = conversation.tools
    listed = json.dumps(tools, sort_keys=True).encode() if tools else b""
    whole = blake2b(digest_size=16)
    beginnings = []
    for message in conversation.messages[:-1]:
        whole.update(normalized(message) + b"\1")
        if message["role"] == "assistant":
            beginnings.append(_digest(whole, listed)[:BEGINNING_BYTES])
    prompt = whole.digest()[:8]
    whole.update(normalized(conversation.messages[-1]) + b"\1")
    return _digest(whole, listed), prompt, b"".join(beginnings)


def _digest(messages: blake2b, listed: bytes) -> bytes:
    if not listed:
        return messages.digest()
    with_tools = messages.copy()
    with_tools.update(listed)
    return with_tools.digest()
