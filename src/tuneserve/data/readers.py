"""Files to blocks of rows, in bounded memory: the parent cuts, the workers parse.

JSON Lines is cut at line feeds only (RFC 8259 allows U+2028 inside strings, and `str.splitlines`
would cut there). An array is cut at its elements. CSV (RFC 4180) and Parquet give rows that are
parsed already.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

from tuneserve.data.codes import SAVE_AS_UTF8, RowError
from tuneserve.data.files import READ_ERRORS, kind_of, open_raw, unpack
from tuneserve.data.foreign import refuse_foreign
from tuneserve.data.strictjson import parse_text
from tuneserve.errors import DataError

BLOCK_BYTES = 256 * 1024
_BLOCK_ROWS = 256
# A row of more is not a conversation; without a limit a file without line feeds would fill the
# memory.
MAX_ROW_BYTES = 64 * 2**20
_BOM = codecs.BOM_UTF8
# Cells of a CSV file that hold JSON when they begin like it.
_JSON_CELLS = {"messages", "conversations", "conversation", "tools"}


@dataclass
class Block:
    """Some rows of one file, on their way to a worker.

    Attributes:
        file: Index of the file.
        kind: ``lines``: `data` is bytes whose first line has number `line`; ``elements``: `data` is
            a list of (line, column, bytes); ``rows``: a list of (line, parsed row or its error).
        line: Number of the first line.
        data: See `kind`.
        read_bytes: How far the stored file has been read.
    """

    file: int
    kind: Literal["lines", "elements", "rows"]
    line: int
    data: Any
    read_bytes: int = 0
    format: str = ""


@dataclass
class _Position:
    """Line and column (both from 1) of a place in a text that is consumed piece by piece."""

    line: int = 1
    column: int = 1

    def advance(self, text: str) -> None:
        breaks = text.count("\n")
        if breaks:
            self.line += breaks
            self.column = len(text) - text.rfind("\n")
        else:
            self.column += len(text)


def place(text: str, offset: int, line: int, column: int) -> tuple[int, int]:
    """Line and column of `offset` in a text that begins at `line` and `column`."""
    position = _Position(line, column)
    position.advance(text[:offset])
    return position.line, position.column


def read_blocks(path: str, file: int) -> Iterator[Block]:
    """All rows of a file, in order.

    Raises:
        DataError: The file as a whole cannot be read: no data file, UTF-16, a damaged archive,
            a broken array, Parquet or CSV, or nothing in it.
    """
    with open_raw(path) as raw:
        try:
            stream = unpack(path, raw)
            head = stream.read(65536)
            refuse_foreign(path, head)
            _refuse_utf16(path, head)
            if head[:4] == b"PAR1" or kind_of(path) == ".parquet":
                blocks = _parquet(path, file)
            elif kind_of(path) in (".csv", ".tsv"):
                blocks = _csv(path, file, head, stream)
            elif head.removeprefix(_BOM).lstrip()[:1] == b"[":
                blocks = _array(path, file, head, stream)
            else:
                blocks = _lines(path, file, head, stream)
            empty = True
            for block in blocks:
                empty = False
                block.read_bytes = raw.tell()
                yield block
        except READ_ERRORS as error:
            raise DataError(
                f"{path}: cannot be read to its end ({error})",
                expected="a whole file",
                hint="copy or pack it again",
            ) from error
    if empty:
        raise DataError(
            f"{path}: the file is empty",
            expected="conversations",
            hint="fill it, or leave it out",
        )


def _refuse_utf16(path: str, head: bytes) -> None:
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in head[:2]:
        raise DataError(
            f"{path}:1:1: bad_encoding: the file is UTF-16",
            expected="UTF-8",
            hint="save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > NEW",
        )


def _lines(path: str, file: int, head: bytes, stream: IO[bytes]) -> Iterator[Block]:
    carry, line = head.removeprefix(_BOM), 1
    while True:
        data = stream.read(BLOCK_BYTES)
        carry += data
        # The file's last line may lack its line feed; every other piece is cut behind one.
        cut = carry.rfind(b"\n") + 1 if data else len(carry)
        if data and not cut:
            if len(carry) > MAX_ROW_BYTES:
                raise DataError(
                    f"{path}:{line}:1: a line of more than {MAX_ROW_BYTES // 2**20} MiB",
                    expected="one JSON object a line",
                    hint="is the file JSON Lines at all?",
                )
            continue
        piece, carry = carry[:cut], carry[cut:]
        if piece.strip():
            yield Block(file, "lines", line, piece)
        line += piece.count(b"\n")
        if not data:
            return


_SEPARATOR = re.compile(r"[ \t\r\n]*")


def _array(path: str, file: int, head: bytes, stream: IO[bytes]) -> Iterator[Block]:
    # Only the ends of elements matter here: the worker parses strictly. Numbers stay text, so that
    # a huge one is the row's error and not the file's.
    decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
    source = _Decoded(path, head.removeprefix(_BOM), stream)
    position = _Position()
    at = source.skip_space(position, 0) + 1
    batch: list[tuple[int, int, bytes]] = []
    first = True
    position.advance("[")
    while True:
        at = source.skip_space(position, at)
        char = source.text[at : at + 1]
        if char == "]":
            break
        if not first:
            if char != ",":
                raise _broken(path, position, "a comma or ] is missing", char)
            position.advance(",")
            at = source.skip_space(position, at + 1)
        first = False
        end = _element_end(source, decoder, at, position)
        text = source.text[at:end]
        batch.append((position.line, position.column, text.encode("utf-8", "surrogatepass")))
        position.advance(text)
        at = end
        if len(batch) >= _BLOCK_ROWS:
            yield Block(file, "elements", batch[0][0], batch)
            batch = []
            at = source.forget(at)
    position.advance("]")
    at = source.skip_space(position, at + 1)
    if at < len(source.text):
        raise _broken(path, position, "text after the array", source.text[at : at + 10])
    if batch:
        yield Block(file, "elements", batch[0][0], batch)


def _element_end(source: _Decoded, decoder: json.JSONDecoder, at: int, position: _Position) -> int:
    while True:
        try:
            _, end = decoder.raw_decode(source.text, at)
        except json.JSONDecodeError as error:
            if len(source.text) - at < MAX_ROW_BYTES and source.more(len(source.text) - at):
                continue
            line, column = place(source.text[at:], error.pos - at, position.line, position.column)
            raise _broken(source.path, _Position(line, column), error.msg, "") from error
        except RecursionError as error:
            raise _broken(source.path, position, "nested too deeply", "") from error
        # A number may go on in the next piece; objects and strings end with themselves.
        if end < len(source.text) or not source.more(1):
            return end


def _broken(path: str, position: _Position, what: str, found: str) -> DataError:
    return DataError(
        f"{path}:{position.line}:{position.column}: bad_json: the array is broken here: {what}"
        + (f", found {found!r}" if found else ""),
        expected="a whole JSON array of objects, or one object a line",
        hint="mend the file; what follows the place cannot be read reliably",
    )


class _Decoded:
    """A growing window of a file's text."""

    def __init__(self, path: str, head: bytes, stream: IO[bytes]) -> None:
        self.path, self.stream, self.text = path, stream, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._breaks = 0
        self._feed(head)

    def _feed(self, data: bytes) -> None:
        try:
            self.text += self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            lines = self._breaks + error.object[: error.start].count(b"\n") + 1
            column = error.start - error.object.rfind(b"\n", 0, error.start)
            raise DataError(
                f"{self.path}:{lines}:{column}: bad_encoding: byte "
                f"0x{error.object[error.start]:02X} is not UTF-8",
                expected="UTF-8",
                hint=SAVE_AS_UTF8,
            ) from error
        self._breaks += data.count(b"\n")

    def more(self, at_least: int) -> bool:
        """Read on; False at the end of the file."""
        data = self.stream.read(max(BLOCK_BYTES, at_least))
        self._feed(data)
        return bool(data)

    def skip_space(self, position: _Position, at: int) -> int:
        """The next place that is not white space, reading on where the window ends."""
        while True:
            match = _SEPARATOR.match(self.text, at)
            assert match is not None
            position.advance(match.group())
            at = match.end()
            if at < len(self.text):
                return at
            if not self.more(1):
                return at

    def forget(self, at: int) -> int:
        """Drop the text before `at`."""
        self.text = self.text[at:]
        return 0


