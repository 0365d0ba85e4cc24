"""Who owns an output folder, and which of its shards are finished.

The journal is one file in the folder: a line that says which merge this is, then one line per
finished shard. Holding its lock is holding the folder. It is removed when the merge is complete,
so a folder has either a journal (unfinished) or a `mergeproof.json` (finished).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tuneserve.artifacts import fsync_directory
from tuneserve.errors import OutputExists

JOURNAL_NAME = ".tuneserve-merge.jsonl"
PROOF_NAME = "mergeproof.json"
PART_SUFFIX = ".part"


class Journal:
    """The lock and the record of one output folder."""

    def __init__(self, folder: Path, descriptor: int, finished: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        self.finished = finished
        self._descriptor = descriptor

    @staticmethod
    def open(folder: Path, key: str) -> Journal:
        """Take the folder for the merge `key`, new or to be resumed.

        Raises:
            OutputExists: The folder holds something else, another merge's work, or is being
                written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JOURNAL_NAME
        if not path.exists():
            _refuse_foreign(folder)
        descriptor = _lock(path)
        try:
            lines = _lines(descriptor)
            if lines and lines[0].get("merge") != key:
                raise OutputExists(
                    f"{folder}: holds an unfinished merge of another base, adapter or setting",
                    expected="an empty folder, or the unfinished work of this same merge",
                    hint="choose another folder, or remove this one",
                )
            journal = Journal(folder, descriptor, {})
            if not lines:
                os.ftruncate(descriptor, 0)
                journal._append({"merge": key})
            journal.finished = {
                line["shard"]: line for line in lines[1:] if _still_there(folder, line)
            }
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    def part(self, name: str) -> Path:
        """The provisional file of a shard."""
        return self.folder / f".{name}{PART_SUFFIX}"

    def finish(self, name: str, report: dict[str, Any]) -> None:
        """Give a finished, fsynced part its name, and note it."""
        final = self.folder / name
        self.part(name).replace(final)
        fsync_directory(self.folder)
        line = {"shard": name, "mtime_ns": final.stat().st_mtime_ns, **report}
        self._append(line)
        self.finished[name] = line

    def discard_parts(self) -> None:
        """Remove provisional files, left by a killed attempt or a failure."""
        for path in self.folder.rglob(f".*{PART_SUFFIX}"):
            path.unlink(missing_ok=True)

    def discard(self, names: Collection[str]) -> None:
        """Remove files of this merge, named relative to the folder; they are not finished then."""
        for path in (self.folder / name for name in names):
            path.unlink(missing_ok=True)
            if path.parent != self.folder and path.parent.is_dir():
                with contextlib.suppress(OSError):  # not empty yet
                    path.parent.rmdir()
        self.finished = {name: line for name, line in self.finished.items() if name not in names}

    def complete(self) -> None:
        """The merge is whole: the journal goes.

        Should it come back after a crash, the same merge goes on, with nothing to do.
        """
        (self.folder / JOURNAL_NAME).unlink()
        with contextlib.suppress(OSError):
            fsync_directory(self.folder)

    def close(self) -> None:
        """Give the folder free."""
        os.close(self._descriptor)

    def _append(self, line: dict[str, Any]) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        rest = json.dumps(line, sort_keys=True).encode() + b"\n"
        while rest:  # a disk that fills up takes a part first
            rest = rest[os.write(self._descriptor, rest) :]
        os.fsync(self._descriptor)


def _refuse_foreign(folder: Path) -> None:
    present = sorted(path.name for path in folder.iterdir())
    if present:
        raise OutputExists(
            f"{folder}: is not empty ({', '.join(present[:5])})",
            expected="an empty folder, or the unfinished work of this same merge",
            hint="choose another folder, or remove this one",
        )


def _lock(path: Path) -> int:
    """Open and lock the journal; another process may finish and remove it in between."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputExists(
                f"{path.parent}: another merge is writing it at this moment",
                expected="one merge per folder",
                hint="wait for it, or choose another folder",
            ) from error
        try:
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
        _refuse_foreign(path.parent)


def _lines(descriptor: int) -> list[dict[str, Any]]:
    """The whole lines; a line that a crash cut short is cut off, so that the next one starts
    clean.
    """
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0)
    lines, good = [], 0
    for raw in data.splitlines(keepends=True):
        try:
            if not raw.endswith(b"\n"):
                break
            lines.append(json.loads(raw))
        except ValueError:
            break
        good += len(raw)
    os.ftruncate(descriptor, good)
    return lines


def _still_there(folder: Path, line: dict[str, Any]) -> bool:
    """Whether a finished shard is as it was left."""
    try:
        stat = (folder / line["shard"]).stat()
    except OSError:
        return False
    return stat.st_size == line["bytes"] and stat.st_mtime_ns == line["mtime_ns"]
