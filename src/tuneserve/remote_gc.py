"""Which artifacts of an object store nobody needs any more, and their removal.

No machine sees what the others serve. So each says in the object store what it needs before every
stage (`RemoteStore.note_needs`), and whatever any of them named last stays, with everything it was
made from, and whatever was uploaded lately.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tuneserve.artifacts import MANIFEST, Store
from tuneserve.errors import InputError
from tuneserve.gc import Sweep, check_days, closure, needed_by
from tuneserve.places import home
from tuneserve.remote import USERS, RemoteStore, reported

log = logging.getLogger(__name__)

_DAY_SECONDS = 86400.0
# An upload without its manifest may be under way, and its machine may be busy for long.
_LEAST_DAYS = 1.0


def survey_remote(remote: RemoteStore, store: Store, *, keep_days: float) -> Sweep:
    """Find what can go from the object store; removes nothing.

    Args:
        remote: The object store.
        store: The local store, whose needs are said there first.
        keep_days: What was uploaded within so many days stays; at least one.

    Raises:
        StoreError: The object store did not answer.
        InputError: What a machine said cannot be read, or `keep_days` is negative.
    """
    check_days(keep_days)
    remote.note_needs(needed_by(home(), store))
    recent = time.time() - max(keep_days, _LEAST_DAYS) * _DAY_SECONDS
    with reported(remote.url, "list"):
        system, root = remote.open()
        objects = _objects(system, root)
        manifests = _manifests(system, root, objects)
        users = _users(system, root, objects)
        sweep = Sweep()
        for user in users:
            said = datetime.fromtimestamp(user["noted"], UTC).isoformat(timespec="seconds")
            who = f"{user['home']} on {user['host']}"
            sweep.notes.append(f"{who} needs {len(user['needed'])} artifacts, as it said {said}")
            for id in user["needed"]:
                _keep(sweep, id, f"{who} needs it", manifests)
        for id in manifests:
            sweep.last_used[id] = _modified(system, f"{root}/{id}/{MANIFEST}")
            if sweep.last_used[id] >= recent:
                _keep(sweep, id, "uploaded lately", manifests)
        for id, uploads in _uploads(objects).items():
            whole = manifests.get(id, {}).get("remote")
            for upload, files in uploads.items():
                newest = max(_modified(system, f"{root}/{name}") for name in files)
                if upload != whole and newest < recent:
                    sweep.leftovers[f"{id}/{upload}"] = sum(files.values())
        for id in sorted(set(manifests) - set(sweep.kept)):
            prefix = f"{id}/"
            sweep.artifacts[id] = sum(n for name, n in objects.items() if name.startswith(prefix))
            for name in [name for name in sweep.leftovers if name.startswith(prefix)]:
                del sweep.leftovers[name]  # it goes with the artifact
    return sweep


def remove_remote(remote: RemoteStore, sweep: Sweep) -> None:
    """Remove what `survey_remote` found; what a machine took up since stays, as `busy`.

    The manifest goes first: whatever happens then, what is left is no artifact.

    Raises:
        StoreError: The object store did not answer; what was removed until then is removed.
    """
    with reported(remote.url, "remove"):
        system, root = remote.open()
        objects = _objects(system, root)
        manifests = _manifests(system, root, objects)
        needed: set[str] = set()
        for user in _users(system, root, objects):
            needed.update(*(closure(id, manifests) for id in user["needed"]))
        for id in list(sweep.artifacts):
            manifest = f"{id}/{MANIFEST}"
            if (
                id not in manifests
                or id in needed
                or (_modified(system, f"{root}/{manifest}") != sweep.last_used[id])
            ):
                sweep.busy.append(id)
                del sweep.artifacts[id]
                continue
            system.rm_file(f"{root}/{manifest}")
            _remove(system, root, [n for n in objects if n.startswith(f"{id}/") and n != manifest])
        for name in list(sweep.leftovers):
            id, _, upload = name.partition("/")
            if manifests.get(id, {}).get("remote") == upload:  # its upload was finished since
                sweep.busy.append(name)
                del sweep.leftovers[name]
                continue
            _remove(system, root, [n for n in objects if n.startswith(f"{name}/")])


def _keep(sweep: Sweep, id: str, why: str, manifests: Mapping[str, Mapping[str, Any]]) -> None:
    for needed in closure(id, manifests):
        sweep.kept.setdefault(needed, why if needed == id else f"{id} was made from it")


def _remove(system: Any, root: str, names: list[str]) -> None:
    for name in names:
        system.rm_file(f"{root}/{name}")


def _objects(system: Any, root: str) -> dict[str, int]:
    """Bytes of every object, by its name below the prefix."""
    try:
        found = system.find(root, detail=True)
    except FileNotFoundError:
        return {}
    return {name[len(root) + 1 :]: int(about["size"] or 0) for name, about in found.items()}


def _uploads(objects: Mapping[str, int]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes of every file of every upload, by artifact and upload."""
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for name, size in objects.items():
        parts = name.split("/")
        if len(parts) > 2 and not name.startswith("."):
            found[parts[0]][parts[1]][name] = size
    return found


def _manifests(system: Any, root: str, objects: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in objects:
        id, _, rest = name.partition("/")
        if rest == MANIFEST and not id.startswith("."):
            try:
                found[id] = json.loads(system.cat_file(f"{root}/{name}"))
            except (FileNotFoundError, ValueError):
                continue  # gone meanwhile, or damaged: the next `pull` drops it
    return found


def _users(system: Any, root: str, objects: Mapping[str, int]) -> list[dict[str, Any]]:
    found = []
    for name in sorted(objects):
        if name.startswith(f"{USERS}/"):
            try:
                said = json.loads(system.cat_file(f"{root}/{name}"))
                found.append({key: said[key] for key in ("host", "home", "noted", "needed")})
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{root}/{name} cannot be read ({error}), so nobody knows what that machine "
                    "needs",
                    expected="a list as `tuneserve` wrote it",
                    hint="remove that object, and run `tuneserve gc --remote URL` on that machine",
                ) from error
    return found


def _modified(system: Any, path: str) -> float:
    """When an object was written, in seconds since 1970."""
    when: datetime = system.modified(path)
    return when.timestamp() if when.tzinfo else when.replace(tzinfo=UTC).timestamp()
