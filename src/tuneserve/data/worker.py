"""What happens to a block of rows, in the stage's own process or in a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tuneserve.data.codes import CODES, RowError
from tuneserve.data.conversation import BEGINNING_BYTES, ControlTokens, check, digests
from tuneserve.data.engine import Engine
from tuneserve.data.formats import Conversation, convert, turns_key
from tuneserve.data.pieces import Piece, plan
from tuneserve.data.readers import Block, place
from tuneserve.data.strictjson import locate, parse_bytes
from tuneserve.data.supervise import (
    IGNORED,
    Frames,
    Supervisor,
    TokenRow,
    check_labels,
)
from tuneserve.data.template import ChatTemplate
from tuneserve.errors import DataError

_QUARANTINE_CHARS = 65536
# json.dumps with an option makes an encoder at every call.
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class Settings:
    """All that a worker needs, small enough to send to it once."""

    sources: dict[str, str]
    tool_sources: dict[str, str]
    variables: dict[str, Any]
    vocab_rows: int
    frames: frozenset[tuple[str, str]]
    files: tuple[str, ...]
    max_length: int
    too_long: Literal["drop", "truncate", "error"]
    control_tokens: Literal["reject", "neutralize"]
    system: str | None
    opener: str = ""


@dataclass
class Result:
    """What came out of a block.

    Attributes:
        ids: int32 ids of all rows, one row after another.
        mask: A byte per id: 1 where supervised.
        lengths, supervised: Per row.
        pieces: Per conversation, its number of rows (more than one where the template rewrites
            history).
        lines, digests, groups: Per conversation; 16 and 8 bytes each for the last two.
        beginnings: 8 bytes for each beginning of the conversations, after each other.
        beginning_counts: Per conversation, how many of them it has.
        messages: Per row, the line of `*_messages.jsonl`.
        rejected: Lines of the quarantine.
        warnings: (code, line).
    """

    file: int
    ids: bytes = b""
    mask: bytes = b""
    lengths: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    digests: bytes = b""
    groups: bytes = b""
    beginnings: bytes = b""
    beginning_counts: list[int] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[tuple[str, int]] = field(default_factory=list)
    rows_read: int = 0
    rows_neutralized: int = 0
    tool_rows: int = 0
    read_bytes: int = 0


@dataclass(slots=True)
class RawRow:
    """A row of a block: its place, its text for the quarantine, and what it parsed to."""

    line: int
    column: int
    text: str
    value: Any = None


def rows_of(block: Block) -> Iterator[tuple[RawRow, RowError | None]]:
    """The rows of a block, parsed; blank lines are none."""
    if block.kind == "rows":
        for line, value in block.data:
            if isinstance(value, RowError):
                yield RawRow(line, 1, ""), value
            else:
                yield RawRow(line, 1, "", value), None
        return
    if block.kind == "lines":
        numbered = enumerate(block.data.split(b"\n"), block.line)
        places = ((line, 1, raw) for line, raw in numbered if raw and not raw.isspace())
    else:
        places = iter(block.data)
    for line, column, raw in places:
        try:
            text, value = parse_bytes(raw)
        except RowError as error:
            yield RawRow(line, column, raw.decode("utf-8", "backslashreplace")), error
        else:
            yield RawRow(line, column, text, value), None


class Worker:
    """Parses, checks, renders, tokenizes and proves blocks of rows.

    Args:
        settings: What to do.
        engine: The tokenizer.
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.template = ChatTemplate(settings.sources, settings.variables)
        # A prelude for tools costs time in every rendering: only rows that need it pay.
        self.tool_template = ChatTemplate(settings.tool_sources, settings.variables)
        frames = Frames(set(settings.frames), settings.opener)
        self.supervisor = Supervisor(self.engine, self.template, frames)
        self.control = ControlTokens(self.engine.control_texts, settings.control_tokens)

    def __call__(self, block: Block) -> Result:
        """Take a block through all checks.

        Raises:
            DataError: A row is too long and `data.too_long` is ``error``.
        """
        result = Result(block.file, read_bytes=block.read_bytes)
        planned: list[tuple[RawRow, Conversation, list[Piece]]] = []
        for row, error in rows_of(block):
            result.rows_read += 1
            if error is None:
                try:
                    conversation = self._conversation(row.value, block.format)
                    template = self.tool_template if conversation.has_tools else self.template
                    planned.append((row, conversation, plan(conversation, template)))
                    continue
                except RowError as found:
                    error = found
            self._reject(result, row, error)
        made = self.supervisor.tokenize([piece for _, _, group in planned for piece in group])
        sink = _Sink(result)
        at = 0
        for row, conversation, group in planned:
            self._keep(sink, row, conversation, group, made[at : at + len(group)])
            at += len(group)
        sink.close(self.settings.vocab_rows)
        return result

    def _conversation(self, value: Any, format: str) -> Conversation:
        conversation = convert(value, format)
        system = self.settings.system
        if system and conversation.messages and conversation.messages[0]["role"] != "system":
            conversation.messages.insert(0, {"role": "system", "content": system})
            conversation.trained.insert(0, True)
        check(conversation)
        if self.control.clean(conversation):
            conversation.warnings.append("neutralized")
        return conversation

    def _keep(
        self,
        sink: _Sink,
        row: RawRow,
        conversation: Conversation,
        group: list[Piece],
        made: list[TokenRow | RowError],
    ) -> None:
        result = sink.result
        kept: list[tuple[Piece, TokenRow, bool]] = []
        first_error: RowError | None = None
        for piece, token_row in zip(group, made, strict=True):
            try:
                if isinstance(token_row, RowError):
                    raise token_row
                kept.append((piece, *self._fit(token_row, row, result.file)))
            except RowError as error:
                # Of several answers of one conversation, those that fit are kept and the others
                # counted; a fault rejects all.
                if CODES[error.code].level != "policy":
                    self._reject(result, row, error)
                    return
                first_error = first_error or error
        if not kept:
            assert first_error is not None
            self._reject(result, row, first_error)
            return
        result.warnings += [("answer_left_out", row.line)] * (len(group) - len(kept))
        for code in conversation.warnings:
            result.warnings.append((code, row.line))
        result.rows_neutralized += "neutralized" in conversation.warnings
        result.tool_rows += conversation.has_tools
        whole, same_prompt, beginnings = digests(conversation)
        sink.digests.append(whole)
        sink.groups.append(same_prompt)
        sink.beginnings.append(beginnings)
        result.beginning_counts.append(len(beginnings) // BEGINNING_BYTES)
        result.lines.append(row.line)
        result.pieces.append(len(kept))
        source = f"{self.settings.files[result.file]}:{row.line}"
        for piece, token_row, cut in kept:
            sink.add(token_row)
            line: dict[str, Any] = {
                "source": source,
                "messages": conversation.messages[: piece.count],
                "tools": conversation.tools,
            }
            if cut:
                line["truncated"] = True
                result.warnings.append(("truncated", row.line))
            result.messages.append(_encode(line))

    def _fit(self, row: TokenRow, raw: RawRow, file: int) -> tuple[TokenRow, bool]:
        """Apply the length policy, then count again what is supervised."""
        limit, cut = self.settings.max_length, False
        if len(row.ids) > limit:
            text = f"{len(row.ids)} tokens, more than data.max_length {limit}"
            if self.settings.too_long == "error":
                raise DataError(
                    f"{self.settings.files[file]}:{raw.line}: too_long: {text}",
                    expected=f"at most {self.settings.max_length} tokens",
                    hint="raise data.max_length, or set data.too_long to drop or truncate",
                )
            if self.settings.too_long == "drop":
                raise RowError("too_long", text)
            row, cut = TokenRow(row.ids[:limit], row.mask[:limit]), True
        if not row.supervised:
            where = f" after truncation to data.max_length {limit}" if cut else ""
            raise RowError("no_supervised_token", f"no supervised token{where}")
        return row, cut

    def _reject(self, result: Result, row: RawRow, error: RowError) -> None:
        line, column = row.line, row.column
        text = row.text
        if text:
            offset = error.offset
            if offset is None:
                offset = locate(text, row_path(error.path, row.value)) if error.path else 0
            line, column = place(text, offset, line, column)
        elif row.value is not None:
            text = json.dumps(row.value, ensure_ascii=False, default=str)
        result.rejected.append(
            {
                "source": f"{self.settings.files[result.file]}:{line}:{column}",
                "code": error.code,
                "message": error.message,
                "row": text[:_QUARANTINE_CHARS],
            }
        )


class _Sink:
    """Collects the arrays of a result."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.ids: list[Any] = []
        self.masks: list[Any] = []
        self.digests: list[bytes] = []
        self.groups: list[bytes] = []
        self.beginnings: list[bytes] = []

    def add(self, row: TokenRow) -> None:
        self.ids.append(row.ids)
        self.masks.append(row.mask)
        self.result.lengths.append(len(row.ids))
        self.result.supervised.append(row.supervised)

    def close(self, vocab_rows: int) -> None:
        if self.ids:
            ids, mask = np.concatenate(self.ids), np.concatenate(self.masks)
            check_labels(np.where(mask, ids, np.int32(IGNORED)), vocab_rows)
            self.result.ids, self.result.mask = ids.tobytes(), mask.tobytes()
        self.result.digests = b"".join(self.digests)
        self.result.groups = b"".join(self.groups)
        self.result.beginnings = b"".join(self.beginnings)


def row_path(path: tuple[str | int, ...], row: dict[str, Any]) -> tuple[str | int, ...]:
    """A path in the conversation as a path in the row that it was made from."""
    if not path or path[0] != "messages":
        return path
    key = turns_key(row)
    if key == "messages":
        return path
    if key:
        names = {"role": "from", "content": "value"}
        return (
            key,
            *(names.get(part, part) if isinstance(part, str) else part for part in path[1:]),
        )
    for first, last in (("instruction", "output"), ("prompt", "completion")):
        if first in row and last in row:
            is_answer = len(path) > 1 and path[1] != 0
            return (last,) if is_answer else (first,)
    return ()
