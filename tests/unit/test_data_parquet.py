"""Parquet: what Arrow adds and what JSON does not have, bytes that are no text, names twice."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneserve.data.codes import RowError
from tuneserve.data.formats import convert, detect
from tuneserve.data.readers import read_blocks
from tuneserve.data.worker import rows_of
from tuneserve.errors import DataError


def call(arguments: Any) -> dict[str, Any]:
    """A row of a question and a call."""
    function = {"name": "look", "arguments": arguments}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        ]
    }


def read(path: Path, table: pa.Table) -> list[Any]:
    """The rows of a table written to a file: parsed, or (line, code, message)."""
    pq.write_table(table, path)
    found: list[Any] = []
    for block in read_blocks(str(path), 0):
        for row, error in rows_of(block):
            found.append((row.line, error.code, error.message) if error else row.value)
    return found


def arguments_of(row: dict[str, Any]) -> Any:
    """The arguments of a row's call as the model is shown them."""
    made = convert(row, detect(row))
    return json.loads(made.messages[1]["tool_calls"][0]["function"]["arguments"])


def test_fields_of_other_rows_are_no_arguments(tmp_path: Path) -> None:
    rows = [call({"city": "Oslo", "days": [1, 2]}), call({"lamp": 4, "where": {"room": "den"}})]
    found = read(tmp_path / "a.parquet", pa.Table.from_pylist(rows))
    assert [arguments_of(row) for row in found] == [
        {"city": "Oslo", "days": [1, 2]},
        {"lamp": 4, "where": {"room": "den"}},
    ]


def test_fields_of_other_tools_are_no_properties(tmp_path: Path) -> None:
    def tool(**properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": "look", "parameters": parameters}}

    tools = [tool(city={"type": "string"}), tool(lamp={"type": "integer", "minimum": 1})]
    rows = [{**call("{}"), "tools": [one]} for one in tools]
    found = read(tmp_path / "a.parquet", pa.Table.from_pylist(rows))
    made = [convert(row, "messages").tools for row in found]
    assert [one and one[0]["function"]["parameters"]["properties"] for one in made] == [
        {"city": {"type": "string"}},
        {"lamp": {"type": "integer", "minimum": 1}},
    ]


def test_a_map_is_an_object(tmp_path: Path) -> None:
    function = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.int64()))])
    turn = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.list_(pa.struct([("function", function)]))),
        ]
    )
    rows = [call([("lamp", 4)])["messages"], call([("lamp", 4), ("lamp", 5)])["messages"]]
    found = read(tmp_path / "a.parquet", pa.table({"messages": pa.array(rows, pa.list_(turn))}))
    assert arguments_of(found[0]) == {"lamp": 4}
    assert found[1][:2] == (2, "bad_type") and "column messages" in found[1][2]


@pytest.mark.parametrize(
    ("value", "code", "what"),
    [
        (float("nan"), "not_finite", "function.arguments.x is nan"),
        (float("-inf"), "not_finite", "is -inf"),
        (datetime.datetime(2026, 1, 2), "bad_type", "arguments.x is a datetime"),
        (b"raw", "bad_type", "arguments.x is a bytes"),
    ],
)
def test_arguments_that_are_no_json(tmp_path: Path, value: Any, code: str, what: str) -> None:
    rows = [call({"x": value}), call({"x": None})]
    found = read(tmp_path / "a.parquet", pa.Table.from_pylist(rows))
    assert found[0][:2] == (1, code) and what in found[0][2]
    assert arguments_of(found[1]) == {}
    with pytest.raises(RowError) as caught:  # whichever way such a row comes
        convert(call({"x": value}), "messages")
    assert caught.value.code == code and "the arguments of look" in caught.value.message
    # What the model is not shown may have any type.
    found = read(tmp_path / "b.parquet", pa.Table.from_pylist([{"prompt": "q", "when": value}] * 2))
    assert found[0]["prompt"] == "q"


@pytest.mark.parametrize(
    ("type", "holds"),
    [
        (pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), False),
        (pa.list_(pa.struct([("f", pa.struct([("arguments", pa.string())]))])), False),
        (pa.list_(pa.struct([("f", pa.struct([("arguments", pa.struct([]))]))])), True),
        (pa.large_list(pa.struct([("arguments", pa.float64())])), True),
        (pa.map_(pa.string(), pa.string()), True),
        (pa.list_(pa.float64()), False),
    ],
)
def test_only_columns_that_may_hold_arguments_are_walked(type: pa.DataType, holds: bool) -> None:
    from tuneserve.data.arrowrows import shown_columns

    schema = pa.schema([("prompt", pa.string()), ("rows", type), ("tools", pa.string())])
    assert shown_columns(schema) == (["rows"] if holds else [])
    assert shown_columns(pa.schema([("tools", type)])) == ["tools"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    answers = pa.array([b"yes", b"caf\xe9.", b"no"]).view(pa.string())
    table = pa.table({"prompt": ["a", "b", "c"], "completion": answers})
    assert read(tmp_path / "a.parquet", table) == [
        {"prompt": "a", "completion": "yes"},
        (
            2,
            "bad_encoding",
            "column completion: byte 0xE9 is not UTF-8 (invalid continuation byte)",
        ),
        {"prompt": "c", "completion": "no"},
    ]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(DataError, match=r"a.parquet:1:1: .*repeated name: \['prompt', 'prompt'\]"):
        read(tmp_path / "a.parquet", table)
