"""Safetensors headers and the folders that hold them.

A safetensors file is 8 bytes with the header's length (little-endian), the header as JSON, then
the tensors' bytes without holes (format: https://github.com/huggingface/safetensors, "Format").
Everything a plan needs is in the header, so a 140 GB checkpoint is understood by reading a few
megabytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The format's own limit: a longer header is refused by every reader.
MAX_HEADER_BYTES = 100_000_000

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

_SHARD_PATTERN = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `begin` and `end` are byte offsets from the start of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Shard:
    """One safetensors file. `raw` is its header as stored, padding included; tensors in file
    order.
    """

    file: Path
    raw: bytes
    metadata: dict[str, str]
    tensors: tuple[TensorInfo, ...]
    file_bytes: int

    @property
    def data_begin(self) -> int:
        """Offset of the first tensor byte."""
        return 8 + len(self.raw)


def read_header(path: Path) -> Shard:
    """Read and check the header of one safetensors file.

    Raises:
        ModelError: The file cannot be read, is cut short, or its header breaks the format; all
            faults of the header's entries are listed, with the tensors' names.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES) or length < 2:
                raise _not_safetensors(
                    path, f"it has {size} bytes and claims a header of {length} bytes"
                )
            raw = stream.read(length)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror})", expected="a file that this user may read"
        ) from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _not_safetensors(path, f"its header is not usable JSON ({error})") from error
    if not isinstance(header, dict):
        raise _not_safetensors(path, f"its header is a JSON {type(header).__name__}")
    metadata = header.pop("__metadata__", None) or {}
    problems: list[str] = []
    tensors = [
        info
        for name, entry in header.items()
        if (info := _tensor(path, name, entry, 8 + length, problems)) is not None
    ]
    tensors.sort(key=lambda info: (info.begin, info.end))
    if not problems:
        problems = _layout_problems(tensors, 8 + length, size)
    if problems:
        raise _not_safetensors(path, "; ".join(problems[:20]))
    return Shard(path, raw, dict(metadata), tuple(tensors), size)


def _not_safetensors(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path}: {why}",
        expected="a whole safetensors file",
        hint="download or copy the file again, and compare its size with the source",
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the keys {', '.join(twice[:5])} occur twice")
    return found


def _tensor(
    path: Path, name: str, entry: Any, data_begin: int, problems: list[str]
) -> TensorInfo | None:
    """One header entry, or None after its fault was added to `problems`."""
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        problems.append(f"tensor {name}: its entry is not dtype, shape and data_offsets")
        return None
    if dtype not in DTYPE_BITS:
        problems.append(f"tensor {name}: dtype {dtype!r} is not known")
        return None
    numbers = (*shape, begin, end)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        problems.append(f"tensor {name}: shape and offsets must be whole numbers from 0 up")
        return None
    info = TensorInfo(name, path, dtype, shape, data_begin + begin, data_begin + end)
    bits = info.numel * DTYPE_BITS[dtype]
    if begin > end or bits != 8 * info.nbytes:
        problems.append(
            f"tensor {name}: {dtype} {list(shape)} takes {bits / 8:g} bytes, "
            f"its offsets span {end - begin}"
        )
        return None
    return info


