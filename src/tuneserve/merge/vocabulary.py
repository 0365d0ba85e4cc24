"""The ids that a tokenizer's files know, read without loading the tokenizer.

What the files say may differ (a token added to one of them alone), so all of them are asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

# Text files with one token per line, whose line number is its id.
_LINE_FILES = ("vocab.txt",)


@dataclass(frozen=True)
class Vocabulary:
    """`ids` by token, and the highest id of all; None where no file tells."""

    ids: Mapping[str, int]
    highest: int | None

    def ends(self, config: bytes | None) -> list[int]:
        """The id of the `eos_token` of a tokenizer_config.json, in a list; empty if not known."""
        settings = json_object(config)
        token = settings.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        added = _decoder_ids(settings)
        found = added.get(text, self.ids.get(text)) if isinstance(text, str) else None
        return [] if found is None else [found]


def read_vocabulary(files: Mapping[str, bytes]) -> Vocabulary:
    """Gather the ids of all files of a tokenizer, by name; what cannot be read says nothing."""
    ids: dict[str, int] = {}
    highest = [-1]
    for name in _LINE_FILES:
        highest.append(len(files.get(name, b"").splitlines()) - 1)
    for name, data in files.items():
        if name == "tiktoken.model" or PurePosixPath(name).suffix == ".tiktoken":
            highest.append(_highest_rank(data))
    for place, piece in enumerate(_pieces(files.get("tokenizer.model", b""))):
        ids[piece] = place
    highest.append(len(ids) - 1)
    ids.update(_integers(json_object(files.get("vocab.json"))))
    ids.update(_fast_ids(json_object(files.get("tokenizer.json")), highest))
    ids.update(_integers(json_object(files.get("added_tokens.json"))))
    ids.update(_decoder_ids(json_object(files.get("tokenizer_config.json"))))
    top = max(*highest, max(ids.values(), default=-1))
    return Vocabulary(ids, None if top < 0 else top)


def json_object(data: bytes | None) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        value = json.loads(data or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _fast_ids(tokenizer: Mapping[str, Any], highest: list[int]) -> dict[str, int]:
    """Of a tokenizer.json, whose vocabulary is an object or, for Unigram, a list."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids.update(_integers(vocabulary))
    elif isinstance(vocabulary, list):
        highest.append(len(vocabulary) - 1)
        ids.update({str(e[0]): i for i, e in enumerate(vocabulary) if isinstance(e, list) and e})
    for entry in tokenizer.get("added_tokens") or []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            ids[str(entry.get("content"))] = entry["id"]
    return ids


def _decoder_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """`added_tokens_decoder` of a tokenizer_config.json: ids as text, to what the token is."""
    decoder = config.get("added_tokens_decoder")
    return {
        str(entry["content"]): int(number)
        for number, entry in (decoder.items() if isinstance(decoder, dict) else ())
        if number.isdecimal() and isinstance(entry, dict) and "content" in entry
    }


def _integers(mapping: Mapping[str, Any]) -> dict[str, int]:
    return {token: number for token, number in mapping.items() if isinstance(number, int)}


def _highest_rank(data: bytes) -> int:
    """Of tiktoken's lines of a token in base64 and its rank."""
    last = (line.rpartition(b" ")[2] for line in data.splitlines())
    return max((int(rank) for rank in last if rank.isdigit()), default=-1)


def _pieces(model: bytes) -> Iterator[str]:
    """The pieces of a sentencepiece model in the order of their ids, without its library.

    A protobuf message: field 1, repeated, is a piece, whose own field 1 is its text
    (sentencepiece_model.proto).
    """
    for number, value in _fields(model):
        if number == 1:
            text = next((inner for field, inner in _fields(value) if field == 1), b"")
            yield text.decode(errors="replace")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of a protobuf message's length-delimited fields; ends at what is not
    one.
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 2:
            length, at = _varint(message, at)
            if at + length > len(message):
                return
            yield tag >> 3, message[at : at + length]
            at += length
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, at
