"""Bring a model from the hub: only files that cannot run code, with resume, and clear errors."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.weights import fetch_large, partial_bytes
from tuneserve.config import ModelSection
from tuneserve.errors import DiskFull, HubError, HubRefused, ModelError, TuneserveError
from tuneserve.progress import Progress, human_bytes

log = logging.getLogger(__name__)

_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
# What says under which terms a model may be used and passed on.
_TERMS = ("readme.md", "license", "licence", "notice", "use_policy.md")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
_MIB = 2**20
# Left free beside what we write, for logs and for other programs on the disk.
_SPARE_BYTES = 200 * _MIB


def need_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuse to start what would fill the disk that `folder` (or its nearest parent) lies on.

    Raises:
        DiskFull: Less than `needed_bytes` and a small reserve are free.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed_bytes and free < needed_bytes + _SPARE_BYTES:
        raise DiskFull(
            f"{what} needs {human_bytes(needed_bytes)} in {folder}, {human_bytes(free)} are free",
            expected=f"{human_bytes(needed_bytes + _SPARE_BYTES)} free",
            hint="free some space, or move the cache (HF_HOME, XDG_CACHE_HOME) to another disk",
            details={"needed_bytes": needed_bytes, "free_bytes": free},
        )


def needed_files(names: Iterable[str], *, weights: bool, remote_code: bool) -> list[str]:
    """The files of a repository that are wanted: top level only, safetensors and text, no pickle.

    Raises:
        ModelError: The repository has no safetensors, only formats that run code when read.
    """
    top = sorted(name for name in names if "/" not in name)
    # Mistral repositories carry the weights a second time as consolidated*.safetensors.
    tensors = [
        n
        for n in top
        if n.endswith(".safetensors") and not n.startswith(("consolidated", "adapter_"))
    ]
    if not tensors:
        pickles = [n for n in top if n.endswith(_PICKLE_SUFFIXES)]
        found = f"only {', '.join(pickles[:5])}" if pickles else "no weights"
        raise ModelError(
            f"the repository holds {found}",
            expected="safetensors; pickled weights can run code when they are read",
            hint="ask its owner for safetensors, or convert a copy that you trust",
        )
    small = [n for n in top if n.endswith(_SMALL_SUFFIXES) and not n.startswith("pytorch_model")]
    small += [n for n in top if n.lower().startswith(_TERMS) and n not in small]
    code = [n for n in top if remote_code and n.endswith(".py")]
    return small + code + (tensors if weights else [])


def download(model: ModelSection, *, weights: bool) -> Path:
    """Snapshot of a hub repository in the hub's own cache, resumed where an earlier try stopped.

    Args:
        model: `base` is the repository's id; `revision` a commit, tag or branch.
        weights: Whether the weights are wanted too, or only the small files.

    Raises:
        HubError: Not found, no access, or no network and nothing in the cache.
        ModelError: The repository holds no safetensors, or the id cannot be one.
        DiskFull: What is still to be downloaded would not fit.
    """
    import huggingface_hub
    from huggingface_hub import errors

    # A commit never changes: where all of it is here, nobody need be asked.
    if re.fullmatch(r"[0-9a-f]{40}", model.revision or ""):
        folder = _cached(model, weights=weights)
        if folder is not None:
            return folder
    # Secrets that come from files or forms often end with a line feed, which no header may hold.
    token = os.environ.get("HF_TOKEN", "").strip() or None
    try:
        listing = huggingface_hub.snapshot_download(
            model.base, revision=model.revision, dry_run=True, token=token
        )
        assert not isinstance(listing, str)
        names = [info.filename for info in listing]
        files = needed_files(names, weights=weights, remote_code=model.trust_remote_code)
        missing = {
            i.filename: i.file_size or 0 for i in listing if i.filename in files and i.will_download
        }
        commit = listing[0].commit_hash  # the one listed, should the branch move meanwhile
        if weights and model.revision is None:
            log.info("%s is %s today; model.revision would pin it", model.base, commit)
        if missing:
            cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
            todo = sum(missing.values())
            left = max(0, todo - partial_bytes(model.base, cache))
            need_disk(cache, left, f"downloading {model.base}")
            log.info("downloading %s: %s, %d files", model.base, human_bytes(todo), len(missing))
            fetch_large(model.base, commit, missing, cache, token)
        fetched = huggingface_hub.snapshot_download(
            model.base,
            revision=commit,
            allow_patterns=files,
            token=token,
            tqdm_class=_hub_progress(),
        )
    except (errors.DryRunError, errors.LocalEntryNotFoundError) as error:
        # The hub does not answer: the cache may hold it all.
        return _offline(model, error.__cause__ or error, weights=weights)
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the local disk; the child runner says what it means
        raise _hub_error(model, error) from error
    return Path(str(fetched))


def _offline(model: ModelSection, why: BaseException, *, weights: bool) -> Path:
    folder = _cached(model, weights=weights)
    if folder is None:
        raise _hub_error(model, why) from why
    log.warning("the hub does not answer (%s); using the copy in its cache", type(why).__name__)
    return folder


def _cached(model: ModelSection, *, weights: bool) -> Path | None:
    """The snapshot in the cache; None when there is none, or not all of it."""
    import huggingface_hub
    from huggingface_hub import errors

    patterns = ["*.json", "*.jinja", "tokenizer.model"] + (["*.safetensors"] if weights else [])
    try:
        folder = huggingface_hub.snapshot_download(
            model.base,
            revision=model.revision,
            local_files_only=True,
            allow_patterns=patterns,
            ignore_patterns=["*/*", "consolidated*", "adapter_*", "pytorch_model*"],
        )
    except errors.LocalEntryNotFoundError:
        return None
    return Path(folder)


def _hub_error(model: ModelSection, error: BaseException) -> TuneserveError:
    from huggingface_hub import errors

    name = f"{model.base}@{model.revision}" if model.revision else model.base
    if isinstance(error, errors.HFValidationError):
        return ModelError(
            f"model.base {model.base!r} is neither a folder here nor a hub id",
            expected="org/name, a directory, or builtin:smollm2-135m",
        )
    if isinstance(error, errors.GatedRepoError):
        return HubRefused(
            f"{name}: the hub gives it only to users who accepted its terms",
            expected="a token of a user who accepted them",
            hint="accept them on the model's page, then set HF_TOKEN to your token",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubRefused(
            f"{name}: there is no such revision",
            expected="a commit, tag or branch of the repository",
            hint="mend model.revision",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubRefused(
            f"{name}: not found on the hub, or private",
            expected="a model that is there, and a token that may read it",
            hint="check the spelling of model.base; for a private model set HF_TOKEN",
        )
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if status in (401, 403):
        return HubRefused(
            f"{name}: the hub refuses the token of HF_TOKEN (HTTP {status})",
            expected="a token of yours that may read this model",
            hint="make a new read token in your hub settings, and set HF_TOKEN to it",
        )
    if status:
        return HubError(
            f"{name}: the hub answered HTTP {status}, and its cache here does not hold the model",
            expected="a hub that gives the files",
            hint="try again later; what was downloaded is kept",
        )
    return HubError(
        f"{name}: the hub cannot be reached, and its cache here does not hold the model "
        f"({type(error).__name__})",
        expected="a hub that answers, or the whole model in its cache",
        hint="check the network, or set HF_ENDPOINT to a mirror, or model.base to a directory with "
        "the model; to try things out without a hub: model.base builtin:smollm2-135m",
    )


def _hub_progress() -> type:
    from tqdm import tqdm

    class Bar(tqdm):
        """A bar for huggingface_hub that logs lines, since a child's log is no terminal."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "file": _Nowhere()})
            self._lines = Progress("download", total=None, unit="MiB")

        def update(self, n: float | None = 1) -> bool | None:
            before = int(self.n) // _MIB
            shown = super().update(n or 0)
            # Bytes from the network have a bar of their own, with the same sum in the end.
            if self._counts_bytes and not str(self.desc).startswith("Downloading bytes"):
                self._lines.total = int(self.total or 0) // _MIB or None
                self._lines.advance(int(self.n) // _MIB - before)
            return shown

    return Bar


class _Nowhere:
    """A text stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None
