"""Which artifacts nobody needs any more, and their removal.

Kept are: what a proven release needs, what a run that is under way made or re-used, what the last
settled run under each served name used, whatever was used lately, and everything any of these was
made from.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.artifacts import MANIFEST, Store
from tuneserve.errors import InputError
from tuneserve.progress import human_bytes
from tuneserve.runs import Runs

_DAY_SECONDS = 86400.0
# Scratch of attempts and damaged artifacts that were set aside.
_LEFTOVERS = (".drafts", ".work", ".damaged", ".trash")


@dataclass
class Sweep:
    """What stays and why, and what goes: bytes by id or by path in the store."""

    kept: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, int] = field(default_factory=dict)
    leftovers: dict[str, int] = field(default_factory=dict)
    busy: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last_used: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """How much removing gives back."""
        return sum(self.artifacts.values()) + sum(self.leftovers.values())

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "kept": self.kept,
            "artifacts": self.artifacts,
            "leftovers": self.leftovers,
            "busy": self.busy,
            "notes": self.notes,
            "bytes": self.bytes,
        }


def check_days(keep_days: float) -> None:
    """Refuse a time to keep that no artifact could be within.

    Raises:
        InputError: `keep_days` is negative or not a number.
    """
    if not keep_days >= 0:
        raise InputError(
            f"--keep-days is {keep_days:g}",
            expected="0 days or more; 0 keeps nothing for being used lately",
            hint="`tuneserve gc --keep-days 14` keeps what was used within two weeks",
        )


def survey(store: Store, *, keep_days: float) -> Sweep:
    """Find what can go; removes nothing.

    Args:
        store: The store; every TUNESERVE_HOME that used it has to be readable from here.
        keep_days: What was used within so many days stays.

    Raises:
        InputError: The store is used from a TUNESERVE_HOME whose releases cannot be seen, or
            `keep_days` is negative.
    """
    check_days(keep_days)
    manifests = dict(_manifests(store.root))
    recent = time.time() - keep_days * _DAY_SECONDS
    reasons = dict(_roots(store, manifests, recent))
    sweep = Sweep()
    for id, why in reasons.items():
        for needed in closure(id, manifests):
            sweep.kept.setdefault(needed, why if needed == id else f"{id} was made from it")
    for id in sorted(set(manifests) - set(sweep.kept)):
        sweep.artifacts[id] = _size(store.root / id)
        sweep.last_used[id] = store.last_used(id)
    for name in _LEFTOVERS:
        for path in sorted((store.root / name).glob("*")):
            if path.stat().st_mtime < recent and not _is_locked(store, path.name):
                sweep.leftovers[str(path.relative_to(store.root))] = _size(path)
    return sweep


def remove(store: Store, sweep: Sweep) -> None:
    """Remove what `survey` found; what another process took up since stays, as `busy`."""
    for id in list(sweep.artifacts):
        with _try_lock(store, id) as mine:
            if not mine or store.last_used(id) != sweep.last_used[id]:
                sweep.busy.append(id)
                del sweep.artifacts[id]
                continue
            trash = store.root / ".trash" / id
            trash.parent.mkdir(exist_ok=True)
            shutil.rmtree(trash, ignore_errors=True)
            (store.root / id).rename(trash)  # never a half-removed artifact under its own name
        shutil.rmtree(trash, ignore_errors=True)
    for name in list(sweep.leftovers):
        with _try_lock(store, Path(name).name) as mine:
            if mine:
                shutil.rmtree(store.root / name, ignore_errors=True)
            else:
                sweep.busy.append(name)
                del sweep.leftovers[name]


def sweep_text(sweep: Sweep, *, removed: bool) -> str:
    """The sweep for people."""
    lines = [*sweep.notes, *(f"keep    {id}: {why}" for id, why in sorted(sweep.kept.items()))]
    verb = "removed" if removed else "remove "
    gone = {**sweep.artifacts, **sweep.leftovers}
    lines += [f"{verb} {id}: {human_bytes(size)}" for id, size in gone.items()]
    lines += [f"busy    {id}: in use, left alone" for id in sweep.busy]
    done = "freed" if removed else "would be freed; add --yes to do it"
    lines.append(f"{human_bytes(sweep.bytes)} {done}" if gone else "nothing to remove")
    return "\n".join(lines)


def _manifests(root: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in sorted(root.glob(f"[!.]*/{MANIFEST}")):
        try:
            yield path.parent.name, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # damaged: the next run that asks for it sets it aside


def _roots(
    store: Store, manifests: Mapping[str, Mapping[str, Any]], recent: float
) -> Iterator[tuple[str, str]]:
    """Ids that are needed for themselves, and why; the strongest reason first."""
    found: dict[str, str] = {}
    for home in store.homes():
        _roots_of(home, found)
    for id in manifests:
        if store.last_used(id) >= recent:
            found.setdefault(id, "used lately")
    yield from ((id, why) for id, why in found.items() if id in manifests)


def needed_by(home: Path, store: Store) -> set[str]:
    """Ids that a TUNESERVE_HOME needs, and what they were made from as far as the store knows."""
    roots: dict[str, str] = {}
    _roots_of(home, roots)
    manifests = dict(_manifests(store.root))
    return {*roots, *(needed for id in roots for needed in closure(id, manifests))}


def _roots_of(home: Path, found: dict[str, str]) -> None:
    runs = Runs(home / "runs")
    releases = _releases(home)
    for id, release in releases:
        found.setdefault(id, f"release {release} serves it, or did")
    known = {release for _, release in releases}
    for record in runs.running():
        _note(found, record.used, f"run {record.id} is under way")
    for record in runs.all():
        if record.release in known:
            _note(found, record.used, f"the lineage of release {record.release}")
    for served in {record.served for record in runs.all()}:
        last = runs.last_settled(served)
        if last:
            _note(found, last.used, f"the last run of {served}")


def _note(found: dict[str, str], ids: Iterable[str], why: str) -> None:
    for id in ids:
        found.setdefault(id, why)


def _releases(home: Path) -> list[tuple[str, str]]:
    """Artifact and id of every release that serves or could serve again."""
    path = home / "run" / "releases.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({error}), so nobody knows what serves",
            expected="the state as `tuneserve` wrote it",
            hint="mend or move the file, then run the command again",
        ) from error
    entries = state["names"].values()
    used = {entry[what] for entry in entries for what in ("active", "promoting", "warm")}
    return [
        (release["artifact"] or Path(release["model"]).name, id)
        for id, release in state["releases"].items()
        if release["proven"] or id in used
    ]


def closure(id: str, manifests: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """An artifact and all it was made from, as far as the manifests know."""
    found: set[str] = set()
    todo = [id]
    while todo:
        current = todo.pop()
        if current not in found and current in manifests:
            found.add(current)
            todo += manifests[current]["inputs"].values()
    return found


def _size(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


@contextlib.contextmanager
def _try_lock(store: Store, id: str) -> Iterator[bool]:
    """Whether nobody is making or removing the artifact; it stays so inside the body."""
    folder = store.root / ".locks"
    folder.mkdir(exist_ok=True)
    with (folder / f"{id}.lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _is_locked(store: Store, id: str) -> bool:
    with _try_lock(store, id) as mine:
        return not mine
