"""Rows of an Arrow batch as JSON would have them, or what is wrong with them.

Arrow gives every struct of a column the fields of all: `{"city": "Oslo"}` beside `{"lamp": 4}` is
read as both keys, one null. In arguments and tools that says something else, so such nulls go.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tuneserve.data.codes import RowError

if TYPE_CHECKING:
    import pyarrow as pa

# Under these keys stands JSON that the model is shown as it is.
_SHOWN = ("arguments", "tools")
# What Python has no value for: a date beyond its calendar, a time zone without a name, a map with
# a key twice.
_UNREADABLE = (ValueError, OverflowError, TypeError, KeyError)


def shown_columns(schema: pa.Schema) -> list[str]:
    """The columns that may hold arguments or tools in Arrow's types, not as JSON text."""
    return [field.name for field in schema if _holds_shown(field.type, field.name)]


def _holds_shown(type: pa.DataType, name: str) -> bool:
    import pyarrow as pa

    kinds = pa.types
    if kinds.is_map(type):  # its keys are data
        return True
    if kinds.is_struct(type):
        return name in _SHOWN or any(_holds_shown(field.type, field.name) for field in type)
    for inner in ("value_type", "storage_type"):  # of lists and dictionaries, of extensions
        if hasattr(type, inner):
            return _holds_shown(getattr(type, inner), name)
    text = kinds.is_string(type) or kinds.is_large_string(type) or kinds.is_string_view(type)
    return name in _SHOWN and not (text or kinds.is_null(type))


def rows_of_batch(batch: pa.RecordBatch, shown: Collection[str]) -> list[dict[str, Any] | RowError]:
    """The rows of a batch, each parsed or with its error.

    Args:
        batch: Of one file.
        shown: Its `shown_columns`; all others stay as Arrow gives them.
    """
    try:
        rows: list[dict[str, Any] | RowError] = list(_to_python(batch))
    except _UNREADABLE:  # a row in it: the others are good
        rows = [_one_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
    for index, row in enumerate(rows):
        if not isinstance(row, RowError):
            rows[index] = _with_json(row, shown)
    return rows


def _with_json(row: dict[str, Any], shown: Collection[str]) -> dict[str, Any] | RowError:
    try:
        for name in shown:
            row[name] = _as_json(row[name], name in _SHOWN)
    except _NotJson as error:
        path = (name, *reversed(error.path))
        return RowError(error.code, f"{'.'.join(map(str, path))} is {error.what}", path=path)
    return row


def _to_python(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    # Asked for dictionaries, Arrow converts value by value, which takes eight times as long.
    maps = any("map<" in str(type) for type in batch.schema.types)
    rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict" if maps else None)
    return rows


def _one_row(batch: pa.RecordBatch) -> dict[str, Any] | RowError:
    try:
        return _to_python(batch)[0]
    except _UNREADABLE:
        pass
    for name in batch.schema.names:
        try:
            _to_python(batch.select([name]))
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            message = f"column {name}: byte 0x{byte:02X} is not UTF-8 ({error.reason})"
            return RowError("bad_encoding", message, offset=0)
        except _UNREADABLE as error:
            return RowError("bad_type", f"column {name} cannot be read: {error}", offset=0)
    raise AssertionError("a row is its columns")


class _NotJson(Exception):
    """A value that JSON does not have; whoever passes it on adds its own step to the path."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code, self.what = code, what
        self.path: list[str | int] = []


def _as_json(value: Any, shown: bool) -> Any:
    """The value; where the model is shown it, without null fields and only of JSON's types.

    Raises:
        _NotJson: It is shown something else.
    """
    at: str | int = 0
    try:
        if isinstance(value, dict):
            made = {}
            for at, inner in value.items():
                if inner is not None or not shown:
                    made[at] = _as_json(inner, shown or at in _SHOWN)
            return made
        if isinstance(value, list):
            items = []
            for at, inner in enumerate(value):  # noqa: B007 - the path of an error
                items.append(_as_json(inner, shown))
            return items
    except _NotJson as error:
        error.path.append(at)
        raise
    if not shown or value is None or isinstance(value, str | int):
        return value
    if not isinstance(value, float):
        raise _NotJson("bad_type", f"a {type(value).__name__}, which JSON does not have")
    if not math.isfinite(value):
        raise _NotJson("not_finite", f"{value}, which is no JSON number")
    return value
