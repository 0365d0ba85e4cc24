"""The files of a run: their short names, their formats, and what refuses them as a whole."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tuneserve.config import DataSection
from tuneserve.data.class_labels import describe_labels
from tuneserve.data.codes import CODES
from tuneserve.data.files import expand_paths, ignored_files, size_bytes
from tuneserve.data.foreign import near_json, rows_inside
from tuneserve.data.formats import CONVERTERS, REFUSED, detect
from tuneserve.data.readers import Block, read_blocks
from tuneserve.data.worker import RawRow, rows_of
from tuneserve.errors import DataError

log = logging.getLogger(__name__)

_SNIFFED_ROWS = 200
# What people call the two sides of an exchange in files that were made for something else.
_ASKED = ("prompt", "question", "query", "instruction", "input", "user")
_ANSWERED = ("completion", "answer", "response", "output", "reply", "assistant")


@dataclass(frozen=True)
class Sources:
    """What is read.

    Attributes:
        paths: Files; the first `train_count` are training files.
        names: Short names, unique, without the folders that all files share.
        formats: Format of each file.
        ignored: Files in the folders that do not end like data.
        size_bytes: Stored size of all files.
    """

    paths: list[str]
    names: list[str]
    formats: list[str]
    train_count: int
    ignored: list[str]
    size_bytes: int

    def blocks(self) -> Iterator[Block]:
        """All rows of all files, in order."""
        for index, path in enumerate(self.paths):
            for block in read_blocks(path, index):
                block.format = self.formats[index]
                yield block


def open_sources(data: DataSection) -> Sources:
    """Find the files and decide their formats.

    Raises:
        DataError: Paths that match nothing, or files that are refused as a whole; all are listed.
    """
    train = expand_paths(data.train)
    held_out = expand_paths(data.eval) if data.eval else []
    if both := sorted(set(train) & set(held_out)):
        raise DataError(
            f"the same file is in data.train and data.eval: {', '.join(both)}",
            expected="different conversations on both sides",
            hint="remove it from one of them, or leave data.eval empty to split it",
        )
    paths = train + held_out
    ignored = ignored_files([*data.train, *data.eval])
    for path in ignored:
        log.warning("%s does not end like a data file and is not read", path)
    formats, problems, usable = [], [], []
    for path in paths:
        try:
            formats.append(_format_of(path, data.format))
            usable.append(path)
        except DataError as error:
            problems.append(error)
    for problem in problems:
        problem.details["usable"] = usable
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DataError(
            f"{len(problems)} data files cannot be used:\n    "
            + "\n    ".join(error.message for error in problems),
            expected=problems[0].expected,
            hint=problems[0].hint,
            details={"usable": usable},
        )
    names = _short_names(paths)
    for name, format in zip(names, formats, strict=True):
        log.info("%s: %s", name, format)
    return Sources(paths, names, formats, len(train), ignored, size_bytes(paths))


def _short_names(paths: list[str]) -> list[str]:
    """Paths without what they share: the artifact must not say where on a machine the data lay."""
    if len(paths) == 1:
        return [paths[0].rsplit("/", 1)[-1]]
    folders = [path.rsplit("/", 1)[0] if "/" in path else "" for path in paths]
    if any("://" in path for path in paths):
        shared = os.path.commonprefix([f"{folder}/" for folder in folders])
        shared = shared[: shared.rfind("/") + 1]
    else:
        shared = os.path.commonpath([os.path.abspath(folder) for folder in folders]) + "/"
        paths = [os.path.abspath(path) for path in paths]
    return [path.removeprefix(shared) for path in paths]


def _format_of(path: str, wanted: str) -> str:
    """The format that most of the first rows have.

    Raises:
        DataError: It is one that cannot be trained on, or none.
    """
    first = next(iter(read_blocks(path, 0)))
    seen: Counter[str] = Counter()
    parsed: list[RawRow] = []
    problem = what = ""
    for row, error in islice(rows_of(first), _SNIFFED_ROWS):
        if error is None:
            seen[detect(row.value)] += 1
            parsed.append(row)
        elif not problem:
            problem = f"{path}:{row.line}: {error.code}: {error.message}"
            what = CODES[error.code].hint
    if not seen:
        raise DataError(
            f"{path}: no row can be read; the first problem: {problem}",
            expected="JSONL, a JSON array, CSV or Parquet",
            hint=f"{_nearly(first) or what}; docs/data.md shows the formats",
        )
    found = seen.most_common(1)[0][0]
    if found in REFUSED:
        extra = (
            f" ({describe_labels([row.value for row in parsed])})" if found == "class_label" else ""
        )
        raise DataError(
            f"{path}: the file holds {REFUSED[found]}{extra}",
            expected=f"one of {', '.join(CONVERTERS)}",
            hint="remove the file from the run, or turn its rows into conversations",
            details={"format": found},
        )
    if wanted != "auto":
        return wanted
    if not found:
        keys = ", ".join(sorted(parsed[0].value)[:12]) or "none"
        raise DataError(
            f"{path}: no known format; the keys of its first row are {keys}",
            expected="messages; conversations (from, value); instruction and output; or prompt and "
            "completion",
            hint=_what_to_rename(parsed[0].value, alone=len(parsed) == 1),
        )
    return found


def _nearly(block: Block) -> str:
    """What to do about the first line of a file in which no line is JSON."""
    if block.kind != "lines":
        return ""
    return near_json(block.data.lstrip().partition(b"\n")[0].decode("utf-8", "replace"))


def _what_to_rename(row: dict[str, Any], *, alone: bool) -> str:
    """What makes a row of no known format one that is, by the names of its keys."""
    formats = "docs/data.md shows the formats"
    if "mapping" in row:  # ChatGPT's conversations.json
        return (
            "the key mapping is that of ChatGPT's export, a tree of messages: write each "
            f'conversation as {{"messages": [{{"role", "content"}}, ...]}}; {formats}'
        )
    if alone and (key := rows_inside(row)):
        inside = "." + key if key.isidentifier() else f".[{json.dumps(key)}]"
        return f"the rows are in {key}: write them one a line: jq -c '{inside}[]' FILE > NEW"
    if len(row) == 1 and ";" in (only := next(iter(row))):
        return f"save it with commas, not semicolons, between the columns {only}"
    names = {key.strip().lower(): key for key in row}
    asked = next((names[name] for name in _ASKED if name in names), None)
    answered = next((names[name] for name in _ANSWERED if name in names), None)
    if asked and answered:
        return f"rename the columns to prompt and completion: {asked} and {answered}; {formats}"
    keys = ", ".join(sorted(row)[:12]) or "none"
    return (
        f"of {keys}, rename the columns to prompt and completion that hold what is asked and what "
        f"is answered, or remove the file; {formats}"
    )
