"""Merged rows against PEFT's own layer: ``python -m tuneserve.merge.sample``.

A process of its own, because importing PEFT takes seconds and more memory than the merge. It is
started with the merge, so that the import overlaps it; requests come on stdin, a JSON line each,
as shards are finished, and answers go to stdout likewise. Engine file: imports torch and peft.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.headers import TensorInfo, read_header
from tuneserve.merge.imports import uncollected
from tuneserve.merge.plan import MergePlan, Output
from tuneserve.merge.result import peak_rss_bytes

_SAMPLES = 8
_ROWS = 128

# Tensors that cannot be compared by a slice of rows are compared whole, when they are no larger.
_WHOLE_ELEMENTS = 16 * 2**20

_TIMEOUT_SECONDS = 600

# Of the update's norm, by which rows may differ that PEFT computes in another order or rounds once
# more (2**-8 of an embedding's update); a wrong scale or sign differs by as much as the update.
_UPDATE_SHARE = 0.05

# Plain updates of linear layers are the same sums; another matrix library, or another number of
# threads, may take them in another order.
_PLAIN_UPDATE_SHARE = 2**-12

# A float32 sum in another order is rounded to another 16-bit value less often than this: of 1 in
# 1000 values of float16 at rank 256 with an update ten times the weights. An update that is
# missing and too small to be seen in the norm, beside the last place, moves far more of them.
_PLAIN_ROUNDED_SHARE = 2**-7

# Norms over many rows (DoRA) differ by this much in float32.
_LEAST_ROUNDING = 2**-18

# Importing PEFT imports these wherever they are installed, which nearly doubles its time.
_UNNEEDED = (
    "bitsandbytes", "torchao", "gptqmodel", "optimum", "sklearn", "scipy", "pandas", "boto3",
    "deepspeed",
)  # fmt: skip


def picked(plan: MergePlan) -> dict[str, list[tuple[int, Output]]]:
    """Which tensors to compare, by shard, spread evenly over the updated ones; each with its
    number.
    """
    updated = [
        (shard.name, output)
        for shard in plan.shards
        for output in shard.outputs
        if output.op.lora and not output.op.tokens
    ]
    comparable = [(n, o) for n, o in updated if _sliceable(o) or _elements(o) <= _WHOLE_ELEMENTS]
    step = max(len(comparable) / _SAMPLES, 1)
    found: dict[str, list[tuple[int, Output]]] = {}
    for place in range(min(_SAMPLES, len(comparable))):
        name, output = comparable[int(place * step)]
        found.setdefault(name, []).append((place, output))
    return found


def _sliceable(output: Output) -> bool:
    """Whether some rows can be compared without the others."""
    lora = output.op.lora
    assert lora is not None
    return not (lora.embedding or output.op.stored_transposed or output.op.nf4)


def _elements(output: Output) -> int:
    return output.shape[0] * output.shape[1]


def request(
    output: Output, written: TensorInfo, place: int, nf4: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the child needs to compare some rows of one tensor; `written` is where it lies now."""
    lora, op = output.op.lora, output.op
    assert lora is not None
    count = output.shape[0]
    begin, end = 0, count
    if _sliceable(output) and count > _ROWS:
        # Off our own tile bounds, and elsewhere in every tensor.
        begin = (count - _ROWS) * place // max(_SAMPLES - 1, 1)
        end = begin + _ROWS
    return {
        "name": output.name,
        "rows": [begin, end],
        "source": _place(op.source),
        "written": _place(written),
        "a": _place(lora.a),
        "b": _place(lora.b),
        "magnitude": _place(lora.magnitude) if lora.magnitude else None,
        "scale": lora.scale,
        "embedding": lora.embedding,
        "transposed": op.stored_transposed,
        "nf4": dict(nf4 or {}) if op.nf4 else None,
    }


def _place(info: TensorInfo) -> dict[str, Any]:
    return {
        "file": str(info.file),
        "dtype": info.dtype,
        "shape": list(info.shape),
        "begin": info.begin,
        "nbytes": info.nbytes,
    }


