"""The vLLM command line and environment of a release: pure, so that every choice can be tested.

Flags are those of ``python -m vllm.entrypoints.openai.api_server`` 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuneserve.config import ServeSection
from tuneserve.errors import RunFileError
from tuneserve.release.capacity import Capacity
from tuneserve.release.layout import SOCKET_PATH_LIMIT_BYTES
from tuneserve.release.middleware import RELEASE_VARIABLE
from tuneserve.release.model_files import ModelFacts

_MIDDLEWARE = "tuneserve.release.middleware.ReleaseHeader"
# Gates read the top 20 of prompt_logprobs; clients get no more than that either.
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class ServerCommand:
    """How to start a server."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def build(
    facts: ModelFacts,
    serve: ServeSection,
    capacity: Capacity,
    *,
    release: str,
    socket: Path,
    python: str,
    trust_remote_code: bool = False,
    cores: int = 1,
    given: Mapping[str, str] | None = None,
    generation: Path | None = None,
) -> ServerCommand:
    """The command and environment of one server.

    Args:
        facts: The model.
        serve: The run file's section.
        capacity: Length, KV cache and device.
        release: The release's id.
        socket: Where it listens.
        python: The interpreter that has vLLM.
        trust_remote_code: Allow code that comes with the model.
        cores: CPU cores that the server may use.
        given: The user's own environment; its choice of cores wins.
        generation: Folder of the generation_config.json to take; None: the model's.

    Raises:
        RunFileError: The socket's path is longer than the kernel takes.
    """
    length = len(str(socket).encode())
    if length > SOCKET_PATH_LIMIT_BYTES:
        raise RunFileError(
            f"{socket}: a socket path of {length} bytes",
            expected=f"at most {SOCKET_PATH_LIMIT_BYTES}",
            hint="set TUNESERVE_HOME to a shorter path",
        )
    return ServerCommand(
        [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--uds",
            str(socket),
            "--shutdown-timeout",
            str(serve.drain_timeout_seconds),
            *_share(capacity),
            *serving_arguments(facts, serve, capacity, trust_remote_code, generation),
        ],
        environment(release, capacity, cores, given or {}),
    )


def _share(capacity: Capacity) -> list[str]:
    """How much of a GPU must be free.

    With a KV cache of given size vLLM plans nothing by this share, but it still refuses to start
    when less is free (`vllm/v1/worker/utils.py`, `request_memory`). Its default, 0.92, would refuse
    every candidate beside a champion.
    """
    if capacity.device == "cpu":
        return []
    return ["--gpu-memory-utilization", f"{max(0.001, capacity.device_share):.3f}"]


def serving_arguments(
    facts: ModelFacts,
    serve: ServeSection,
    capacity: Capacity,
    trust_remote_code: bool,
    generation: Path | None = None,
) -> list[str]:
    """The part of the command that decides answers: it goes into the release's key.

    The type of the products is left to vLLM: on a GPU without bfloat16 it serves such a model in
    float16, and in float32 the families that float16 does not hold, which `--dtype half` refuses.
    """
    arguments = [
        "--model",
        str(facts.path),
        "--served-model-name",
        serve.name,
        "--max-model-len",
        str(capacity.max_model_len),
        "--kv-cache-memory-bytes",
        str(capacity.kv_cache_bytes),
        "--max-logprobs",
        str(MAX_LOGPROBS),
        "--load-format",
        "safetensors",  # never falls back to a pickle
        "--generation-config",
        str(generation or facts.path),
        "--middleware",
        _MIDDLEWARE,
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
    ]
    if facts.chat_template:
        arguments += ["--chat-template", str(facts.chat_template)]
    if serve.tensor_parallel > 1:
        arguments += ["--tensor-parallel-size", str(serve.tensor_parallel)]
    if capacity.device == "cpu":
        arguments += ["--enforce-eager"]  # compiling takes minutes and gains little on a CPU
    overrides = sampling_overrides(serve)
    if overrides:
        arguments += ["--override-generation-config", json.dumps(overrides, sort_keys=True)]
    if serve.tool_parser:  # one without the other makes every request with tools fail
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", serve.tool_parser]
    if trust_remote_code:
        arguments += ["--trust-remote-code"]
    return arguments


def sampling_overrides(serve: ServeSection) -> dict[str, float]:
    """Sampling defaults that the run file sets over the model's own, by their names in
    generation_config.json."""
    wanted = {
        "temperature": serve.temperature,
        "top_p": serve.top_p,
        "top_k": serve.top_k,
        "min_p": serve.min_p,
        "repetition_penalty": serve.repetition_penalty,
        "max_new_tokens": serve.max_tokens,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def sampling_defaults(facts: ModelFacts, serve: ServeSection) -> Mapping[str, float]:
    """What a request without sampling fields gets."""
    return {**facts.sampling, **sampling_overrides(serve)}


def environment(
    release: str, capacity: Capacity, cores: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Variables of the server: no call home, no hub, numbers that do not depend on the CPU
    model."""
    variables = {
        RELEASE_VARIABLE: release,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if capacity.device == "cpu":
        variables["VLLM_CPU_INT4_W4A8"] = "0"
        variables["VLLM_TARGET_DEVICE"] = "cpu"
        if "VLLM_CPU_OMP_THREADS_BIND" not in given:
            # Bound, every server takes the same first cores: a candidate would load for many
            # minutes on the core that the busy champion sits on.
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            variables["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS", str(max(1, cores - 1)))
            variables["OMP_WAIT_POLICY"] = "PASSIVE"
    return variables
