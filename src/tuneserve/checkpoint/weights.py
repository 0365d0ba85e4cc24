"""Large files of the hub, byte by byte into its own cache: resumed after a kill, and verified.

The hub's client begins a file again when its process was ended in the middle, several files at a
time: of a 15 GB model nothing may be left. Here a file grows under a name of its own beside the
cache's blobs, and a later call goes on where it ends. What is finished is hashed (the hub names
large files by their SHA-256), then renamed to the blob that the client looks for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tuneserve.artifacts import file_sha256
from tuneserve.errors import HubError
from tuneserve.progress import Progress, human_bytes

log = logging.getLogger(__name__)

_AT_ONCE = 4
_MIB = 2**20
# Smaller ones are not worth a request more.
_LARGE_BYTES = 16 * _MIB
# Beyond this the hub refuses plain HTTP; its client then has another way.
_HTTP_LIMIT_BYTES = 50 * 10**9
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class _Blob:
    name: str
    url: str
    path: Path
    etag: str
    size_bytes: int

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.etag}.tuneserve-partial")


def fetch_large(
    repository: str, revision: str, sizes: dict[str, int], cache: Path, token: str | None
) -> None:
    """Bring the large ones of some files into the hub's cache.

    Args:
        repository: Its id.
        revision: A commit.
        sizes: Bytes of the files that are not in the cache yet.
        cache: The hub's cache folder.
        token: The hub's, or None.

    Raises:
        HubError: A file arrived damaged; it was removed.
        huggingface_hub.errors.HTTPError, OSError: As the client raises them.
    """
    large = [n for n, size in sizes.items() if _LARGE_BYTES <= size <= _HTTP_LIMIT_BYTES]
    if not large:
        return
    blobs = [_blob(repository, revision, name, cache, token) for name in large]
    held = sum(b.partial.stat().st_size for b in blobs if b.partial.is_file())
    if held:
        log.info("%s of an earlier download are here; going on from there", human_bytes(held))
    counter = _Counter(sum(blob.size_bytes for blob in blobs), held)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for future in [pool.submit(_fetch, blob, token, counter) for blob in blobs]:
            future.result()


def _blob(repository: str, revision: str, name: str, cache: Path, token: str | None) -> _Blob:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    url = hf_hub_url(repository, name, revision=revision)
    found = get_hf_file_metadata(url, token=token)
    if not found.etag or not found.size:
        raise HubError(
            f"{repository}: the hub says neither name nor size of {name}",
            expected="an ETag and a size for every file",
            hint="check HF_ENDPOINT, if it is set: not every mirror is complete",
        )
    folder = cache / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    folder.mkdir(parents=True, exist_ok=True)
    return _Blob(name, url, folder / found.etag, found.etag, found.size)


def _fetch(blob: _Blob, token: str | None, counter: _Counter) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    with _own(blob.partial) as stream:
        if blob.path.exists():  # another process was faster
            blob.partial.unlink()
            return
        done = stream.seek(0, 2)
        if done > blob.size_bytes:
            done = stream.truncate(0)
        http_get(
            blob.url,
            stream,
            resume_size=done,
            headers=build_hf_headers(token=token),
            expected_size=blob.size_bytes,
            displayed_filename=blob.name,
            tqdm_class=counter.bar(),
        )
        stream.flush()
        if _SHA256.fullmatch(blob.etag) and (found := file_sha256(blob.partial)) != blob.etag:
            blob.partial.unlink()
            raise HubError(
                f"{blob.name} arrived damaged: its SHA-256 is {found}",
                expected=blob.etag,
                hint="run it again; what was wrong is removed",
            )
        blob.partial.rename(blob.path)


@contextmanager
def _own(path: Path) -> Iterator[BinaryIO]:
    """The file, opened to go on writing, and ours alone as long as we live."""
    while True:
        with path.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            # The one who held it may have renamed it: then this is not the file of that name.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                yield stream
                return


class _Counter:
    """One progress line for all files together."""

    def __init__(self, total_bytes: int, held_bytes: int) -> None:
        self._lines = Progress("download", total=-(-total_bytes // _MIB), unit="MiB")
        self._bytes, self._shown = held_bytes, 0
        self._lock = threading.Lock()

    def add(self, count: float) -> None:
        """Count bytes; negative ones when a file begins again."""
        with self._lock:
            self._bytes += int(count)
            if (whole := self._bytes // _MIB) > self._shown:
                self._lines.advance(whole - self._shown)
                self._shown = whole

    def bar(self) -> type:
        """The class that the client makes its progress bar of."""
        from tqdm import tqdm

        counter = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("name", None)
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                counter.add(n or 0)
                return None

        return Bar


def partial_bytes(repository: str, cache: Path) -> int:
    """What earlier downloads left unfinished: it need not be downloaded, nor found room for."""
    from huggingface_hub.file_download import repo_folder_name

    folder = cache / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    return sum(path.stat().st_size for path in folder.glob("*.tuneserve-partial"))
