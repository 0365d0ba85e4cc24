"""Where the answers' tokens are, in many rows that lie one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tuneserve.data.pieces import Piece


class AnswerSpan(NamedTuple):
    """An answer in rows that lie one after another; bytes are counted from its row's beginning.

    Attributes:
        row, number: Which row, and which of its messages.
        cut: Byte where the answer begins.
        on_edge: Whether a token ends there.
        begin, end: Indices of its first and last token; no end where no stop token follows.
        end_byte: Where that last token's bytes end.
        anchor, anchor_byte: Index of the last added token before it, and where its bytes end.
    """

    row: int
    number: int
    cut: int
    on_edge: bool
    begin: int
    end: int | None
    end_byte: int
    anchor: int | None
    anchor_byte: int


def find_answers(
    pieces: list[Piece],
    data: list[bytes],
    ends: npt.NDArray[np.int64],
    edges: list[int],
    is_added: npt.NDArray[np.bool_],
    is_stop: npt.NDArray[np.bool_],
) -> Iterator[AnswerSpan]:
    """Finds every answer's tokens, all rows at once.

    Args:
        pieces, data: The rows and their bytes.
        ends: Per id of all rows, where its bytes end in all rows' bytes.
        edges: Per row, its first index among the ids; one more at the end.
        is_added, is_stop: Per id.
    """
    places = []
    row_byte = 0
    for row, (piece, raw) in enumerate(zip(pieces, data, strict=True)):
        ascii_text = len(raw) == len(piece.text)
        for cut, number in piece.cuts:
            place = cut if ascii_text else len(piece.text[:cut].encode())
            places.append((row, number, place, row_byte))
        row_byte += len(raw)
    cuts = np.array([place + begin for _, _, place, begin in places], dtype=np.int64)
    before = ends.searchsorted(cuts)  # the token that ends at or behind the cut
    added, stops = np.flatnonzero(is_added), np.flatnonzero(is_stop)
    anchors = np.concatenate([[-1], added])[added.searchsorted(before + 1)]
    last = np.concatenate([stops, [len(ends)]])[stops.searchsorted(before + 1)]
    found = zip(
        places,
        (ends[before] == cuts).tolist(),
        before.tolist(),
        anchors.tolist(),
        ends[anchors].tolist(),
        last.tolist(),
        np.concatenate([ends, [0]])[last].tolist(),
        strict=True,
    )
    for (row, number, place, begin), on_edge, at, anchor, anchor_byte, end, end_byte in found:
        yield AnswerSpan(
            row,
            number,
            place,
            on_edge,
            at + 1,
            end if end < edges[row + 1] else None,
            end_byte - begin,
            anchor if anchor >= edges[row] else None,
            anchor_byte - begin,
        )
