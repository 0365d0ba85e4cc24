"""Run a stage in a child process: its memory ends with it, and nothing of it outlives us.

The child is a session of its own. It holds the reading end of a pipe whose writing end only we
hold: when we are gone, however we went, the pipe closes and the child ends its whole group. On
cancel, time-out or error we end the group ourselves.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tuneserve.artifacts import Artifact, Store, artifact_id, file_sha256
from tuneserve.config import EngineSection, RunFile
from tuneserve.errors import (
    InputError,
    ModelError,
    StageCrashed,
    StageKilled,
    StageTimeout,
    TuneserveError,
)
from tuneserve.places import store_root
from tuneserve.stages import STAGES, StageSpec, section

log = logging.getLogger(__name__)

PARENT_PIPE_VARIABLE = "TUNESERVE_PARENT_PIPE"
_TERM_SECONDS = 10.0
# A release that is cancelled in the middle of a switch first puts the champion back.
_RELEASE_TERM_SECONDS = 180.0
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".lock"}
_NOT_READ = {"README.md", "LICENSE", "NOTICE", ".gitattributes", ".gitignore"}
_TAIL_LINES = 30


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

    def to_json(self) -> dict[str, Any]:
        """As plain values, small enough for an orchestrator's parameters."""
        return {
            "stage": self.stage,
            "run": self.run.model_dump(mode="json"),
            "base": str(self.base) if self.base else None,
            "inputs": dict(self.inputs),
            "settings": dict(self.settings),
            "hints": dict(self.hints),
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
        )

    @property
    def spec(self) -> StageSpec:
        """The table's row."""
        return STAGES[self.stage]

    @property
    def store(self) -> Store:
        """The store of this run."""
        return Store(store_root(self.run.store.root))

    @property
    def engine(self) -> EngineSection:
        """Interpreter and time limit of the stage."""
        return cast(EngineSection, getattr(self.run.engines, self.spec.engine))

    def interpreter(self) -> str:
        """The Python that runs the stage."""
        return self.engine.python or sys.executable

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
        from tuneserve.checkpoint.fingerprint import fingerprint

        if self.base is None:
            raise ModelError(
                f"stage {self.stage} needs the base model's folder", hint="fetch the base first"
            )
        # The weights have their fingerprint; every other file may decide bytes: tokenizer,
        # template, stop ids of the generation config, code that comes with the model.
        others = hashlib.sha256()
        for path in sorted(self.base.iterdir()):
            if (
                path.is_file()
                and path.suffix not in _WEIGHT_SUFFIXES
                and path.name not in _NOT_READ
            ):
                others.update(f"{path.name}:{file_sha256(path)}\n".encode())
        return f"{fingerprint(self.base)['digest']}+{others.hexdigest()[:16]}"


