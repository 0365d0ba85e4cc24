"""Byte counts as people write them: 24GiB, 24G, 700 MiB, 1000000."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    # As docker and systemd read them.
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}

_LARGEST_CARD = 2**42


def parse_size(value: Any) -> Any:
    """Read a byte count such as ``24GiB``, ``24G``, ``700 MiB`` or ``1_000_000``; other types pass
    through unchanged.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if not match or match.group(2).upper() not in _SIZE_UNITS:
        raise ValueError(
            f"{value!r} is not a size; write it like 24GiB, 700MiB or a number of bytes"
        )
    size = float(match.group(1)) * _SIZE_UNITS[match.group(2).upper()]
    if size >= 2**63:
        raise ValueError(f"{value[:40]!r} is more bytes than any machine has")
    return int(size)


def parse_card(text: str) -> int:
    """Read the memory of a card in bytes, as `parse_size`; less than 1 GiB or more than 4 TiB is no
    card's.

    Raises:
        ValueError: It is none; the message says how to write it.
    """
    size: int = parse_size(text)
    if size < 2**30:
        bare = text.strip()
        meant = "24GiB"
        if bare.isdigit() and int(bare) and len(bare) < 7:
            meant = bare + ("GiB" if len(bare) < 4 else "MiB")  # the latter as nvidia-smi counts
        raise ValueError(f"{text!r} is {size:,} bytes, and a card has 1 GiB or more; write {meant}")
    if size > _LARGEST_CARD:
        raise ValueError(f"{text!r} is {size:,} bytes, and no card has so many; write 24GiB")
    return size


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