def _layout_problems(tensors: list[TensorInfo], data_begin: int, size: int) -> list[str]:
    """Holes, overlaps and a wrong end: offsets must cover the file's data exactly."""
    problems = []
    position = data_begin
    for info in tensors:
        if info.begin != position:
            fault = "overlaps the tensor before it" if info.begin < position else "follows a hole"
            problems.append(f"tensor {info.name}: {fault} (byte {info.begin}, not {position})")
        position = info.end
    if position > size:
        last = next((info.name for info in tensors if info.end > size), "?")
        problems.append(
            f"the file is cut short: {size} bytes of {position}; tensor {last} is not whole"
        )
    elif position < size:
        problems.append(f"{size - position} bytes after the last tensor belong to nothing")
    return problems


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one model folder.

    Attributes:
        folder: The folder.
        shards: Its safetensors files by name, in the order of their names.
        tensors: Every tensor by name.
        index_metadata: `metadata` of the index file; None for a single file without an index.
        ignored: Other safetensors files there, which no loader of this layout reads.
    """

    folder: Path
    shards: tuple[Shard, ...]
    tensors: dict[str, TensorInfo] = field(repr=False)
    index_metadata: dict[str, Any] | None
    ignored: tuple[str, ...] = ()

    @property
    def data_bytes(self) -> int:
        """Sum of the tensors' bytes, which is what an index calls `total_size`."""
        return sum(info.nbytes for info in self.tensors.values())

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Read every header of a model folder: one `model.safetensors`, or shards with an index.

        Raises:
            ModelError: Nothing usable is there, shards are missing or broken, or the index and the
                files name different tensors.
        """
        if not folder.is_dir():
            raise ModelError(f"{folder}: is not a folder", expected="a folder with a model")
        present = sorted(path.name for path in folder.glob("*.safetensors"))
        index = _read_index(folder)
        if index is None:
            if SINGLE_NAME not in present:
                raise _no_weights(folder, present)
            _refuse_stale(folder, [n for n in present if _SHARD_PATTERN.fullmatch(n)], SINGLE_NAME)
            files = [SINGLE_NAME]
        else:
            files = sorted(set(index["weight_map"].values()))
            stale = [n for n in present if _SHARD_PATTERN.fullmatch(n) or n == SINGLE_NAME]
            _refuse_missing(folder, [n for n in files if n not in present])
            _refuse_stale(folder, [n for n in stale if n not in files], INDEX_NAME)
        shards = tuple(read_header(folder / name) for name in files)
        tensors = {info.name: info for shard in shards for info in shard.tensors}
        if index is not None:
            _check_index(folder, index["weight_map"], shards)
        metadata = None if index is None else index.get("metadata")  # totals; nothing rests on them
        return Checkpoint(
            folder,
            shards,
            tensors,
            None if index is None else dict(metadata) if isinstance(metadata, dict) else {},
            tuple(name for name in present if name not in files),
        )


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX_NAME
    try:
        index = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error})",
            expected="the index as transformers saves it",
        ) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: has no weight_map", expected="tensor names and their files")
    outside = sorted({str(v) for v in weight_map.values() if Path(str(v)).name != v})
    if outside:
        raise ModelError(
            f"{path}: names files outside its folder: {_some(outside)}",
            expected="names of files in the same folder",
        )
    return dict(index)


def _no_weights(folder: Path, present: list[str]) -> ModelError:
    others = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.gguf")
    )
    found = f"only {_some(present + others)}" if present or others else "no weights at all"
    return ModelError(
        f"{folder}: holds {found}",
        expected=f"{SINGLE_NAME}, or shards with {INDEX_NAME}",
        hint="save the model with save_pretrained of transformers, which writes safetensors",
    )


def _refuse_missing(folder: Path, missing: list[str]) -> None:
    if missing:
        raise ModelError(
            f"{folder}: {INDEX_NAME} names files that are not there: {_some(missing)}",
            expected="all files that the index names",
            hint="finish the download or the copy",
            details={"missing": missing},
        )


def _refuse_stale(folder: Path, stale: list[str], used: str) -> None:
    if stale:
        raise ModelError(
            f"{folder}: {_some(stale)} do not belong to {used}",
            expected="the files of one model",
            hint="move away the files of the older model",
            details={"files": stale},
        )


def _check_index(folder: Path, weight_map: dict[str, str], shards: tuple[Shard, ...]) -> None:
    """Index and headers must name the same tensors in the same files."""
    problems = []
    held = {(info.name, shard.file.name) for shard in shards for info in shard.tensors}
    named = set(weight_map.items())
    for name, file in sorted(named - held):
        problems.append(f"{name} is not in {file}")
    for name, file in sorted(held - named):
        problems.append(f"{name} lies in {file}, unknown to the index")
    if problems:
        raise ModelError(
            f"{folder / INDEX_NAME}: {_some(problems, 10, '; ')}",
            expected="an index that names exactly the tensors in the files",
            details={"problems": problems[:100]},
        )


def _some(names: Iterable[str], limit: int = 5, joint: str = ", ") -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return joint.join(listed[:limit]) + more