def _csv(path: str, file: int, head: bytes, stream: IO[bytes]) -> Iterator[Block]:
    csv.field_size_limit(MAX_ROW_BYTES)
    joined = io.BufferedReader(_Joined(head.removeprefix(_BOM), stream))
    text = io.TextIOWrapper(joined, encoding="utf-8", newline="")
    delimiter = "\t" if kind_of(path) == ".tsv" else ","
    reader = csv.reader(text, strict=True, delimiter=delimiter)
    line = 1
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) != len(header) or not all(header):
            raise _bad_header(path, header)
        batch: list[tuple[int, dict[str, Any] | RowError]] = []
        line = reader.line_num + 1
        for cells in reader:
            if cells:
                batch.append((line, _csv_row(header, cells)))
            line = reader.line_num + 1
            if len(batch) >= _BLOCK_ROWS:
                yield Block(file, "rows", batch[0][0], batch)
                batch = []
    except csv.Error as error:
        raise DataError(
            f"{path}:{line}:1: bad_csv: {error}",
            expected="CSV as RFC 4180 has it",
            hint="quote cells that hold commas, quotes or line feeds",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{line}:1: bad_encoding: byte 0x{error.object[error.start]:02X} in or after "
            "this record is not UTF-8",
            expected="UTF-8",
            hint=SAVE_AS_UTF8,
        ) from error
    if batch:
        yield Block(file, "rows", batch[0][0], batch)


