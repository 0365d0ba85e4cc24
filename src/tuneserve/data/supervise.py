"""From a conversation to token rows whose supervised tokens are proven, row by row.

Method. For the answer at position i the server renders `messages[:i]` with the generation prompt;
what the model must add is the rest up to the turn's end token. So the prompt's text must be the
beginning of the row's text, and its ids the beginning of the row's ids; the answer's tokens are
those between. This needs no `{% generation %}` tags and cannot be wrong where it succeeds. Where
the beginnings differ because the template rewrites history (Qwen3 drops earlier thinking), the
conversation becomes one row per answer, each rendered as the server renders it.

Proofs on every row: all tokens decode to the row's text; the supervised ones to the answers and
their end tokens, with nothing around them that the template does not put around every answer.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from tuneserve.data.codes import RowError
from tuneserve.data.controls import ControlCounts
from tuneserve.data.engine import Engine, Ids
from tuneserve.data.pieces import Piece, squeeze
from tuneserve.data.spans import AnswerSpan, find_answers
from tuneserve.data.template import ChatTemplate

IGNORED = -100


@dataclass(slots=True)
class TokenRow:
    """Ids, and which of them are supervised."""

    ids: Ids
    mask: npt.NDArray[np.bool_]

    @property
    def supervised(self) -> int:
        """Tokens that the loss counts: position 0 is never a target."""
        return int(np.count_nonzero(self.mask[1:]))


@dataclass
class Frames:
    """What the template puts around every answer, learned from a probe.

    Attributes:
        around: Pairs of the text before and after an answer.
        opener: The beginning of thinking that the prompt for an answer ends with (``<think>``): an
            answer that begins with it has it in its content, and not in its supervised tokens.
    """

    around: set[tuple[str, str]] = field(default_factory=set)
    opener: str = ""

    def fits(self, found: str, content: str) -> bool:
        """Whether `found` is the content (or it trimmed) in one of the frames."""
        return self._fits(found, content) or bool(
            self.opener and self._fits(self.opener + found, content)
        )

    def _fits(self, found: str, content: str) -> bool:
        for before, after in self.around:
            if found == before + content + after or found == before + content.strip() + after:
                return True
        squeezed = squeeze(found)
        wanted = squeeze(content)
        return any(
            squeezed == squeeze(before) + wanted + squeeze(after) for before, after in self.around
        )


class Supervisor:
    """Tokenizes pieces and proves the result.

    Where the tokenizer is byte-level and the ids decode to the text byte for byte (nearly always),
    all rows of a call are worked on at once; the others take the slower way over offsets.
    """

    def __init__(self, engine: Engine, template: ChatTemplate, frames: Frames) -> None:
        self.engine, self.frames = engine, frames
        self._wanted_controls = ControlCounts(engine, template)

    def tokenize(self, pieces: list[Piece]) -> list[TokenRow | RowError]:
        """One result per piece, in order."""
        lists = self.engine.encode_batch([piece.text for piece in pieces])
        data = [piece.text.encode() for piece in pieces]
        results: list[TokenRow | RowError | None] = [None] * len(pieces)
        ids = _joined(lists)
        if self.engine.lengths is None:
            exact = []
        elif self.engine.spells(ids, b"".join(data)):
            exact = list(range(len(pieces)))
        else:
            exact = [i for i, row in enumerate(lists) if self.engine.spells(_ids(row), data[i])]
            ids = _joined([lists[i] for i in exact])
        made = self._exact(
            [pieces[i] for i in exact], [lists[i] for i in exact], [data[i] for i in exact], ids
        )
        for index, row in zip(exact, made, strict=True):
            results[index] = row
        for index, piece in enumerate(pieces):
            if results[index] is None:
                try:
                    results[index] = self._by_offsets(piece, _ids(lists[index]))
                except RowError as error:
                    results[index] = error
        return [result for result in results if result is not None]

    def _exact(
        self, pieces: list[Piece], lists: list[list[int]], data: list[bytes], ids: Ids
    ) -> list[TokenRow | RowError]:
        """Rows whose ids decode to their bytes, as one long array."""
        if not pieces:
            return []
        engine = self.engine
        assert engine.lengths is not None
        starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in lists], out=starts[1:])
        if int(ids.max(initial=0)) >= min(engine.vocab_rows, len(engine.lengths)):
            return [self._out_of_range(row) or self._exact([p], [row], [d], _ids(row))[0]
                    for p, row, d in zip(pieces, lists, data, strict=True)]  # fmt: skip
        ends = np.cumsum(engine.lengths[ids])
        errors = self._whole_row_errors(pieces, ids, starts)
        edges = starts.tolist()
        change = np.zeros(len(ids) + 1, dtype=np.int8)
        for span in find_answers(
            pieces, data, ends, edges, engine.is_added[ids], engine.is_stop[ids]
        ):
            if span.row in errors:
                continue
            piece, first = pieces[span.row], edges[span.row]
            try:
                self._check_prompt(span, lists[span.row], data[span.row], first)
                if span.end is None:
                    raise _no_end(span.number)
                answer = data[span.row][span.cut : span.end_byte].decode()
                self._prove_answer(piece, span.number, answer)
            except RowError as error:
                errors[span.row] = error
                continue
            change[span.begin] += 1
            change[span.end + 1] -= 1
        mask = np.cumsum(change[:-1]).astype(bool)
        return [
            errors.get(row) or TokenRow(ids[begin:end], mask[begin:end])
            for row, (begin, end) in enumerate(pairwise(edges))
        ]

    def _out_of_range(self, row: list[int]) -> RowError | None:
        try:
            check_range(_ids(row), self.engine.vocab_rows)
        except RowError as error:
            return error
        return None

    def _whole_row_errors(
        self, pieces: list[Piece], ids: Ids, starts: npt.NDArray[np.int64]
    ) -> dict[int, RowError]:
        """Control tokens and BOS, counted for all rows at once."""
        errors: dict[int, RowError] = {}
        sums = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(self.engine.is_control[ids], out=sums[1:])
        counts = (sums[starts[1:]] - sums[starts[:-1]]).tolist()
        for row, (piece, found) in enumerate(zip(pieces, counts, strict=True)):
            wanted = self._wanted_controls.of(piece)
            if wanted is not None and found != wanted:
                errors[row] = _wrong_controls(found, wanted)
        bos = self.engine.bos_id
        if bos is not None:
            twice = np.flatnonzero(ids[:-1] == bos)
            for at in twice[ids[twice + 1] == bos]:
                row = int(np.searchsorted(starts, at))
                if starts[row] == at:
                    errors[row] = _double_bos(bos)
        return errors

    def _check_prompt(self, span: AnswerSpan, ids: list[int], data: bytes, first: int) -> None:
        """The prompt's own ids must be the beginning of the row's."""
        engine, number = self.engine, span.number
        if not span.on_edge:
            raise _mismatch(number, span.begin - 1 - first)
        begin = span.begin - first
        if span.anchor is None:
            anchor, own = -1, engine.tail_ids(-1, data[: span.cut])
        else:
            anchor = span.anchor - first
            own = engine.tail_ids(ids[anchor], data[span.anchor_byte : span.cut])
        _compare(own, ids[anchor + 1 : begin], number, anchor + 1)

    def _by_offsets(self, piece: Piece, ids: Ids) -> TokenRow:
        """One row of a tokenizer that is not byte-level, or that normalizes the text."""
        engine, text = self.engine, piece.text
        check_range(ids, engine.vocab_rows)
        encoding = engine.encode(text)
        if encoding.ids != ids.tolist():
            raise RowError("supervision_mismatch", "the tokenizer gives different ids each time")
        if engine.unknown_id is not None and (ids == engine.unknown_id).any():
            begin, end = encoding.offsets[int((ids == engine.unknown_id).argmax())]
            shown = text[begin:end]
            raise RowError("unknown_token", f"the tokenizer has no token for {shown[:20]!r}")
        bos = engine.bos_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            raise _double_bos(bos)
        wanted = self._wanted_controls.of(piece)
        found = int(np.count_nonzero(engine.is_control[ids]))
        if wanted is not None and found != wanted:
            raise _wrong_controls(found, wanted)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        stops = np.flatnonzero(engine.is_stop[ids])
        mask = np.zeros(len(ids), dtype=bool)
        for cut, number in piece.cuts:
            own = engine.encode(text[:cut]).ids
            begin = len(own)
            _compare(own, ids[:begin].tolist(), number, 0)
            at = int(stops.searchsorted(begin))
            if at == len(stops):
                raise _no_end(number)
            end = int(stops[at])
            answer = text[cut : int(offsets[end, 1])]
            decoded = engine.decode(ids[begin : end + 1])
            if not _same(decoded, answer):
                raise _not_the_turn(number, decoded)
            self._prove_answer(piece, number, answer)
            mask[begin : end + 1] = True
        return TokenRow(ids, mask)

    def _prove_answer(self, piece: Piece, number: int, text: str) -> None:
        """The text of the supervised tokens must be the answer in the template's frame."""
        message = piece.messages[number]
        if "tool_calls" not in message and "reasoning" not in message:
            if not self.frames.fits(text, message["content"]):
                raise _not_the_turn(number, text)
            return
        squeezed = squeeze(self.frames.opener + text)
        for call in message.get("tool_calls", []):
            if call["function"]["name"] not in text:
                text = f"the chat template does not show the tool call of turn {number + 1}"
                raise RowError("tools_not_rendered", text, path=("messages", number))
        for part in (message["content"], message.get("reasoning", "")):
            if squeeze(part) not in squeezed:
                text = f"turn {number + 1}: the supervised tokens lack {part[:60]!r}"
                raise RowError("supervision_mismatch", text, path=("messages", number))


