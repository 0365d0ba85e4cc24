"""JSON as RFC 8259 has it, with the place of every fault; nothing is coerced or resolved silently.

Python's reader keeps the last of repeated keys, accepts NaN, and turns a lone surrogate escape into
a string that no tokenizer takes. Here each of these is an error with a code and an offset.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from tuneserve.data.codes import RowError

MAX_DEPTH = 100
_INT64 = 2**63
# A double holds integers of up to 19 digits less exactly than int64; more digits cannot be int64 at
# all.
_MAX_INT_CHARS = 20
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Escapes are consumed in order, pairs whole: what group 1 matches is half of one.
_LONE_SURROGATE = re.compile(
    r"\\[^u]"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


class _Found(Exception):
    """Raised inside hooks, where the offset is not known."""

    def __init__(self, code: str, message: str, needle: str) -> None:
        super().__init__(message)
        self.code, self.message, self.needle = code, message, needle


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Found("duplicate_key", f"the key {key!r} occurs twice", json.dumps(key))
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > _MAX_INT_CHARS or not -_INT64 <= (value := int(text)) < _INT64:
        raise _Found("huge_integer", f"an integer of {len(text.lstrip('-'))} digits", text)
    return value


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _Found("not_finite", f"the number {text[:40]} is too large", text)
    return value


def _constant(text: str) -> NoReturn:
    raise _Found("not_finite", f"{text} is not a JSON number", text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_int=_integer, parse_float=_float, parse_constant=_constant
)


def parse_bytes(raw: bytes) -> tuple[str, dict[str, Any]]:
    """Decode and parse one row.

    Returns:
        The row's text and the object in it.

    Raises:
        RowError: With a code and an offset in characters.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = len(raw[: error.start].decode("utf-8"))
        byte = raw[error.start]
        message = f"byte 0x{byte:02X} is not UTF-8 ({error.reason})"
        raise RowError("bad_encoding", message, offset=offset) from error
    value = parse_text(text)
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        found = kind.get(type(value), "a number")
        raise RowError("not_an_object", f"the row is {found}, not an object", offset=0)
    return text, value


def parse_text(text: str) -> Any:
    """Parse one JSON value that fills `text`.

    Raises:
        RowError: With a code and an offset in characters.
    """
    begin = _skip_space(text, 0)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise RowError("bad_json", f"not JSON: {_lower(error.msg)}", offset=error.pos) from error
    except RecursionError as error:
        raise RowError("too_deep", _too_deep(), offset=_deep_offset(text)) from error
    except _Found as error:
        offset = _offset_of(text, error)
        raise RowError(error.code, error.message, offset=offset) from error
    rest = _skip_space(text, end)
    if rest < len(text):
        if text[rest] in "{[":
            raise RowError("two_objects", "a second JSON value on the line", offset=rest)
        raise RowError("bad_json", f"{text[rest : rest + 20]!r} after the value", offset=rest)
    if text.count("{") + text.count("[") > MAX_DEPTH and (deep := _deep_offset(text)) >= 0:
        raise RowError("too_deep", _too_deep(), offset=deep)
    if "\\u" in text and _SURROGATE.search(text) and (match := _lone_surrogate(text)):
        message = f"{match.group()} is half of a surrogate pair"
        raise RowError("lone_surrogate", message, offset=match.start())
    return value


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _too_deep() -> str:
    return f"nested deeper than {MAX_DEPTH} levels"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _lone_surrogate(text: str) -> re.Match[str] | None:
    """The first lone surrogate escape whose backslash is not itself escaped."""
    return next((match for match in _LONE_SURROGATE.finditer(text) if match[1]), None)


_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _deep_offset(text: str) -> int:
    """Offset of the first bracket beyond `MAX_DEPTH`; -1 when there is none."""
    depth = 0
    for match in _STRUCTURE.finditer(text):
        char = match.group()[0]
        if char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return match.start()
        elif char in "]}":
            depth -= 1
    return -1


def _offset_of(text: str, error: _Found) -> int:
    """Offset of what a hook complained about: for keys, of the repetition."""
    if error.code == "duplicate_key":
        hits = [m.start() for m in re.finditer(re.escape(error.needle) + r"\s*:", text)]
        return hits[1] if len(hits) > 1 else 0
    pattern = re.compile(r'"(?:[^"\\]|\\.)*"|' + re.escape(error.needle[:200]), re.DOTALL)
    for match in pattern.finditer(text):
        if not match.group().startswith('"'):
            return match.start()
    return 0


def locate(text: str, path: tuple[str | int, ...]) -> int:
    """Offset in `text` of the value at `path`, or of the last part of the path that exists.

    `text` must be JSON that parses.
    """
    plain = json.JSONDecoder()
    at = _skip_space(text, 0)
    for part in path:
        opening = text[at]
        if opening not in "{[":
            return at
        here = at
        at = _skip_space(text, at + 1)
        index = 0
        while at < len(text) and text[at] not in "}]":
            key: str | int = index
            if opening == "{":
                key, at = scanstring(text, at + 1)
                at = _skip_space(text, _skip_space(text, at) + 1)
            if key == part:
                break
            _, at = plain.raw_decode(text, at)
            at = _skip_space(text, at)
            if text[at] == ",":
                at = _skip_space(text, at + 1)
            index += 1
        else:
            return here
    return at
