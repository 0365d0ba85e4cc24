"""Files that are no data files at all, told by their first bytes, and text that is nearly one."""

from __future__ import annotations

import json
import re
from typing import Any

from tuneserve.errors import DataError

_ONE_A_LINE = "write the conversations as JSON, one object a line"
# First bytes, what the file is, what to do. Order matters where one begins like another.
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip archive", "unpack it (unzip FILE) and name the files in it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it and name the files in it"),
    (b"Rar!\x1a\x07", "a rar archive", "unpack it and name the files in it"),
    (b"%PDF", "a PDF document", _ONE_A_LINE),
    (b"\xd0\xcf\x11\xe0", "an Office document", "save the sheet as CSV (UTF-8)"),
    (b"SQLite format 3\0", "an SQLite database", f"export it: {_ONE_A_LINE}"),
    (b"ARROW1\0\0", "an Arrow file", "save it as Parquet"),
    (b"\xff\xff\xff\xff", "an Arrow stream, as datasets keeps it", "save it with to_parquet"),
    (b"\x89HDF", "an HDF5 file", _ONE_A_LINE),
    (b"\x93NUMPY", "a NumPy array", _ONE_A_LINE),
    (b"\x80\x02", "a Python pickle, which runs code when it is read", _ONE_A_LINE),
    (b"\x80\x03", "a Python pickle, which runs code when it is read", _ONE_A_LINE),
    (b"\x80\x04", "a Python pickle, which runs code when it is read", _ONE_A_LINE),
    (b"\x80\x05", "a Python pickle, which runs code when it is read", _ONE_A_LINE),
    (
        b"version https://git-lfs.github.com/spec",
        "a Git LFS pointer and not the file itself",
        "fetch the file: git lfs pull",
    ),
    (b"<!doctype html", "a web page", "download the file itself; this may be a login or an error"),
    (b"<html", "a web page", "download the file itself; this may be a login or an error"),
    (b"<?xml", "an XML document", _ONE_A_LINE),
)
_TAR_MARK, _TAR_AT = b"ustar", 257


def refuse_foreign(path: str, head: bytes) -> None:
    """Refuse a file that begins like something else.

    Args:
        path: For the message, and for telling a workbook from other archives.
        head: Its first bytes, unpacked.

    Raises:
        DataError: It says what the file is.
    """
    text = head[:64].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    start = text if text[:1] == b"<" else head
    found = next(((what, hint) for mark, what, hint in _KINDS if start.startswith(mark)), None)
    if head[_TAR_AT:].startswith(_TAR_MARK):
        found = ("a tar archive", "unpack it (tar -xf FILE) and name the files in it")
    if found is None:
        return
    what, hint = found
    if what == "a zip archive" and path.lower().endswith((".xlsx", ".ods")):
        what, hint = "a workbook", "save the sheet as CSV (UTF-8)"
    raise DataError(
        f"{path}: the file is {what}",
        expected="JSONL, JSON, CSV or Parquet, as it is or packed by gzip, zstd, bzip2 or xz",
        hint=hint,
    )


def near_json(first_line: str) -> str:
    """What to do about a first line that is no JSON, where it shows what it is nearly; else ''."""
    line = first_line.strip()
    if line.endswith(("{", "[")):
        return "put each object on one line: jq -c . FILE > NEW"
    if re.match(r"\{\s*'", line):
        return "these are Python's dictionaries: write them with json.dumps, one a line"
    if line.endswith(",") and _is_object(line[:-1]):
        return "remove the commas behind the lines, or put [ before and ] behind all of them"
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def rows_inside(row: dict[str, Any]) -> str:
    """The key of a lone object that holds a list of rows, as ``{"data": [...]}``; else ''."""
    for key, value in row.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            return key
    return ""