def _ids(row: list[int]) -> Ids:
    return np.array(row, dtype=np.int32)


def _joined(rows: list[list[int]]) -> Ids:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32)


def _compare(own: list[int], found: list[int], number: int, first: int) -> None:
    """The prompt's own ids must be those in the row; `first` is the index of the first one."""
    if own != found:
        pairs = enumerate(zip(own, found, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(own), len(found)))
        raise _mismatch(number, first + at)


def _mismatch(number: int, index: int) -> RowError:
    return RowError(
        "prefix_mismatch",
        f"turn {number + 1}: the prompt's ids are not the beginning of the row's ids; the first "
        f"index that differs is {index}",
        path=("messages", number),
    )


def _no_end(number: int) -> RowError:
    text = f"turn {number + 1} does not end with a stop token"
    return RowError("no_end_token", text, path=("messages", number))


def _not_the_turn(number: int, text: str) -> RowError:
    return RowError(
        "supervision_mismatch",
        f"turn {number + 1}: the supervised tokens say {text[:80]!r}, which is not the turn",
        path=("messages", number),
    )


def _wrong_controls(found: int, wanted: int) -> RowError:
    text = f"{found} control tokens in the row, but the template writes {wanted}"
    return RowError("control_token", text)


def _double_bos(bos: int) -> RowError:
    return RowError("double_bos", f"the row begins with token {bos} (BOS) twice")


def _same(decoded: str, text: str) -> bool:
    """Equal but for white space and composition, which such decoders do not keep."""
    return _bare(decoded) == _bare(text)


def _bare(text: str) -> str:
    return squeeze(unicodedata.normalize("NFKC", text))


def check_range(ids: Ids, vocab_rows: int) -> None:
    """Every id must be a row of the embedding.

    Raises:
        RowError: Names the position and the value.
    """
    if len(ids) and (int(ids.max()) >= vocab_rows or int(ids.min()) < 0):
        at = int(np.flatnonzero((ids >= vocab_rows) | (ids < 0))[0])
        text = f"token {at} is {int(ids[at])}, but the embedding has rows 0 to {vocab_rows - 1}"
        raise RowError("id_out_of_range", text)


def check_labels(labels: Ids, vocab_rows: int) -> int:
    """Every label must be a token id or exactly -100; the number of supervised ones is returned.

    Raises:
        RowError: Names the position and the value.
    """
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_rows))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        text = f"label {at} is {int(labels[at])}, neither -100 nor 0 to {vocab_rows - 1}"
        raise RowError("label_out_of_range", text)
    return int(np.count_nonzero(labels[1:] != IGNORED))
