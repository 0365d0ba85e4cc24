"""The tokenizer's engine with what the checks need beside it: bytes, control ids, stop ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

Ids = npt.NDArray[np.int32]
_WORD = 8  # bytes


def byte_decoder() -> dict[str, int]:
    """GPT-2's bijection from printable characters to bytes (openai/gpt-2, `encoder.py`).

    Printable bytes stand for themselves; the others get 256, 257, ... in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


class Engine:
    """A fast tokenizer.

    Args:
        source: The `tokenizers` JSON.
        stop_ids: Ids that end an answer.
        vocab_rows: Rows of the embedding.
        bos_id: Id of the BOS token, or None.
    """

    def __init__(
        self, source: str, *, stop_ids: set[int], vocab_rows: int, bos_id: int | None
    ) -> None:
        self._source = source
        self.tokenizer = _load(source)
        self.vocab_rows, self.bos_id = vocab_rows, bos_id
        added = self.tokenizer.get_added_tokens_decoder()
        size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())
        self.control_texts = [token.content for token in added.values() if token.special]
        self.is_control = np.zeros(size, dtype=bool)
        self.is_control[[id for id, token in added.items() if token.special]] = True
        self.is_added = np.zeros(size, dtype=bool)
        self.is_added[list(added)] = True
        self.is_stop = np.zeros(size, dtype=bool)
        self.is_stop[[id for id in stop_ids if id < size]] = True
        parsed = json.loads(source)
        self.unknown_id = _unknown_id(self.tokenizer, parsed)
        self.bytes_of_added = {id: token.content.encode() for id, token in added.items()}
        self.bytes_of = self._byte_table(parsed, {i: t.content for i, t in added.items()})
        self.lengths: npt.NDArray[np.int64] | None = None
        if self.bytes_of:
            self.lengths = np.array([len(piece) for piece in self.bytes_of], dtype=np.int64)
            self._words = _words(self.bytes_of, self.lengths)
        self._tails: dict[tuple[int, bytes], list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Workers get the tables made; only the tokenizer itself is loaded again from its JSON."""
        return {key: value for key, value in vars(self).items() if key != "tokenizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, tokenizer=_load(state["_source"]))

    def _byte_table(self, source: dict[str, Any], added: dict[int, str]) -> list[bytes] | None:
        """What each id decodes to, for byte-level tokenizers; None for the others.

        With it, a row's ids are turned back into the row's text at a tenth of the cost of `decode`.
        """
        if (source.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        decoder = byte_decoder()
        table = [b""] * len(self.is_added)
        for token, id in self.tokenizer.get_vocab(with_added_tokens=False).items():
            try:
                table[id] = bytes(map(decoder.__getitem__, token))
            except KeyError:
                if id not in added:
                    return None
        for id, text in added.items():
            table[id] = text.encode()
        return table

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of rendered texts; nothing is added, since templates write BOS themselves."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode(self, text: str) -> Encoding:
        """One text with offsets."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def spells(self, ids: Ids, data: bytes) -> bool:
        """Whether ids of a byte-level tokenizer decode to exactly these bytes.

        Same answer as joining the tokens' bytes, at a fifth of the cost: each token's first and
        last 8 bytes are compared as one word; only tokens longer than 16 bytes are looked at alone.
        """
        assert self.bytes_of is not None and self.lengths is not None
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths)
        if len(data) != (int(ends[-1]) if len(ids) else 0):
            return False
        # One word for every byte of the text, each beginning one byte further.
        padded = bytes(_WORD) + data + bytes(_WORD)
        windows: npt.NDArray[np.uint64] = np.ndarray(
            len(data) + _WORD + 1, dtype="<u8", buffer=padded, strides=(1,)
        )
        first, last, keep_first, keep_last = self._words
        starts = ends - lengths + _WORD
        if not np.array_equal(windows[starts] & keep_first[ids], first[ids]):
            return False
        if not np.array_equal(windows[ends] & keep_last[ids], last[ids]):
            return False
        for index in np.flatnonzero(lengths > 2 * _WORD).tolist():
            begin, end = int(ends[index] - lengths[index]), int(ends[index])
            if data[begin:end] != self.bytes_of[ids[index]]:
                return False
        return True

    def tail_ids(self, before: int, tail: bytes) -> list[int]:
        """The ids of a text that follows the added token `before` (-1: the text's beginning).

        Added tokens split the text before anything else is done, so the ids behind one do not
        depend on what is in front of it. Tails are mostly the template's constant prompt for an
        answer: cached.
        """
        found = self._tails.get((before, tail))
        if found is None:
            head = b"" if before < 0 else self.bytes_of_added[before]
            found = self.encode((head + tail).decode()).ids[0 if before < 0 else 1 :]
            if len(self._tails) < 1024 and len(tail) < 256:
                self._tails[before, tail] = found
        return found

    def decode(self, ids: Ids) -> str:
        """Text of ids, control tokens included."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _load(source: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


Words = npt.NDArray[np.uint64]


def _words(table: list[bytes], lengths: npt.NDArray[np.int64]) -> tuple[Words, ...]:
    """Per id its first and its last 8 bytes as little-endian words, and masks of what counts."""
    first = np.array(table, dtype=f"S{_WORD}").view("<u8")
    # Backwards and big-endian: the last byte is the highest, and what is missing is zero.
    last = np.array([piece[: -_WORD - 1 : -1] for piece in table], dtype=f"S{_WORD}").view(">u8")
    ones = [(1 << 8 * count) - 1 for count in range(_WORD + 1)]
    low = np.array(ones, dtype=np.uint64)
    high = np.array([ones[-1] - one for one in reversed(ones)], dtype=np.uint64)
    counts = np.minimum(lengths, _WORD)
    return first, last.astype("<u8"), low[counts], high[counts]


def _unknown_id(tokenizer: Tokenizer, source: dict[str, Any]) -> int | None:
    """Id of the token for what the vocabulary lacks; None where every byte has one."""
    model = source["model"]
    if model.get("type") == "BPE" and (
        model.get("byte_fallback") or (source.get("decoder") or {}).get("type") == "ByteLevel"
    ):
        return None
    token = model.get("unk_token")
    if token is None and isinstance(model.get("unk_id"), int):  # Unigram
        return int(model["unk_id"])
    return tokenizer.token_to_id(token) if token else None
