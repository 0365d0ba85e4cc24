"""The tokenizer's engine with what the checks need beside it: bytes, control ids, stop ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

Ids = npt.NDArray[np.int32]


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
        self.tokenizer = Tokenizer.from_str(source)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
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
        self.unknown_id = _unknown_id(self.tokenizer, json.loads(source))
        self.bytes_of_added = {id: token.content.encode() for id, token in added.items()}
        self.bytes_of = self._byte_table(
            json.loads(source), {i: t.content for i, t in added.items()}
        )
        self.lengths = (
            np.array([len(piece) for piece in self.bytes_of], dtype=np.int64)
            if self.bytes_of
            else None
        )
        self._tails: dict[tuple[int, bytes], list[int]] = {}

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
