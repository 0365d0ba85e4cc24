"""Artifacts kept in an object store as well (s3://, gs://, ...), so that other machines find them.

PREFIX/ID/manifest.json      what the artifact is, and under `remote` which upload holds its files
PREFIX/ID/UPLOAD/...         the files of one upload
PREFIX/.users/HOME.json      what a TUNESERVE_HOME needs, for `tuneserve gc --remote URL`

The local store's promises hold: files first, the manifest last, so that a broken upload is no
artifact; two uploads at once never mix; what is fetched is hashed before it counts.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tuneserve.artifacts import MANIFEST, Artifact, Store, file_sha256
from tuneserve.errors import DiskFull, InputError, StoreError, StoreRefused
from tuneserve.homes import home_id
from tuneserve.places import home

log = logging.getLogger(__name__)

USERS = ".users"
_KEYS = {"stage", "files", "inputs", "metrics", "seconds", "remote"}
# What S3 answers again to the same request with the same credentials.
_NEVER = {"NoSuchBucket", "InvalidBucketName", "AuthorizationHeaderMalformed", "PermanentRedirect"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}


class RemoteStore:
    """The object store of a run file's `store.remote`.

    Args:
        url: Such as ``s3://bucket/prefix``. Credentials and endpoint come from the environment
            (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, ...), never from here.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def push(self, artifact: Artifact) -> None:
        """Upload an artifact, unless it is there: files first, manifest last.

        Raises:
            StoreError: The object store did not take it; `StoreRefused` where it never will.
        """
        with reported(self.url, "take"):
            system, root = self.open()
            if system.exists(f"{root}/{artifact.id}/{MANIFEST}"):
                return
            upload = uuid.uuid4().hex[:12]
            for entry in artifact.manifest["files"]:
                target = f"{root}/{artifact.id}/{upload}/{entry['path']}"
                system.put_file(str(artifact.path / entry["path"]), target)
                size = system.info(target, refresh=True)["size"]
                if size != entry["size"]:
                    raise OSError(f"{target} has {size} bytes, not {entry['size']}")
            manifest = {**artifact.manifest, "remote": upload}
            text = json.dumps(manifest, sort_keys=True).encode()
            system.pipe_file(f"{root}/{artifact.id}/{MANIFEST}", text)
            log.info("%s is kept at %s as well", artifact.id, self.url)

    def pull(self, store: Store, id: str) -> Artifact | None:
        """Fetch an artifact into the local store; None where it is not there or is damaged.

        A damaged one loses its manifest, so that the next `push` replaces it.

        Raises:
            StoreError: The object store did not answer.
            DiskFull: This machine has no room for it.
        """
        with reported(self.url, "give"):
            system, root = self.open()
            name = f"{root}/{id}/{MANIFEST}"
            try:
                manifest = json.loads(system.cat_file(name))
            except FileNotFoundError:
                return None
            except ValueError:
                self._drop(system, name, id, "its manifest cannot be read")
                return None
            if not _is_manifest(manifest):
                self._drop(system, name, id, "its manifest lacks what every one has")
                return None
            with store.lock(id):
                if (found := store.find(id)) is not None:  # another process was faster
                    return found
                with store.draft(id) as draft:
                    source = f"{root}/{id}/{manifest['remote']}"
                    wrong = _fetch(system, source, manifest, draft.path)
                    if wrong:
                        self._drop(system, name, id, wrong)
                        return None
                    facts = {
                        key: value
                        for key, value in manifest.items()
                        if key not in ("format", "id", "stage", "files", "remote")
                    }
                    log.info("%s was fetched from %s", id, self.url)
                    return store.commit(draft, manifest["stage"], facts)

    def note_needs(self, needed: Iterable[str]) -> None:
        """Say what this TUNESERVE_HOME needs, in place of what it said before.

        Raises:
            StoreError: The object store did not take it.
        """
        with reported(self.url, "take"):
            system, root = self.open()
            here = {"host": socket.gethostname(), "home": str(home())}
            name = home_id(home(), make=True) or "-".join(here.values()).replace("/", "-")
            said = {**here, "noted": time.time(), "needed": sorted(needed)}
            system.pipe_file(f"{root}/{USERS}/{name}.json", json.dumps(said).encode())

    def open(self) -> tuple[Any, str]:
        """The file system and the prefix in it, nothing remembered of an earlier look."""
        import fsspec

        try:
            system, root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise InputError(
                f"store.remote {self.url}: {error}",
                expected="an address such as s3://bucket/prefix",
                hint="check the address; other services need their fsspec package installed",
            ) from error
        system.invalidate_cache()  # other machines write there
        return system, root

    def _drop(self, system: Any, manifest: str, id: str, why: str) -> None:
        log.warning("%s at %s is damaged (%s): it will be made again", id, self.url, why)
        system.rm_file(manifest)


class reported:
    """Turn what an object store's client raises into an error that says what to do."""

    def __init__(self, url: str, verb: str) -> None:
        self.url, self.verb = url, verb

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        # botocore's errors are no OSErrors, and importing it only to name them takes a second.
        foreign = type(error).__module__.split(".")[0] in ("botocore", "aiohttp", "s3fs")
        if error is None or not (foreign or isinstance(error, OSError)):
            return
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"the disk is full while {self.url} should {self.verb} an artifact"
                + (f" ({error.filename})" if error.filename else ""),
                expected="free disk for the artifact",
            ) from error
        refused = _is_refusal(error)
        raise (StoreRefused if refused else StoreError)(
            f"{self.url} did not {self.verb} an artifact ({type(error).__name__}: {error})",
            hint="check that the bucket is there, and that the credentials in the environment "
            "may read and write it"
            if refused
            else "check the address, the credentials in the environment and the service",
        ) from error


def _is_refusal(error: BaseException) -> bool:
    """Whether the service, or the lack of credentials, gives the same answer each time."""
    cause = error.__cause__ if isinstance(error, OSError) else error  # s3fs keeps botocore's there
    code = (getattr(cause, "response", None) or {}).get("Error", {}).get("Code")
    names = {type(error).__name__, type(cause).__name__}
    return isinstance(error, PermissionError) or code in _NEVER or bool(names & _NO_CREDENTIALS)


def _is_manifest(found: Any) -> bool:
    """Whether it holds what a stage reads of any manifest."""
    if not isinstance(found, dict) or not _KEYS <= set(found):
        return False
    files = found["files"]
    return isinstance(files, list) and all(
        isinstance(entry, dict) and {"path", "size", "sha256"} <= set(entry) for entry in files
    )


def _fetch(system: Any, source: str, manifest: dict[str, Any], folder: Path) -> str:
    """Download the files of an upload; what is wrong with them, empty when nothing is."""
    for entry in manifest["files"]:
        target = folder / entry["path"]
        if not target.resolve().is_relative_to(folder.resolve()):
            return f"{entry['path']} leads out of the artifact"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            system.get_file(f"{source}/{entry['path']}", str(target))
        except FileNotFoundError:
            return f"{entry['path']} is missing"
        if file_sha256(target) != entry["sha256"]:
            return f"the bytes of {entry['path']} changed"
    return ""