class Sampler:
    """The child process. It is asked shard by shard, and compares while later shards are merged."""

    def __init__(self, plan: MergePlan, nf4: Mapping[str, Any] | None) -> None:
        self._picked, self._nf4, self._asked = picked(plan), nf4, 0
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tuneserve.merge.sample"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        # Its imports take as long as merging gigabytes, and nobody waits for them before the end.
        os.setpriority(os.PRIO_PROCESS, self._child.pid, 10)

    def ask(self, shard: Path) -> None:
        """Have the picked tensors of a finished shard compared; does not wait.

        All requests together are a few kilobytes, less than a pipe holds.
        """
        wanted = self._picked.get(shard.name, [])
        written = {info.name: info for info in read_header(shard).tensors} if wanted else {}
        assert self._child.stdin is not None
        for place, output in wanted:
            line = json.dumps(request(output, written[output.name], place, self._nf4))
            with contextlib.suppress(OSError):  # it died: `answers` says so
                self._child.stdin.write(line + "\n")
                self._child.stdin.flush()
            self._asked += 1

    def answers(self) -> dict[str, Any]:
        """Wait for what was asked; what went wrong is in `error`."""
        assert self._child.stdin is not None and self._child.stdout is not None
        watchdog = threading.Timer(_TIMEOUT_SECONDS, self._child.kill)
        watchdog.start()
        tensors: list[dict[str, Any]] = []
        answer: dict[str, Any] = {}
        try:
            # The lines are all there is; an interpreter with torch takes a second to end.
            for _ in range(self._asked):
                tensors.append(json.loads(self._child.stdout.readline()))
            answer["peak_rss_bytes"] = max((t.pop("peak_rss_bytes") for t in tensors), default=0)
        except (ValueError, OSError) as error:
            answer["error"] = f"{error!r}"
        finally:
            watchdog.cancel()
            self.close()
        answer |= {"checked": len(tensors), "bit_equal": sum(t["bit_equal"] for t in tensors)}
        return {**answer, "tensors": tensors}

    def close(self) -> None:
        """End the child if it still runs."""
        if self._child.poll() is None:
            self._child.kill()
        for stream in (self._child.stdin, self._child.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._child.wait()


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """One tensor: PEFT's merge of the rows against what was written.

    `far` says that they differ by more than rounding can explain. The difference is measured by the
    size of the update, beside one unit in the last place for the values that differ: against the
    weights, which are larger by far, an update that is missing would not be seen. For plain updates
    of linear layers (`plain`), which are the same bits on most machines, the share of the update is
    small, and few 16-bit values may differ.
    """
    import torch
    from peft import LoraConfig
    from peft.tuners.lora import layer as layers
    from transformers.pytorch_utils import Conv1D

    begin, end = request["rows"]
    sliced = [begin, end] if not request["transposed"] and not request["embedding"] else None
    a = _load(request["a"]).float()
    b = _load(request["b"], sliced).float()
    weight = _load(request["source"], [begin, end])
    found = _load(request["written"], [begin, end])
    weight = weight.to(found.dtype)
    if request["nf4"] is not None:
        weight = _through_nf4(weight, request["nf4"])
    rank = a.shape[0]
    config = LoraConfig(r=rank, lora_alpha=rank, use_dora=request["magnitude"] is not None)
    module: torch.nn.Module
    wrapper: Any
    if request["embedding"]:
        module = torch.nn.Embedding(*weight.shape, dtype=weight.dtype)
        wrapper = layers.Embedding
    elif request["transposed"]:
        module = Conv1D(weight.shape[1], weight.shape[0]).to(weight.dtype)
        wrapper = layers.Linear
        config.fan_in_fan_out = True
    else:
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        wrapper = layers.Linear
    module.weight.data = weight.clone()
    layer = wrapper(module, "default", config=config, r=rank, lora_alpha=rank)
    if request["embedding"]:
        layer.lora_embedding_A["default"].data = a
        layer.lora_embedding_B["default"].data = b
    else:
        layer.lora_A["default"].weight.data = a
        layer.lora_B["default"].weight.data = b
    if request["magnitude"]:
        rows = sliced if not request["transposed"] and not request["embedding"] else None
        layer.lora_magnitude_vector["default"].weight.data = _load(
            request["magnitude"], rows
        ).float()
    layer.scaling["default"] = request["scale"]
    layer.merge()
    expected = layer.get_base_layer().weight.data
    differs = expected != found
    is_plain = wrapper is layers.Linear and not (
        request["magnitude"] or request["transposed"] or request["nf4"] is not None
    )
    wide, error = expected.float(), (expected.float() - found.float())
    step = torch.finfo(found.dtype).eps
    share = _PLAIN_UPDATE_SHARE if is_plain else _UPDATE_SHARE
    rounding = (step if is_plain else max(step, _LEAST_ROUNDING)) * wide[differs].norm()
    bound = share * (wide - weight.float()).norm() + rounding
    few = max(1, differs.numel() * _PLAIN_ROUNDED_SHARE)
    is_rounded = not is_plain or found.dtype == torch.float32 or int(differs.sum()) <= few
    return {
        "name": request["name"],
        "rows": [begin, end],
        "bit_equal": not bool(differs.any()),
        "different_elements": int(differs.sum()),
        "largest_difference": float(error.abs().max()),
        "plain": is_plain,
        "far": not (is_rounded and bool(error.norm() <= bound)),
    }


def _load(place: dict[str, Any], rows: list[int] | None = None) -> Any:
    import torch

    from tuneserve.merge.tiles import TORCH_DTYPES

    shape = place["shape"]
    begin, end = rows or [0, shape[0]]
    row_bytes = place["nbytes"] // shape[0]
    with Path(place["file"]).open("rb", buffering=0) as stream:
        data = bytearray(
            os.pread(stream.fileno(), (end - begin) * row_bytes, place["begin"] + begin * row_bytes)
        )
    return torch.frombuffer(data, dtype=TORCH_DTYPES[place["dtype"]]).view(-1, *shape[1:])


def _through_nf4(weight: Any, settings: dict[str, Any]) -> Any:
    import bitsandbytes.functional as functional

    return functional.dequantize_4bit(
        *functional.quantize_4bit(
            weight.contiguous(),
            blocksize=int(settings.get("blocksize", 64)),
            compress_statistics=bool(settings.get("double_quant", True)),
            quant_type=str(settings.get("quant_type", "nf4")),
        )
    )


def _serve() -> None:
    for name in _UNNEEDED:
        sys.modules[name] = None  # type: ignore[assignment] # Python's way to make one absent
    # The slow imports, while the merge still runs.
    with uncollected():
        import peft.tuners.lora  # noqa: F401
        import transformers.pytorch_utils  # noqa: F401

    for name in _UNNEEDED:
        del sys.modules[name]
    for line in sys.stdin:
        answer = compare(json.loads(line))
        answer["peak_rss_bytes"] = peak_rss_bytes()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
