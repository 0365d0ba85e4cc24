"""Rows on disk between the two passes, so that memory does not grow with their number.

Per conversation 46 bytes, per further answer 8 and per row 8 bytes stay in memory; ids, masks and
messages go to files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tuneserve.data.split import Words
from tuneserve.data.supervise import IGNORED
from tuneserve.data.worker import Result

Array = npt.NDArray[Any]


class Spill:
    """Append-only storage of results, in the order they are added."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._ids_path, self._mask_path = folder / "ids.bin", folder / "mask.bin"
        self._messages_path = folder / "messages.jsonl"
        self._ids = self._ids_path.open("wb")
        self._mask = self._mask_path.open("wb")
        self._messages = self._messages_path.open("w", encoding="utf-8", newline="\n")
        self._parts: dict[str, list[Array]] = {}

    def __enter__(self) -> Spill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        for path in (self._ids_path, self._mask_path, self._messages_path):
            path.unlink(missing_ok=True)
        self._ids_path.parent.rmdir()

    def add(self, result: Result) -> None:
        """Take the rows of a block."""
        if not result.lines:
            return
        self._ids.write(result.ids)
        self._mask.write(result.mask)
        self._messages.writelines(f"{line}\n" for line in result.messages)
        for name, values, dtype in (
            ("lengths", result.lengths, np.int32),
            ("supervised", result.supervised, np.int32),
            ("pieces", result.pieces, np.int32),
            ("lines", result.lines, np.int64),
            ("beginning_counts", result.beginning_counts, np.int32),
            ("files", [result.file] * len(result.lines), np.int32),
        ):
            self._parts.setdefault(name, []).append(np.array(values, dtype=dtype))
        digests = np.frombuffer(result.digests, dtype=np.uint64).reshape(-1, 2)
        self._parts.setdefault("digests", []).append(digests)
        for name, words in (("groups", result.groups), ("beginnings", result.beginnings)):
            self._parts.setdefault(name, []).append(np.frombuffer(words, dtype=np.uint64))

    def close(self) -> None:
        """Flush the files; nothing can be added afterwards."""
        for stream in (self._ids, self._mask, self._messages):
            stream.close()

    def column(self, name: str) -> Array:
        """One value per row (lengths, supervised), per answer but the last (beginnings) or per
        conversation (the others), in order.
        """
        parts = self._parts.get(name)
        if not parts:
            return np.zeros((0, 2) if name == "digests" else 0, dtype=np.uint64 if name in (
                "digests", "groups", "beginnings") else np.int64)  # fmt: skip
        if len(parts) > 1:
            self._parts[name] = parts = [np.concatenate(parts)]
        return parts[0]

    def digests(self) -> Words:
        """Shape (conversations, 2)."""
        return self.column("digests")

    def chunks(self, rows: int) -> Iterator[tuple[int, Array, Array, list[bytes]]]:
        """(first row, ids, labels, message lines) of `rows` rows at a time."""
        lengths = self.column("lengths").astype(np.int64)
        with (
            self._ids_path.open("rb") as ids,
            self._mask_path.open("rb") as mask,
            self._messages_path.open("rb") as messages,
        ):
            for begin in range(0, len(lengths), rows):
                count = int(lengths[begin : begin + rows].sum())
                token_ids = np.frombuffer(ids.read(4 * count), dtype=np.int32)
                supervised = np.frombuffer(mask.read(count), dtype=np.bool_)
                labels = np.where(supervised, token_ids, np.int32(IGNORED))
                lines = [messages.readline() for _ in range(min(rows, len(lengths) - begin))]
                yield begin, token_ids, labels, lines

    def message_lines(self, wanted: set[int]) -> dict[int, dict[str, Any]]:
        """The messages of a few rows."""
        found: dict[int, dict[str, Any]] = {}
        if not wanted:
            return found
        last = max(wanted)
        with self._messages_path.open("rb") as stream:
            for number, line in enumerate(stream):
                if number in wanted:
                    found[number] = json.loads(line)
                if number >= last:
                    break
        return found
