"""What the data are like, found with the gate's own reading, checks and template."""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tuneserve.checkpoint.basecheck import has_chat_template
from tuneserve.config import RunFile
from tuneserve.data.codes import CODES, RowError
from tuneserve.data.conversation import check, digests
from tuneserve.data.formats import Conversation, convert
from tuneserve.data.sources import Sources, open_sources
from tuneserve.data.worker import rows_of
from tuneserve.errors import DataError
from tuneserve.plan.rows import DataShape
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

# More rows say no more about lengths; `validate` reads all of them.
_ROWS_READ = 20_000
# Bytes of UTF-8 a token, low for most tokenizers, so that an estimate is rather too long. English
# has about four; Chinese has three bytes a letter, and small vocabularies split letters.
_ASCII_BYTES, _OTHER_BYTES = 3.5, 1.5
# Template tokens around a turn.
_TURN_TOKENS = 6


@dataclass
class DataLook:
    """What was found in the rows that were read.

    Attributes:
        sources: The files with their formats.
        lengths: Tokens of each row that was kept.
        counted: Whether a tokenizer counted them; otherwise they are estimates.
        reasons: Rejected rows by code.
        samples: First finding of each code, for the message.
        warnings: Rows that are kept, but want a look, by code.
        distinct: Different conversations.
        tool_calls: Whether tools are listed or called anywhere.
        share: Part of the files' bytes that was read.
    """

    sources: Sources
    lengths: list[int] = field(default_factory=list)
    counted: bool = False
    reasons: Counter[str] = field(default_factory=Counter)
    samples: dict[str, str] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)
    distinct: int = 0
    tool_calls: bool = False
    share: float = 1.0
    rows_read: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def rows(self) -> int:
        """Different conversations in all of the data, extrapolated where only a part was read."""
        return round(self.distinct / self.share)

    @property
    def rejected_share(self) -> float:
        """Rows with a fault, of those read; what a policy leaves out is none."""
        bad = sum(n for code, n in self.reasons.items() if CODES[code].level == "reject")
        return bad / max(self.rows_read, 1)

    def within(self, max_length: int) -> list[int]:
        """Lengths of the rows that are not longer."""
        return [length for length in self.lengths if length <= max_length]

    def shape(self, max_length: int) -> DataShape | None:
        """What the plan is told; None where lengths are guesses, and it takes `max_length`."""
        kept = sorted(self.within(max_length), reverse=True)
        return DataShape(tuple(kept), self.tool_calls) if self.counted and kept else None


def look_at_data(run: RunFile, base: Path | None) -> DataLook:
    """Read the first 20,000 rows and count their tokens.

    Args:
        run: A run file with `data` and `model` set.
        base: Folder of the base; without one, or without a tokenizer in it, lengths are estimates.

    Raises:
        DataError: The files cannot be used, or no row of them can.
        ModelError: The base's tokenizer or template cannot be used.
    """
    if base is not None and _has_tokenizer(base, run):
        found = _counted(run, base)
    else:
        found = _estimated(run)
    if not found.lengths:
        first = "\n    ".join(list(found.samples.values())[:5])
        raise DataError(
            f"none of {found.rows_read} rows can be used; the first findings:\n    {first}",
            expected="conversations; docs/data.md shows the formats",
            hint="mend the rows named",
            details={"reasons": dict(found.reasons)},
        )
    return found


def _has_tokenizer(base: Path, run: RunFile) -> bool:
    tokenizer = any((base / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return tokenizer and bool(run.model.chat_template or has_chat_template(base))


def _counted(run: RunFile, base: Path) -> DataLook:
    from tuneserve.data.prepare import discard_tokenizer, finish_tokenizer, start_tokenizer
    from tuneserve.data.stage import settings_of
    from tuneserve.data.worker import Worker

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    # Without weights the embedding's rows are not known exactly: `validate` checks ids, not we.
    text = config.get("text_config") or config
    rows = None if any(base.glob("*.safetensors")) else int(text["vocab_size"])
    with tempfile.TemporaryDirectory(prefix="tuneserve-init-") as scratch:
        out, work = Path(scratch, "out"), Path(scratch, "work")
        out.mkdir()
        work.mkdir()
        context = StageContext(run, base, {}, out, work)
        child = start_tokenizer(context)
        try:
            found = DataLook(open_sources(run.data), counted=True)
        except BaseException:
            discard_tokenizer(context, child)
            raise
        prepared = finish_tokenizer(context, child, vocab_rows=rows)
        found.notes += prepared.facts.notes
        settings = settings_of(context, found.sources, prepared)
        worker = Worker(settings, prepared.engine)
        seen: set[bytes] = set()
        read: Counter[int] = Counter()
        for block in found.sources.blocks():
            result = worker(block)
            read[block.file] = result.read_bytes
            found.rows_read += result.rows_read
            found.lengths += result.lengths
            found.tool_calls |= result.tool_rows > 0
            found.warnings.update(code for code, _ in result.warnings)
            seen.update(result.digests[at : at + 16] for at in range(0, len(result.digests), 16))
            for row in result.rejected:
                _note_rejected(found, row["code"], f"{row['source']}: {row['message']}")
            if found.rows_read >= _ROWS_READ:
                break
    found.distinct = len(seen)
    found.share = _share(found, read)
    return found


def _estimated(run: RunFile) -> DataLook:
    found = DataLook(open_sources(run.data))
    seen: set[bytes] = set()
    read: Counter[int] = Counter()
    for block in found.sources.blocks():
        read[block.file] = block.read_bytes
        for row, problem in rows_of(block):
            found.rows_read += 1
            try:
                if problem is not None:
                    raise problem
                conversation = convert(row.value, block.format)
                check(conversation)
            except RowError as error:
                place = f"{found.sources.names[block.file]}:{row.line}"
                _note_rejected(found, error.code, f"{place}: {error}")
                continue
            found.lengths.append(_guess_tokens(conversation))
            found.tool_calls |= conversation.has_tools
            found.warnings.update(conversation.warnings)
            seen.add(digests(conversation)[0])
        if found.rows_read >= _ROWS_READ:
            break
    found.distinct = len(seen)
    found.share = _share(found, read)
    return found


def _note_rejected(found: DataLook, code: str, text: str) -> None:
    found.reasons[code] += 1
    found.samples.setdefault(code, f"{code}: {text}")


def _share(found: DataLook, read: Counter[int]) -> float:
    if found.rows_read < _ROWS_READ:
        return 1.0
    return min(1.0, max(sum(read.values()) / max(found.sources.size_bytes, 1), 1e-6))


def _guess_tokens(conversation: Conversation) -> int:
    text = json.dumps(conversation.tools, ensure_ascii=False) if conversation.tools else ""
    for message in conversation.messages:
        text += message["content"] or ""
        for call in message.get("tool_calls", []):
            text += call["function"]["name"] + call["function"]["arguments"]
    other = len(text.encode()) - (plain := sum(char.isascii() for char in text))
    turns = _TURN_TOKENS * (len(conversation.messages) + 1)
    return round(plain / _ASCII_BYTES + other / _OTHER_BYTES) + turns
