"""Which files a run reads, and how their bytes are opened: local or remote, plain or packed."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

from tuneserve.errors import DataError

# What a folder is searched for. A file that is named explicitly may end in anything.
_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
# What a file that is damaged, cut short or unreachable raises while it is read.
READ_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)


def is_data_file(path: str) -> bool:
    """Whether the name ends like a data file, packed or not."""
    return kind_of(path) in _KINDS


def kind_of(path: str) -> str:
    """The ending that says what is inside, without the packing: ``.jsonl`` of ``a.jsonl.gz``."""
    name = path.rsplit("/", 1)[-1].lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


def expand_paths(paths: list[str]) -> list[str]:
    """The data files that paths stand for.

    Args:
        paths: Files, folders (searched recursively by ending), globs, and URLs of anything fsspec
            knows.

    Returns:
        Files, each once, sorted within each path.

    Raises:
        DataError: Paths that match nothing; all of them are listed.
    """
    found: dict[str, None] = {}
    problems: list[str] = []
    for path in paths:
        files, problem = _expand_remote(path) if "://" in path else _expand_local(path)
        if problem:
            problems.append(problem)
        found.update(dict.fromkeys(files))
    _refuse(problems)
    return list(found)


def _refuse(problems: list[str]) -> None:
    if not problems:
        return
    count = "a data path matches" if len(problems) == 1 else f"{len(problems)} data paths match"
    raise DataError(
        f"{count} nothing:\n    " + "\n    ".join(problems),
        expected=f"a file, a folder with {', '.join(_KINDS)} files, a glob or a URL",
        hint="mend data.train or data.eval in the run file",
        details={"unmatched": problems},
    )


def check_local(places: Mapping[str, str]) -> None:
    """Refuse local paths that match nothing; what is remote is not asked.

    Args:
        places: Where each path is written: a field, with file and line where they are known.

    Raises:
        DataError: Paths that match nothing; all of them are listed.
    """
    found = ((place, _expand_local(path)) for path, place in places.items() if "://" not in path)
    _refuse([f"{place}: {problem}" for place, (_, problem) in found if problem])


def ignored_files(paths: list[str]) -> list[str]:
    """Files in the folders among `paths` that do not end like data and are therefore not read."""
    found = []
    for path in paths:
        if "://" not in path and Path(path).is_dir():
            found += [str(p) for p in _walk(Path(path)) if not is_data_file(p.name)]
    return found


def _walk(folder: Path) -> list[Path]:
    """Files below a folder, without hidden ones and markers such as ``_SUCCESS``."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part[:1] in "._" for part in path.relative_to(folder).parts)
    )


def _expand_local(path: str) -> tuple[list[str], str]:
    place = Path(path)
    if place.is_file():
        return [path], ""
    if place.is_dir():
        files = [str(p) for p in _walk(place) if is_data_file(p.name)]
        return files, "" if files else f"{path}: the folder holds no data file"
    if glob.has_magic(path):
        matches = sorted(p for p in glob.glob(path, recursive=True))
        files = [p for p in matches if Path(p).is_file()]
        for folder in (p for p in matches if Path(p).is_dir()):
            files += [str(p) for p in _walk(Path(folder)) if is_data_file(p.name)]
        return files, "" if files else f"{path}: the glob matches no file"
    return [], f"{path}: there is no such file or folder"


def _expand_remote(path: str) -> tuple[list[str], str]:
    import fsspec

    try:
        system, place = fsspec.core.url_to_fs(path)
        if glob.has_magic(place):
            matches = sorted(cast("list[str]", system.glob(place)))
        elif system.isdir(place):
            matches = sorted(p for p in system.find(place) if is_data_file(p))
        else:
            matches = [place] if system.exists(place) else []
    except (ImportError, ValueError) as error:  # an unknown protocol, or its package is missing
        raise DataError(
            f"{path}: {error}",
            expected="a path, or a URL of a protocol that fsspec knows",
            hint="install the package for this protocol",
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be reached ({error})", expected="a place that answers"
        ) from error
    files = [str(system.unstrip_protocol(p)) for p in matches]
    return files, "" if files else f"{path}: there is nothing"


def open_raw(path: str) -> IO[bytes]:
    """The file's bytes as stored.

    Raises:
        DataError: It cannot be opened.
    """
    try:
        if "://" not in path:
            return Path(path).open("rb")
        import fsspec

        return cast("IO[bytes]", fsspec.open(path, "rb").open())
    except OSError as error:
        raise DataError(
            f"{path}: cannot be opened ({error.strerror or error})",
            expected="a file that this user may read",
        ) from error


def unpack(path: str, raw: IO[bytes]) -> IO[bytes]:
    """The bytes behind gzip, bzip2, xz or zstd, recognised by their first bytes; others pass
    through.
    """
    head = raw.read(6)
    raw.seek(0)
    if head[:2] == b"\x1f\x8b":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if re.match(rb"BZh[1-9]", head):
        return cast("IO[bytes]", bz2.BZ2File(raw))
    if head == b"\xfd7zXZ\0":
        return cast("IO[bytes]", lzma.LZMAFile(raw))
    if head[:4] == b"\x28\xb5\x2f\xfd":
        import pyarrow as pa

        # pyarrow brings zstd along; Python 3.11 has none.
        return cast("IO[bytes]", pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"))
    return raw


def size_bytes(paths: list[str]) -> int:
    """Stored size of all files together; what cannot be asked counts as 0."""
    total = 0
    for path in paths:
        with open_raw(path) as stream:
            total += stream.seek(0, io.SEEK_END)
    return total
