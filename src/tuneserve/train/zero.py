"""DeepSpeed ZeRO-2 for adapters with many parameters: configuration, and a state that outlives
the number of GPUs.

ZeRO stage 2 (Rajbhandari et al., 2020) keeps on each GPU one share of the gradients and of the
optimizer's state, with float32 master weights. DeepSpeed's own checkpoints hold one file a rank
and load onto the same number of ranks only; here rank 0 writes one file of whole tensors by
parameter name, which any number of ranks cuts into its own shares.

Engine file: imports torch; DeepSpeed itself is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tuneserve.config import TrainSection
from tuneserve.errors import AdapterError
from tuneserve.train.recipe import Recipe

STATE = "zero.safetensors"
# Elements that are reduced together. DeepSpeed's default, 500 million, is 1 GiB a buffer and there
# are two; past this size a larger one is no faster.
_BUCKET_ELEMENTS = 50_000_000
_MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}  # and how bitsandbytes numbers them


def configuration(train: TrainSection, recipe: Recipe, *, trained: int, bf16: bool) -> Any:
    """DeepSpeed's configuration for the Trainer. `trained`: how many numbers are trained."""
    bucket = min(max(trained, 1), _BUCKET_ELEMENTS)
    return {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "train_batch_size": recipe.effective_batch,
        "gradient_clipping": train.max_grad_norm,
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,  # the 8-bit one works on any flat tensor
        "steps_per_print": 10**9,
    }


def allow_cpus() -> None:
    """Let the same code run between CPUs, where gradients go through gloo. On GPUs: nothing.

    Accelerate looks for DeepSpeed's backend among accelerators only, and DeepSpeed compiles a
    kernel of its own for CPUs of one machine, which takes minutes.
    """
    if torch.cuda.is_available():
        return
    import deepspeed.ops
    from accelerate.state import DistributedType, PartialState

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)


@dataclass(frozen=True)
class _Share:
    """One parameter group as ZeRO lays it out: all parameters flat, padded, cut into equal shares.

    Attributes:
        flat: This rank's float32 share, a leaf that the inner optimizer updates.
        begin: Where it begins in the whole.
        names: Name, shape and beginning of each parameter in the whole.
    """

    flat: torch.Tensor
    begin: int
    names: list[tuple[str, torch.Size, int]]

    def cuts(self, size: int, begin: int) -> Iterator[tuple[str, slice, slice]]:
        """What of the whole's `size` elements from `begin` belongs to which parameter."""
        for name, shape, at in self.names:
            first, last = max(at, begin), min(at + shape.numel(), begin + size)
            if first < last:
                yield name, slice(first - at, last - at), slice(first - begin, last - begin)


def save_state(model: Any, optimizer: Any, folder: Path) -> None:
    """Write master weights and moments whole, by parameter name; every rank takes part.

    Args:
        model: The model whose parameters are trained.
        optimizer: DeepSpeed's ZeRO optimizer.
        folder: The checkpoint, on rank 0.
    """
    from safetensors.torch import save_file

    whole: dict[str, torch.Tensor] = {}
    first = dist.get_rank() == 0
    steps = 0
    for share in _shares(model, optimizer):
        state = optimizer.optimizer.state[share.flat]
        steps = int(state["step"])
        parts = {"master": share.flat.detach()}
        parts |= {name: _read_moment(state, name) for name in _MOMENTS}
        for kind, mine in parts.items():
            for rank in range(dist.get_world_size()):
                sent = mine.contiguous() if rank == dist.get_rank() else torch.empty_like(mine)
                dist.broadcast(sent, src=rank)
                if not first:
                    continue
                kept = sent.cpu()
                for name, into, of in share.cuts(mine.numel(), rank * mine.numel()):
                    shape = next(s for n, s, _ in share.names if n == name)
                    tensor = whole.setdefault(f"{name}.{kind}", torch.empty(shape))
                    tensor.view(-1)[into] = kept[of]
    if first:
        save_file(whole, folder / STATE, metadata={"steps": str(steps)})


def load_state(model: Any, optimizer: Any, folder: Path) -> int:
    """Take this rank's shares from what `save_state` wrote, on however many ranks.

    Returns:
        How many steps were trained.

    Raises:
        AdapterError: The file holds no state of one of the parameters.
    """
    from safetensors import safe_open

    with safe_open(folder / STATE, "pt") as stored:
        known = set(stored.keys())
        steps = int(stored.metadata()["steps"])
        for share in _shares(model, optimizer):
            missing = sorted(n for n, _, _ in share.names if f"{n}.master" not in known)
            if missing:
                raise AdapterError(
                    f"{STATE}: no state of {len(missing)} parameters, first {missing[0]}",
                    expected="the state of every trained parameter",
                    hint="remove the checkpoint and train again",
                )
            _make_state(optimizer.optimizer, share.flat)
            state = optimizer.optimizer.state[share.flat]
            mine = {kind: torch.zeros_like(share.flat) for kind in ("master", *_MOMENTS)}
            for name, of, into in share.cuts(share.flat.numel(), share.begin):
                for kind, tensor in mine.items():
                    tensor[into] = stored.get_tensor(f"{name}.{kind}").view(-1)[of].to(tensor)
            share.flat.data.copy_(mine["master"])
            for name in _MOMENTS:
                _write_moment(state, name, mine[name])
            step = state["step"]
            state["step"] = torch.full_like(step, steps) if torch.is_tensor(step) else steps
    return steps


def _shares(model: Any, optimizer: Any) -> Iterator[_Share]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameters, flat in zip(
        optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
    ):
        at, found = 0, []
        for parameter in parameters:
            found.append((names[id(parameter)], parameter.shape, at))
            at += parameter.numel()
        yield _Share(flat, dist.get_rank() * flat.numel(), found)


def _make_state(inner: Any, flat: torch.Tensor) -> None:
    """Let the optimizer allocate its state; at rate 0 no weight changes."""
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0
    flat.grad = torch.zeros_like(flat)
    inner.step()
    flat.grad = None
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate


def _read_moment(state: Any, name: str) -> torch.Tensor:
    if name in state:
        return torch.as_tensor(state[name])
    from bitsandbytes.functional import dequantize_blockwise

    number = _MOMENTS[name]
    stored = state[f"state{number}"]
    if stored.dtype != torch.uint8:  # of few elements
        return torch.as_tensor(stored)
    scales, code = state[f"absmax{number}"], state[f"qmap{number}"]
    return torch.as_tensor(dequantize_blockwise(stored, absmax=scales, code=code, blocksize=256))


def _write_moment(state: Any, name: str, value: torch.Tensor) -> None:
    if name in state:
        state[name].copy_(value)
        return
    from bitsandbytes.functional import quantize_blockwise

    number = _MOMENTS[name]
    stored = state[f"state{number}"]
    if stored.dtype != torch.uint8:
        stored.copy_(value)
        return
    code = state[f"qmap{number}"]
    packed, scales = quantize_blockwise(value, code=code, blocksize=256)
    stored.copy_(packed.view_as(stored))
    state[f"absmax{number}"].copy_(scales.absmax)
