"""Rows of an Arrow batch as JSON would have them, or what is wrong with them.

Arrow gives every struct of a column the fields of all: `{"city": "Oslo"}` beside `{"lamp": 4}` is
read as both keys, one null. In arguments and tools that says something else, so such nulls go.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tuneserve.data.codes import RowError

if TYPE_CHECKING:
    import pyarrow as pa

# Under these keys stands JSON that the model is shown as it is.
_SHOWN = ("arguments", "tools")
# What Python has no value for: a date beyond its calendar, a time zone without a name, a map with
# a key twice.
_UNREADABLE = (ValueError, OverflowError, TypeError, KeyError)


def rows_of_batch(batch: pa.RecordBatch) -> list[dict[str, Any] | RowError]:
    """The rows of a batch, each parsed or with its error."""
    try:
        rows: list[dict[str, Any] | RowError] = list(_to_python(batch))
    except _UNREADABLE:  # a row in it: the others are good
        rows = [_one_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
    for index, row in enumerate(rows):
        if not isinstance(row, RowError):
            try:
                rows[index] = {key: _as_json(value, (key,)) for key, value in row.items()}
            except RowError as error:
                rows[index] = error
    return rows


def _to_python(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
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


def _as_json(value: Any, path: tuple[str | int, ...], shown: bool = False) -> Any:
    """The value; where the model is shown it, without null fields and only of JSON's types."""
    if isinstance(value, dict):
        return {
            key: _as_json(inner, (*path, key), shown or key in _SHOWN)
            for key, inner in value.items()
            if inner is not None or not shown
        }
    if isinstance(value, list):
        shown = shown or path[-1] in _SHOWN
        return [_as_json(inner, (*path, at), shown) for at, inner in enumerate(value)]
    if not shown or value is None or isinstance(value, str | int):
        return value
    where = ".".join(map(str, path))
    if not isinstance(value, float):
        kind = type(value).__name__
        raise RowError("bad_type", f"{where} is a {kind}, which JSON does not have", path=path)
    if not math.isfinite(value):
        raise RowError("not_finite", f"{where} is {value}, which is no JSON number", path=path)
    return value
