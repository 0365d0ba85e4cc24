"""A stage asked for, and what it gave: keys, sources and the store that holds the result."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tuneserve.artifacts import Store, file_sha256
from tuneserve.config import EngineSection, RunFile
from tuneserve.errors import DataError, ModelError
from tuneserve.places import store_root
from tuneserve.remote import RemoteStore
from tuneserve.stages import STAGES, StageSpec, section
from tuneserve.versions import package_versions

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".lock"}
_STAYS = "files that stay as they are while a run reads them"
_COME_WHOLE = (
    "run again once the delivery is whole; write each file under another name, and rename it when "
    "it is finished"
)
# What fsspec's file systems call the version of a file: S3, Azure, Google, the hub, HTTP, disks.
_VERSIONS = (
    *("etag", "versionid", "version_id", "generation", "md5hash", "blob_id"),
    *("lastmodified", "last_modified", "last-modified", "updated", "mtime", "created"),
)
_NOT_READ = {"README.md", "LICENSE", "NOTICE", ".gitattributes", ".gitignore"}


@dataclass(frozen=True)
class StageResult:
    """What a stage gave: small, JSON-able through `to_json`, without the artifact's data."""

    stage: str
    metrics: dict[str, Any]
    artifact: str | None = None
    path: str | None = None
    cached: bool = False
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class StageCall:
    """One stage asked for: everything that decides its result."""

    stage: str
    run: RunFile
    base: Path | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    # When the run's budget ends, and when this stage's own limit does (`limited`), in seconds since
    # 1970; retries count against both.
    deadline: float | None = None
    ends: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values, small enough for an orchestrator's parameters."""
        return {
            "stage": self.stage,
            "run": self.run.model_dump(mode="json"),
            "base": str(self.base) if self.base else None,
            "inputs": dict(self.inputs),
            "settings": dict(self.settings),
            "hints": dict(self.hints),
            "deadline": self.deadline,
            "ends": self.ends,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StageCall:
        """The call that `to_json` wrote."""
        return StageCall(
            stage=data["stage"],
            run=RunFile.model_validate(data["run"]),
            base=Path(data["base"]) if data["base"] else None,
            inputs=data["inputs"],
            settings=data["settings"],
            hints=data["hints"],
            deadline=data.get("deadline"),
            ends=data.get("ends"),
        )

    def limited(self, seconds: float | None = None) -> StageCall:
        """The call whose time begins to count now; by default unless it does already.

        Args:
            seconds: The stage's limit; None: `engines.*.max_seconds`, which may be none.
        """
        limit = seconds or self.engine.max_seconds
        if limit is None or (self.ends is not None and seconds is None):
            return self
        return replace(self, ends=time.time() + limit)

    @property
    def spec(self) -> StageSpec:
        """The table's row."""
        return STAGES[self.stage]

    @property
    def store(self) -> Store:
        """The store of this run."""
        return open_store(self.run)

    @property
    def engine(self) -> EngineSection:
        """Interpreter and time limit of the stage."""
        return cast(EngineSection, getattr(self.run.engines, self.spec.engine))

    def interpreter(self) -> str:
        """The Python that runs the stage."""
        return self.engine.python or sys.executable

    def stamps(self) -> dict[str, list[str]]:
        """What tells, without reading it, that a data file is another than before."""
        from tuneserve.data.files import expand_paths

        if not self.spec.uses_files:
            return {}
        paths = expand_paths([*self.run.data.train, *self.run.data.eval])
        return {path: list(_stamp(path)) for path in paths}

    def sources(self) -> dict[str, list[dict[str, str]]]:
        """The data files of a stage that reads them, by side: path and SHA-256."""
        if not self.spec.uses_files:
            return {}
        return {side: _file_digests(getattr(self.run.data, side)) for side in ("train", "eval")}

    def key(self) -> dict[str, Any]:
        """All that changes the artifact's bytes: config, inputs, base, files, versions."""
        spec = self.spec
        key: dict[str, Any] = {
            "config": {name: section(self.run, name) for name in spec.sections},
            "inputs": {name: self.inputs[name] for name in spec.inputs if name in self.inputs},
            "settings": dict(self.settings),
            "versions": package_versions(self.interpreter(), spec.packages),
            "code": spec.code_version,
        }
        if self.stage == "train" and self.run.train.keep == "best":
            # Which step is kept depends on when and on how many rows it is evaluated.
            key["keep"] = {
                "train.eval_steps": self.run.train.eval_steps,
                "gates.eval_rows": self.run.gates.eval_rows,
            }
        if spec.uses_base:
            key["base"] = self._base_digest()
        if spec.uses_files:
            # Paths say where the bytes lie, not what they are; the hashes below stand for them.
            unused = {"train", "eval"} | (
                {"eval_fraction", "seed"} if self.run.data.eval else set()
            )
            data = {k: v for k, v in key["config"]["data"].items() if k not in unused}
            key["config"] = {**key["config"], "data": data}
            key["files"] = {
                side: [file["sha256"] for file in files] for side, files in self.sources().items()
            }
            if self.run.model.chat_template:
                key["config"]["model.chat_template"] = file_sha256(
                    Path(self.run.model.chat_template)
                )
        return key

    def _base_digest(self) -> str:
        if self.base is None:
            raise ModelError(
                f"stage {self.stage} needs the base model's folder",
                expected="a base that was fetched",
                hint="fetch the base first",
            )
        others = hashlib.sha256()
        for name, digest in self.base_files().items():
            others.update(f"{name}:{digest}\n".encode())
        return f"{self._weights_digest()}+{others.hexdigest()[:16]}"

    def _weights_digest(self) -> str:
        from tuneserve.checkpoint.fingerprint import fingerprint

        assert self.base is not None
        return str(fingerprint(self.base)["digest"])

    def base_files(self) -> dict[str, str]:
        """SHA-256 of the base's files but the weights, which have their fingerprint. Any of them
        may decide bytes: tokenizer, template, stop ids of the generation config, code that comes
        with the model.
        """
        if self.base is None or not self.spec.uses_base:
            return {}
        return {
            path.name: file_sha256(path)
            for path in sorted(self.base.iterdir())
            if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name not in _NOT_READ
        }

    def check_unchanged(self, request: Mapping[str, Any]) -> None:
        """Refuse a result of files that are not those its id was made of any more.

        Args:
            request: With `key`, `sources`, `stamps` and `base_files` as they were before anything
                was read.

        Raises:
            DataError: A data file changed, came or went meanwhile.
            ModelError: The chat template or a file of the base changed or went. One that came to
            the base did so, most likely, after it was loaded: the next run sees another base.
        """
        key, while_read = request["key"], f"changed while stage {self.stage} read"
        before = _by_path(request["sources"])
        for path, stamp in request.get("stamps", {}).items():
            if path in before:  # what did not change is not read again
                _remember(path, tuple(stamp), before[path])
        after = _by_path(self.sources())
        # Also between the key's hashes and the sources'.
        in_key = {sha256 for side in key.get("files", {}).values() for sha256 in side}
        paths = sorted(
            path
            for path in {*before, *after}
            if before.get(path) != after.get(path) or before[path] not in in_key
        )
        if paths:
            more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
            raise DataError(
                f"{', '.join(paths[:5])}{more}: {while_read} the data",
                expected=_STAYS,
                hint=_COME_WHOLE,
            )
        changed = []
        template = self.run.model.chat_template if self.spec.uses_files else None
        if template and _sha256(Path(template)) != key["config"]["model.chat_template"]:
            changed.append(template)
        if self.base and self.spec.uses_base:
            now = self.base_files() if self.base.is_dir() else {}
            known = request["base_files"].items()
            changed += [str(self.base / name) for name, was in known if now.get(name) != was]
            if not changed and not key["base"].startswith(self._weights_digest()):
                changed.append(f"the weights in {self.base}")
        if changed:
            raise ModelError(
                f"{', '.join(changed)}: {while_read} the model",
                expected=_STAYS,
                hint="run again once the model is copied or downloaded whole",
            )


def open_store(run: RunFile) -> Store:
    """The artifact store that a run file names."""
    return Store(store_root(run.store.root))


def open_remote(run: RunFile) -> RemoteStore | None:
    """Where the run file's artifacts are kept as well; None: nowhere."""
    return RemoteStore(run.store.remote) if run.store.remote else None


def _by_path(sources: Mapping[str, Any]) -> dict[str, str]:
    return {file["path"]: file["sha256"] for files in sources.values() for file in files}


def _file_digests(paths: list[str]) -> list[dict[str, str]]:
    from tuneserve.data.files import expand_paths

    return [{"path": path, "sha256": _digest(path)} for path in expand_paths(paths)]


def _sha256(path: Path) -> str:
    """SHA-256 of a file; empty where it is gone."""
    try:
        return file_sha256(path)
    except FileNotFoundError:
        return ""


# A file is read once a run, though several keys need its hash.
_known: dict[tuple[str, tuple[str, ...]], str] = {}
_KNOWN_FILES = 4096


def _remember(path: str, stamp: tuple[str, ...], sha256: str) -> None:
    if not stamp:
        return
    while len(_known) >= _KNOWN_FILES:
        del _known[next(iter(_known))]
    _known[path, stamp] = sha256


def _digest(path: str) -> str:
    """SHA-256 of a file's bytes; empty where it went meanwhile."""
    stamp = _stamp(path)  # first: what changes while it is read has another one afterwards
    found = _known.get((path, stamp))
    if found is None:
        try:
            found = _stream_digest(path)
        except FileNotFoundError:
            return ""
        _remember(path, stamp, found)
    return found


def _stamp(path: str) -> tuple[str, ...]:
    """Size and times of a local file; of a remote one size and what its service calls a version.
    Empty: nothing that could tell it.
    """
    try:
        if "://" not in path:
            stat = os.stat(path)
            return (str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ctime_ns))
        import fsspec

        system, place = fsspec.core.url_to_fs(path)
        system.invalidate_cache()  # listings are kept
        facts = {name.lower(): value for name, value in system.info(place).items()}
    except OSError:  # whoever reads it says why
        return ()
    versions = [f"{name}={facts[name]}" for name in _VERSIONS if facts.get(name) is not None]
    return (str(facts.get("size")), *versions) if versions else ()


def _stream_digest(path: str) -> str:
    import fsspec

    digest = hashlib.sha256()
    with fsspec.open(path, "rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()
