"""Headers written by hand, byte for byte as the format says, with every fault they can have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuneserve.checkpoint.fingerprint import compare, fingerprint
from tuneserve.checkpoint.headers import INDEX_NAME, Checkpoint, read_header
from tuneserve.errors import ModelError

Entry = dict[str, Any]


def write(path: Path, header: Any, data: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {
    "__metadata__": {"format": "pt"},
    "a.weight": entry("BF16", [2, 3], 0, 12),
    "b.weight": entry("F32", [1], 12, 16),
    "empty": entry("F16", [0, 4], 16, 16),
}


def test_a_good_header(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", GOOD, bytes(range(16)))
    shard = read_header(path)
    assert [t.name for t in shard.tensors] == ["a.weight", "b.weight", "empty"]
    first = shard.tensors[0]
    assert (first.dtype, first.shape, first.nbytes, first.numel) == ("BF16", (2, 3), 12, 6)
    assert path.read_bytes()[first.begin : first.end] == bytes(range(12))
    assert shard.metadata == {"format": "pt"}


FAULTS: dict[str, tuple[Any, int, str]] = {
    "cut short": (GOOD, 15, "cut short: .*tensor b.weight"),
    "bytes left over": (GOOD, 17, "1 bytes after the last tensor"),
    "hole": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, 3, "b: follows a hole"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3, "b: overlaps"),
    "size": ({"a": entry("F32", [2], 0, 4)}, 4, r"tensor a: F32 \[2\] takes 8 bytes.*span 4"),
    "dtype": ({"a": entry("F7", [2], 0, 4)}, 4, "tensor a: dtype 'F7'"),
    "negative": ({"a": entry("U8", [-1], 0, 1)}, 1, "tensor a: .*whole numbers"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, 1, "tensor a: its entry"),
    "twice": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', 1, "a occur twice"),
    "not json": (b"{{", 0, "not usable JSON"),
    "a list": (b"[]", 0, "a JSON list"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_header_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    header, size, message = FAULTS[fault]
    path = write(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [0, 10**9, 2**63])
def test_a_header_length_that_cannot_be(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match="claims a header"):
        read_header(path)


def sharded(folder: Path) -> Path:
    folder.mkdir()
    write(folder / "model-00001-of-00002.safetensors", {"a": entry("U8", [2], 0, 2)}, b"xy")
    write(folder / "model-00002-of-00002.safetensors", {"b": entry("U8", [1], 0, 1)}, b"z")
    weight_map = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    return folder


def _change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    found = Checkpoint.open(sharded(tmp_path / "m"))
    assert {n: t.file.name[:11] for n, t in found.tensors.items()} == {
        "a": "model-00001",
        "b": "model-00002",
    }
    assert found.data_bytes == 3


@pytest.mark.parametrize("metadata", [None, [], ["x"], "x", 3])
def test_an_index_with_other_metadata_is_read(tmp_path: Path, metadata: object) -> None:
    folder = sharded(tmp_path / "m")
    index = json.loads((folder / INDEX_NAME).read_text())
    (folder / INDEX_NAME).write_text(json.dumps({**index, "metadata": metadata}))
    found = Checkpoint.open(folder)
    assert found.data_bytes == 3 and found.index_metadata == {}


def test_other_safetensors_files_are_no_part_of_it(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    write(folder / "consolidated.safetensors", {"a": entry("U8", [1], 0, 1)}, b"q")
    assert Checkpoint.open(folder).ignored == ("consolidated.safetensors",)


def _missing(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def _stale(folder: Path) -> None:
    write(folder / "model-00003-of-00009.safetensors", {"c": entry("U8", [1], 0, 1)}, b"q")


def _stale_single(folder: Path) -> None:
    write(folder / "model.safetensors", {"c": entry("U8", [1], 0, 1)}, b"q")


def _absent(folder: Path) -> None:
    _change_index(folder, lambda m: m.update(ghost="model-00001-of-00002.safetensors"))


def _unknown(folder: Path) -> None:
    _change_index(folder, lambda m: m.update({"c": m.pop("b")}))


def _outside(folder: Path) -> None:
    _change_index(folder, lambda m: m.update(a="../evil.safetensors"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, "names files that are not there: model-00002"),
        (_stale, "model-00003-of-00009.safetensors do not belong"),
        (_stale_single, "model.safetensors do not belong"),
        (_absent, "ghost is not in model-00001"),
        (_unknown, "b lies in model-00002.*unknown to the index"),
        (_outside, "outside its folder"),
    ],
)
def test_index_and_files_must_agree(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = sharded(tmp_path / "m")
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        Checkpoint.open(folder)


def test_shards_left_beside_a_single_file(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / INDEX_NAME).unlink()
    _stale_single(folder)
    with pytest.raises(ModelError, match="model-00001.* do not belong to model.safetensors"):
        Checkpoint.open(folder)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="only pytorch_model.bin"):
        Checkpoint.open(tmp_path)


def big(folder: Path, *, shards: int = 1, value: int = 0, at: int = 0, dtype: str = "U8") -> Path:
    """Two tensors of 40,000 bytes, in one file or two."""
    folder.mkdir()
    data = [bytearray(40_000), bytearray(40_000)]
    data[1][at] = value
    shape = [40_000] if dtype == "U8" else [20_000]
    if shards == 1:
        header = {"a": entry("U8", [40_000], 0, 40_000), "b": entry(dtype, shape, 40_000, 80_000)}
        write(folder / "model.safetensors", header, bytes(data[0] + data[1]))
    else:
        for name, part in zip("ab", data, strict=True):
            write(
                folder / f"model-{name}.safetensors",
                {name: entry("U8", [40_000], 0, 40_000)},
                bytes(part),
            )
        weight_map = {name: f"model-{name}.safetensors" for name in "ab"}
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "/x"}')
    return folder


def test_a_fingerprint_does_not_depend_on_files_paths_and_library_versions(tmp_path: Path) -> None:
    one, two = big(tmp_path / "one"), big(tmp_path / "two", shards=2)
    (two / "config.json").write_text(
        '{"transformers_version": "9", "hidden_size": 8, "torch_dtype": "bfloat16"}'
    )
    assert fingerprint(one)["digest"] == fingerprint(two)["digest"]
    assert compare(fingerprint(one), two) == []
    json.dumps(fingerprint(one))


@pytest.mark.parametrize("at", [0, 20_000, 39_999])
def test_a_fingerprint_names_a_tensor_with_other_values(at: int, tmp_path: Path) -> None:
    recorded = fingerprint(big(tmp_path / "one"))
    assert compare(recorded, big(tmp_path / "two", value=1, at=at)) == ["tensor b (other values)"]


def test_a_fingerprint_names_config_fields_and_shapes(tmp_path: Path) -> None:
    recorded = fingerprint(big(tmp_path / "one"))
    other = big(tmp_path / "two", dtype="BF16")
    (other / "config.json").write_text('{"hidden_size": 9, "eps": 1}')
    assert compare(recorded, other) == [
        "config field eps",
        "config field hidden_size",
        "tensor b (U8 [40000], now BF16 [20000])",
    ]
