"""The artifact store: folders named by what made them, real only once their manifest is there.

A stage writes into a draft. Committing a draft hashes and fsyncs every file, writes
`manifest.json` last and renames the folder to its id. So a crash at any moment leaves either a
whole artifact or none; a folder without a manifest is not an artifact. A hit is used only after
its files were checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.errors import InputError
from tuneserve.homes import home_id, written_id
from tuneserve.places import home

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_HASH_BLOCK_BYTES = 4 * 2**20
_HASHING_THREADS = 4


@dataclass(frozen=True)
class Artifact:
    """A finished artifact: `path` holds its files, `manifest` says how it came to be."""

    id: str
    path: Path
    manifest: Mapping[str, Any] = field(repr=False)

    @property
    def metrics(self) -> dict[str, Any]:
        """What the stage measured."""
        return dict(self.manifest["metrics"])


@dataclass(frozen=True)
class Draft:
    """A folder being filled. `work` survives a killed attempt, so that the next one can resume."""

    id: str
    path: Path
    work: Path


def artifact_id(kind: str, key: Mapping[str, Any]) -> str:
    """The id that `key` gives an artifact of `kind`: the kind and 16 hex digits of a SHA-256."""
    text = json.dumps({"kind": kind, **key}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_json_atomic(path: Path, data: Any) -> None:
    """Write JSON so that readers see the old file or the new one, never a part."""
    text = json.dumps(data, indent=1, sort_keys=True, allow_nan=False)
    write_atomic(path, f"{text}\n".encode(), path.with_name(f".{path.name}.{os.getpid()}"))


def write_atomic(path: Path, data: bytes, provisional: Path) -> None:
    """Write a file so that readers see the old one or the new one, never a part.

    Args:
        path: The file.
        data: What it shall hold.
        provisional: Where it is written first, on the same file system; gone afterwards.
    """
    try:
        with provisional.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        provisional.replace(path)
    except BaseException:
        provisional.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Store:
    """Artifacts in one local folder, shared safely by several processes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, id: str, *, rehash: bool = False) -> Artifact | None:
        """The artifact if it is there and whole, else None.

        Sizes and modification times are always compared; a file's hash wherever these differ, or
        for every file with `rehash`. A damaged artifact is set aside, said so, and counts as
        absent.
        """
        path = self.root / id
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if path.is_dir():
                self._set_aside(id, "it has no manifest")
            return None
        except (OSError, ValueError) as error:
            self._set_aside(id, f"its manifest cannot be read ({error})")
            return None
        damage = _damage(path, manifest, rehash=rehash)
        if damage:
            self._set_aside(id, damage)
            return None
        return Artifact(id, path, manifest)

    def get(self, id: str) -> Artifact:
        """The artifact named by a full id or by a unique beginning of one.

        Raises:
            InputError: There is none, several begin so, or it is damaged.
        """
        matches = [id] if (self.root / id / MANIFEST).is_file() else []
        if not matches and self.root.is_dir():
            near = (a for a in self.root.iterdir() if id and a.name.startswith(id))
            matches = sorted(a.name for a in near if (a / MANIFEST).is_file())
        if len(matches) != 1:
            found = (
                f"{len(matches)} artifacts begin so: {', '.join(matches[:5])}"
                if matches
                else "there is none"
            )
            raise InputError(
                f"artifact {id!r}: {found}",
                expected=f"an artifact id in {self.root}{self._such_as()}",
                hint="`tuneserve status` lists what is serving; the store's folders are the ids",
            )
        artifact = self.find(matches[0])
        if artifact is None:
            raise InputError(
                f"artifact {id!r} is damaged and was set aside",
                expected="files with the hashes of the manifest",
                hint="run the stage that made it again",
            )
        return artifact

    def _such_as(self) -> str:
        """The newest artifacts, for whoever named one that is not there."""
        made = [path.parent for path in self.root.glob(f"[!.]*/{MANIFEST}")]
        newest = sorted(made, key=lambda folder: folder.name)
        newest.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        return (
            f", such as {', '.join(f.name for f in newest[:3])}" if newest else ", which is empty"
        )

    def note_use(self, *ids: str) -> None:
        """Remember that artifacts were used now, and from which TUNESERVE_HOME: `tuneserve gc`
        keeps them.
        """
        if not ids and not self.root.is_dir():
            return  # nothing is in it that a home could need
        user = f"{socket.gethostname()}\n{home()}\n"
        former = ""
        with contextlib.suppress(OSError):
            former = written_id(home())
        name = home_id(home(), make=True)
        with contextlib.suppress(OSError):  # a store that is only read needs no notes
            for folder in (".used", ".users"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            if former not in ("", name) and self._is_of(home()):
                (self.root / ".users" / former).unlink(missing_ok=True)
            if name:
                _note_user(self.root / ".users" / name, user)
            for id in ids:
                (self.root / ".used" / id).touch()

    def _is_of(self, home: Path) -> bool:
        """Whether it lies in a home, and was copied with it: the original has its own."""
        inside = self.root.resolve().is_relative_to(home.resolve())
        return inside and self.root.stat().st_dev == home.stat().st_dev

    def last_used(self, id: str) -> float:
        """When an artifact was made or last used, in seconds since 1970."""
        times = [0.0]
        for path in (self.root / id / MANIFEST, self.root / ".used" / id):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def homes(self) -> list[Path]:
        """Every TUNESERVE_HOME that used this store.

        Raises:
            InputError: One of them cannot be seen from here.
        """
        found, own = {home()}, home_id(home())
        for user in sorted((self.root / ".users").glob("[!.]*")):
            if user.name == own:  # wherever it lay when it wrote its note
                continue
            host, _, path = user.read_text(encoding="utf-8").strip().partition("\n")
            # Hosts often use one path for homes of their own: the identity tells them apart.
            if home_id(Path(path)) != user.name:
                # On this host it may be moved or not mounted, and go on serving.
                raise InputError(
                    f"{self.root} is also used from {path} on {host}, which cannot be seen here",
                    expected="every TUNESERVE_HOME of the store readable, to know what serves",
                    hint="mount it, or run this there (one that was moved says so at its next "
                    f"run); remove {user} if that home is gone for good",
                )
            found.add(Path(path))
        return sorted(found)

    @contextlib.contextmanager
    def lock(self, id: str) -> Iterator[None]:
        """Hold the right to make artifact `id`; a second process waits. The lock ends with its
        holder.
        """
        folder = self.root / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{id}.lock").open("a+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                log.info("waiting: process %s is making %s", stream.read().strip() or "?", id)
                fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0)
            stream.truncate()
            stream.write(str(os.getpid()))
            stream.flush()
            yield

    def work(self, id: str) -> Path:
        """Where attempts at `id` leave what the next one can use; there while one is under way."""
        return self.root / ".work" / id

    @contextlib.contextmanager
    def draft(self, id: str) -> Iterator[Draft]:
        """An empty folder for artifact `id`, gone again when the body raises. Hold `lock(id)`."""
        draft = Draft(id, self.root / ".drafts" / id, self.work(id))
        shutil.rmtree(draft.path, ignore_errors=True)  # left by an attempt that was killed
        draft.path.mkdir(parents=True)
        draft.work.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                draft.work.rmdir()  # only when nothing in it is worth resuming from

    def commit(self, draft: Draft, stage: str, facts: Mapping[str, Any]) -> Artifact:
        """Turn a filled draft into artifact `draft.id`.

        Args:
            draft: From `draft()`, filled.
            stage: The stage that filled it.
            facts: key, inputs, config, versions, metrics, started, finished, seconds: what the
                manifest keeps.
        """
        paths = [path for path in sorted(draft.path.rglob("*")) if path.is_file()]
        # A core hashes 2 GB a second, a disk may read more: shards are read beside one another.
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            files = list(pool.map(functools.partial(_entry, draft.path), paths))
        for folder in sorted((p for p in draft.path.rglob("*") if p.is_dir()), reverse=True):
            fsync_directory(folder)
        manifest = {"format": FORMAT, "id": draft.id, "stage": stage, "files": files, **facts}
        write_json_atomic(draft.path / MANIFEST, manifest)
        final = self.root / draft.id
        draft.path.rename(final)
        fsync_directory(self.root)
        shutil.rmtree(draft.work, ignore_errors=True)
        return Artifact(draft.id, final, manifest)

    def _set_aside(self, id: str, why: str) -> None:
        trash = self.root / ".damaged" / f"{id}-{time.time_ns()}"
        trash.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            (self.root / id).rename(trash)
        log.warning("artifact %s is damaged (%s): set aside, it will be made again", id, why)


def _note_user(note: Path, user: str) -> None:
    """Write down who uses the store; anew where the home was moved since."""
    if note.is_file() and note.read_text(encoding="utf-8") == user:
        return
    provisional = note.with_name(f".{note.name}.{os.getpid()}")
    provisional.write_text(user, encoding="utf-8")
    provisional.replace(note)


def _entry(root: Path, path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    stat = path.stat()
    return {
        "path": path.relative_to(root).as_posix(),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "sha256": file_sha256(path),
    }


def _damage(root: Path, manifest: Mapping[str, Any], *, rehash: bool) -> str:
    """What is wrong with the files of an artifact; empty when nothing is."""
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')!r}, not {FORMAT}"
    for entry in manifest["files"]:
        path = root / entry["path"]
        try:
            stat = path.stat()
        except OSError:
            return f"{entry['path']} is missing"
        if stat.st_size != entry["size"]:
            return f"{entry['path']} has {stat.st_size} bytes, not {entry['size']}"
        if (rehash or stat.st_mtime_ns != entry["mtime_ns"]) and file_sha256(path) != entry[
            "sha256"
        ]:
            return f"the bytes of {entry['path']} changed"
    return ""