def _bad_header(path: str, names: list[str]) -> DataError:
    return DataError(
        f"{path}:1:1: the header has an empty or repeated name: {names}",
        expected="a name for each column",
        hint="see docs/data.md for the columns",
    )


def _csv_row(header: list[str], cells: list[str]) -> dict[str, Any] | RowError:
    if len(cells) != len(header):
        message = f"{len(cells)} cells, but the header has {len(header)}"
        return RowError("bad_csv", message, offset=0)
    row: dict[str, Any] = dict(zip(header, cells, strict=True))
    # Alpaca's history; elsewhere a column of that name is somebody's own.
    encoded = _JSON_CELLS | {"history"} if "instruction" in row else _JSON_CELLS
    for name in encoded & row.keys():
        if row[name].lstrip()[:1] in ("[", "{"):
            try:
                row[name] = parse_text(row[name])
            except RowError as error:
                return RowError(error.code, f"column {name}: {error.message}", offset=0)
        elif not row[name].strip():
            row[name] = None
    return row


class _Joined(io.RawIOBase):
    """Bytes that were read already, then the rest of the stream."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] or self._stream.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _parquet(path: str, file: int) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tuneserve.data.arrowrows import rows_of_batch, shown_columns

    line = 1
    try:
        with open_raw(path) as stream:
            table = pq.ParquetFile(stream)
            names = table.schema_arrow.names
            if len(set(names)) != len(names):
                raise _bad_header(path, names)
            shown = shown_columns(table.schema_arrow)
            for batch in table.iter_batches(batch_size=_BLOCK_ROWS):
                rows = rows_of_batch(batch, shown)
                yield Block(file, "rows", line, [(line + i, row) for i, row in enumerate(rows)])
                line += len(rows)
    except pa.ArrowException as error:
        raise DataError(
            f"{path}:{line}:1: not a readable Parquet file ({error})",
            expected="a whole Parquet file",
            hint="copy or write it again",
        ) from error
