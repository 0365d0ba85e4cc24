"""Every stage's needs against what it may take of a machine beside what is resident already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuneserve.config import RunFile
from tuneserve.plan.arch import Arch
from tuneserve.plan.constants import Constants
from tuneserve.plan.host import export_host, train_host
from tuneserve.plan.later import (
    Serving,
    disk_bytes,
    evaluate_peak,
    merge_peak,
    quantize_peak,
    serving,
)
from tuneserve.plan.machine import Machine
from tuneserve.plan.memory import Peak, train_peak
from tuneserve.plan.rows import DataShape
from tuneserve.plan.stageplan import StagePlan
from tuneserve.plan.steps import choose_step
from tuneserve.plan.trainstep import Step

# Longest chats planned for when serve.max_model_len is unset: what clients use, not what fits.
_SERVE_TOKENS_GPU = 32768
_SERVE_TOKENS_CPU = 4096
_SERVE_TOKENS_STEP = 128


@dataclass(frozen=True)
class Staged:
    """The stages of a run, and what was chosen for them. `train_bytes`: what training may take."""

    step: Step
    stages: Mapping[str, StagePlan]
    serving: Serving
    two_servers_fit: bool
    train_bytes: int


def plan_stages(
    run: RunFile, arch: Arch, data: DataShape | None, machine: Machine, constants: Constants
) -> Staged:
    """Choose step and server, and hold each stage against the room that it has.

    Args:
        run: The run file.
        arch: The base.
        data: The data set's shape, where known.
        machine: What there is.
        constants: Of this machine and card.
    """
    on_gpu = machine.gpu is not None
    room = _Room(machine, run)
    step = choose_step(run, arch, data, machine, room.train, constants)
    peak = train_peak(arch, step, constants)
    served, both = _choose_serving(run, arch, data, room, constants)
    disk = disk_bytes(arch, run, step)
    device = "GPU" if on_gpu else "RAM"
    memory = None if machine.supposed else machine.ram_free_bytes
    host = memory if on_gpu else None
    exporting = quantize_peak(arch, run, gpu=on_gpu, constants=constants, room_bytes=room.work)
    beside = Peak({})
    if on_gpu:
        beside = export_host(
            arch,
            run,
            gpu_room_bytes=room.work,
            free_bytes=machine.ram_free_bytes,
            constants=constants,
        )
    scoring = evaluate_peak(arch, step, constants)
    one = Peak({"processes": constants.gpu_process_bytes} if on_gpu else {})
    stages = {
        "train": StagePlan(
            "train",
            device,
            peak,
            room.train,
            disk["train"],
            train_host(arch, step, constants),
            host,
        ),
        "merge": StagePlan("merge", "RAM", merge_peak(run), memory, disk["merge"]),
        "evaluate": StagePlan("evaluate", device, scoring, room.work, disk["evaluate"], one, host),
        "quantize": StagePlan(
            "quantize", device, exporting, room.work, disk["quantize"], beside, host
        ),
        "serve": StagePlan("serve", device, served.peak, room.serve, disk["serve"]),
    }
    return Staged(step, stages, served, both, room.train)


class _Room:
    """What each stage may take, with everything that is resident already left where it is.

    Attributes:
        gpu: Whether the bytes are of a card.
        train: Under `train.target_utilization`.
        work: For evaluate and quantize, which run beside the same champion.
        serve: For the candidate: beside the champion with `blue_green`, in its place with `hold`.
        servers: For both servers of `blue_green` together.
    """

    def __init__(self, machine: Machine, run: RunFile) -> None:
        share = run.train.target_utilization
        self.gpu = machine.gpu is not None
        if machine.gpu is None:
            # Available memory leaves out what a running server holds, ours or not.
            self.work = self.serve = self.servers = machine.ram_free_bytes
            self.train = int(share * machine.ram_free_bytes)
            return
        total, ours = machine.gpu.total_bytes, machine.gpu.held_by_us_bytes
        used = total - machine.gpu.free_bytes
        stays = used if run.serve.while_training == "share" else used - ours
        self.work = total - stays
        self.train = int(share * total) - stays
        self.servers = total - used + ours
        self.serve = self.servers if run.serve.rollout == "hold" else total - used


def _choose_serving(
    run: RunFile, arch: Arch, data: DataShape | None, room: _Room, constants: Constants
) -> tuple[Serving, bool]:
    """The server with the longest chats that fit, and whether two of them fit side by side.

    With `blue_green` the length gives way until two fit, but never below what was trained on.
    """
    gpu = room.gpu
    shortest = min(arch.context, data.longest if data else run.data.max_length)
    longest = run.serve.max_model_len or max(
        shortest, min(arch.context, _SERVE_TOKENS_GPU if gpu else _SERVE_TOKENS_CPU)
    )
    servers = 2 if run.serve.rollout == "blue_green" else 1
    lengths = [longest]
    if run.serve.max_model_len is None:
        while lengths[-1] // 2 >= max(shortest, _SERVE_TOKENS_STEP):
            lengths.append(lengths[-1] // 2)
        if lengths[-1] > shortest:
            lengths.append(shortest)
    for count in range(servers, 0, -1):
        for length in lengths:
            found = serving(arch, run, length, gpu=gpu, constants=constants)
            if count * found.peak.needed_bytes <= room.servers:
                return found, 2 * found.peak.needed_bytes <= room.servers
    return serving(arch, run, lengths[-1], gpu=gpu, constants=constants), False