def run_stage(
    call: StageCall,
    *,
    log_line: Callable[[str], None] | None = None,
    timeout_seconds: float | None = None,
) -> StageResult:
    """Give the stage's artifact from the store, or make it in a child process.

    Args:
        call: The stage and all that decides its result.
        log_line: Gets each line of the child's log; None sends them to our own stderr.
        timeout_seconds: End the child after this long; None: `engines.*.max_seconds`.

    Raises:
        TuneserveError: What the child reported, `StageTimeout`, or `StageCrashed` with its last
        lines.
    """
    id, key = None, None
    if call.spec.makes:
        key = call.key()
        id = artifact_id(call.spec.makes, key)
        found = call.store.find(id)
        if found is not None:
            return _from_artifact(call.stage, found, cached=True)
    request = {
        **call.to_json(),
        "store": str(call.store.root),
        "id": id,
        "key": key,
        "sources": call.sources(),
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tuneserve-") as folder:
        request_path, result_path = Path(folder) / "request.json", Path(folder) / "result.json"
        request_path.write_text(json.dumps(request), encoding="utf-8")
        command = [call.interpreter(), "-m", "tuneserve", "stage", call.stage]
        status, tail = run_child(
            [*command, str(request_path), str(result_path)],
            log_line=log_line,
            timeout_seconds=timeout_seconds or call.engine.max_seconds,
            term_seconds=_RELEASE_TERM_SECONDS if call.stage == "release" else _TERM_SECONDS,
        )
        result = _read_result(call.stage, result_path, status, tail)
    if id:
        made = call.store.find(id)
        if made is None:
            raise StageCrashed(
                f"stage {call.stage} reported artifact {id}, but the store does not have it"
            )
        return _from_artifact(call.stage, made, cached=bool(result.get("cached")))
    return StageResult(call.stage, result["metrics"], seconds=time.monotonic() - started)


def run_child(
    command: list[str],
    *,
    log_line: Callable[[str], None] | None = None,
    timeout_seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
    term_seconds: float = _TERM_SECONDS,
) -> tuple[int, list[str]]:
    """Run a command as a session of its own that cannot outlive us.

    Returns:
        Its exit status (negative: the signal that ended it) and the last lines it wrote.

    Raises:
        StageTimeout: It ran longer than `timeout_seconds`; its group has been ended.
    """
    sink = log_line or _to_stderr
    tail: list[str] = []
    reading, writing = os.pipe()
    try:
        env = {
            # Libraries' notes to their own developers; what a user can mend is logged as such.
            "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
            **os.environ,
            **(environment or {}),
            PARENT_PIPE_VARIABLE: str(reading),
        }
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(reading,),
            env=env,
            text=True,
            errors="replace",
        )
    except OSError as error:
        os.close(reading)
        os.close(writing)
        raise InputError(
            f"{command[0]} cannot be started ({error.strerror})",
            hint="check engines.*.python in the run file",
        ) from error
    os.close(reading)

    def pump() -> None:
        assert child.stdout is not None
        heard = True
        for line in child.stdout:
            line = line.rstrip("\n")
            tail.append(line)
            del tail[:-_TAIL_LINES]
            try:
                if heard:
                    sink(line)
            except (OSError, ValueError):
                # Whoever read our log is gone (a closed terminal, `| head`). The child must not
                # stop on a full pipe because of that.
                heard = False

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    try:
        child.wait(timeout_seconds)
    except subprocess.TimeoutExpired as error:
        raise StageTimeout(
            f"{' '.join(command[:5])} took longer than {timeout_seconds:.0f} s and was ended",
            hint="raise the limit, or make the stage smaller",
        ) from error
    finally:
        end_group(child, term_seconds)
        os.close(writing)
        reader.join(timeout=5)
    return child.returncode, tail


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def end_group(child: subprocess.Popen[str], term_seconds: float = _TERM_SECONDS) -> None:
    """End a child's whole process group: TERM while the child lives, then KILL whatever is left."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(term_seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@functools.lru_cache(maxsize=32)
def _versions_elsewhere(
    interpreter: str, packages: tuple[str, ...]
) -> tuple[tuple[str, str | None], ...]:
    code = (
        "import json,sys,importlib.metadata as m\n"
        "def v(p):\n try: return m.version(p)\n except m.PackageNotFoundError: return None\n"
        "print(json.dumps([[p, v(p)] for p in sys.argv[1:]]))"
    )
    try:
        done = subprocess.run(
            [interpreter, "-c", code, *packages],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"{interpreter} cannot be asked for its packages ({error})",
            hint="check engines.*.python in the run file",
        ) from error
    return tuple((name, version) for name, version in json.loads(done.stdout))


def package_versions(interpreter: str, packages: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions in an interpreter's environment; None where a package is absent."""
    if interpreter != sys.executable:
        return dict(_versions_elsewhere(interpreter, packages))
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _file_digests(paths: list[str]) -> list[dict[str, str]]:
    from tuneserve.data.files import expand_paths

    return [{"path": path, "sha256": _digest(path)} for path in expand_paths(paths)]


def _digest(path: str) -> str:
    import fsspec

    digest = hashlib.sha256()
    with fsspec.open(path, "rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _from_artifact(stage: str, artifact: Artifact, *, cached: bool) -> StageResult:
    return StageResult(
        stage,
        artifact.metrics,
        artifact=artifact.id,
        path=str(artifact.path),
        cached=cached,
        seconds=float(artifact.manifest["seconds"]),
    )


def _read_result(stage: str, path: Path, status: int, tail: list[str]) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hint = "signal 9 is often the kernel's answer to too little memory" if status == -9 else ""
        kind = StageKilled if status < 0 else StageCrashed
        raise kind(
            f"stage {stage} {how} without a result; its last lines:\n    "
            + "\n    ".join(tail[-12:]),
            hint=hint or "read the lines above; if they do not help, report them",
        ) from error
    if "error" in result:
        raise TuneserveError.from_json(result["error"])
    return dict(result)
