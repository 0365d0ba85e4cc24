"""The artifact's row files: Parquet with ids and labels, and beside them the messages."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tuneserve.data.spill import Spill

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("source", pa.string()),
    ]
)
_CHUNK_ROWS = 4096
SIDES = ("train", "eval")


def write_rows(
    spill: Spill,
    side_of_row: npt.NDArray[np.int8],
    files: list[str],
    out: Path,
    quarantine: IO[str],
    duplicate_of: npt.NDArray[np.int64],
) -> None:
    """Write both sides.

    Args:
        spill: The rows.
        side_of_row: Per row 0 for train, 1 for eval, -1 for a duplicate, which goes to the
            quarantine.
        files: Names by index.
        out: The artifact's folder.
        quarantine: Open quarantine file.
        duplicate_of: Per row, its conversation's first occurrence (a conversation's index).
    """
    pieces = spill.column("pieces")
    conversation_of = np.repeat(np.arange(len(pieces)), pieces)
    lines, file_of = spill.column("lines"), spill.column("files")
    lengths = spill.column("lengths").astype(np.int64)

    def source(conversation: int) -> str:
        return f"{files[file_of[conversation]]}:{lines[conversation]}"

    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                # On token ids dictionaries and statistics cost more time than all the rest.
                pq.ParquetWriter(
                    out / f"{side}.parquet",
                    SCHEMA,
                    compression="zstd",
                    use_dictionary=["source"],
                    write_statistics=False,
                )
            )
            for side in SIDES
        ]
        messages = [
            stack.enter_context((out / f"{side}_messages.jsonl").open("wb")) for side in SIDES
        ]
        said: set[int] = set()
        for begin, ids, labels, message_lines in spill.chunks(_CHUNK_ROWS):
            count = len(message_lines)
            sides = side_of_row[begin : begin + count]
            row_lengths = lengths[begin : begin + count]
            side_of_token = np.repeat(sides, row_lengths)
            owners = conversation_of[begin : begin + count]
            for side, (writer, stream) in enumerate(zip(writers, messages, strict=True)):
                chosen = np.flatnonzero(sides == side)
                if len(chosen):
                    tokens = side_of_token == side
                    sources = [source(int(owner)) for owner in owners[chosen]]
                    writer.write_table(
                        _table(row_lengths[chosen], ids[tokens], labels[tokens], sources)
                    )
                    stream.writelines(message_lines[i] for i in chosen)
            for index in np.flatnonzero(sides < 0):
                owner = int(owners[index])
                if owner not in said:
                    said.add(owner)
                    first = source(int(duplicate_of[owner]))
                    _quarantine(quarantine, source(owner), first, message_lines[index])


def _table(
    lengths: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int32],
    labels: npt.NDArray[np.int32],
    sources: list[str],
) -> pa.Table:
    """A table over the arrays' own memory (`pa.array` would import pandas to look at them)."""
    names = [source.encode() for source in sources]
    texts = pa.StringArray.from_buffers(
        len(names), _offsets([len(name) for name in names]), pa.py_buffer(b"".join(names))
    )
    offsets = pa.Array.from_buffers(pa.int32(), len(lengths) + 1, [None, _offsets(lengths)])
    columns = [
        pa.ListArray.from_arrays(
            offsets, pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
        )
        for values in (ids, labels)
    ]
    return pa.Table.from_arrays([*columns, texts], schema=SCHEMA)


def _offsets(lengths: npt.ArrayLike) -> pa.Buffer:
    return pa.py_buffer(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _quarantine(stream: IO[str], source: str, first: str, line: bytes) -> None:
    record: dict[str, Any] = {
        "source": f"{source}:1",
        "code": "duplicate",
        "message": f"the same conversation as {first}",
        "row": json.dumps({"messages": json.loads(line)["messages"]}, ensure_ascii=False),
    }
    stream.write(json.dumps(record, ensure_ascii=False) + "\n")
