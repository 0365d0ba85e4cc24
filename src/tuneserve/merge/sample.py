"""Merged rows against PEFT's own layer: ``python -m tuneserve.merge.sample``.

A process of its own, because importing PEFT takes seconds and more memory than the merge. It is
started with the merge, so that the import overlaps it; the request comes on stdin when the merge
is written, the answer goes to stdout as one JSON line. Engine file: imports torch and peft.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.headers import TensorInfo
from tuneserve.merge.plan import MergePlan, Output

_SAMPLES = 8
_ROWS = 128

# Tensors that cannot be compared by a slice of rows are compared whole, when they are no larger.
_WHOLE_ELEMENTS = 16 * 2**20

_TIMEOUT_SECONDS = 600

# Importing PEFT imports these wherever they are installed, which nearly doubles its time.
_UNNEEDED = (
    "bitsandbytes", "torchao", "gptqmodel", "optimum", "sklearn", "scipy", "pandas", "boto3",
    "deepspeed",
)  # fmt: skip


def requests(plan: MergePlan, written: dict[str, TensorInfo]) -> list[dict[str, Any]]:
    """Which rows of which tensors to compare: spread evenly over the updated ones.

    Args:
        plan: The merge.
        written: Where each output tensor lies now.
    """
    updated = [o for s in plan.shards for o in s.outputs if o.op.lora and not o.op.tokens]
    comparable = [o for o in updated if _sliceable(o) or _elements(o) <= _WHOLE_ELEMENTS]
    step = max(len(comparable) / _SAMPLES, 1)
    picked = [comparable[int(i * step)] for i in range(min(_SAMPLES, len(comparable)))]
    return [_request(output, written[output.name], place) for place, output in enumerate(picked)]


def _sliceable(output: Output) -> bool:
    """Whether some rows can be compared without the others."""
    lora = output.op.lora
    assert lora is not None
    return not (lora.embedding or output.op.stored_transposed or output.op.nf4)


def _elements(output: Output) -> int:
    return output.shape[0] * output.shape[1]


def _request(output: Output, written: TensorInfo, place: int) -> dict[str, Any]:
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
        "nf4": op.nf4,
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
    """The child process."""

    def __init__(self) -> None:
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

    def compare(self, wanted: list[dict[str, Any]], nf4: dict[str, Any] | None) -> dict[str, Any]:
        """Send the request and wait for the answer; what went wrong is in `error`."""
        request = json.dumps({"compare": wanted, "nf4": nf4})
        assert self._child.stdin is not None and self._child.stdout is not None
        watchdog = threading.Timer(_TIMEOUT_SECONDS, self._child.kill)
        watchdog.start()
        try:
            self._child.stdin.write(request + "\n")
            self._child.stdin.flush()
            # The line is all there is; an interpreter with torch takes a second to end.
            return dict(json.loads(self._child.stdout.readline()))
        except (ValueError, OSError) as error:
            return {"checked": 0, "bit_equal": 0, "tensors": [], "error": f"{error!r}"}
        finally:
            watchdog.cancel()
            self.close()

    def close(self) -> None:
        """End the child if it still runs."""
        if self._child.poll() is None:
            self._child.kill()
        for stream in (self._child.stdin, self._child.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._child.wait()


def compare(request: dict[str, Any], nf4: dict[str, Any] | None) -> dict[str, Any]:
    """One tensor: PEFT's merge of the rows against what was written."""
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
    if request["nf4"]:
        weight = _through_nf4(weight, nf4 or {})
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
    differs = int((expected != found).sum())
    largest = float((expected.float() - found.float()).abs().max())
    return {
        "name": request["name"],
        "rows": [begin, end],
        "bit_equal": differs == 0,
        "different_elements": differs,
        "largest_difference": largest,
        "relative_difference": largest / max(float(expected.float().abs().max()), 1e-30),
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
    import peft.tuners.lora  # noqa: F401
    import transformers.pytorch_utils  # noqa: F401

    for name in _UNNEEDED:
        del sys.modules[name]
    request = json.loads(sys.stdin.readline() or '{"compare": [], "nf4": null}')
    tensors = [compare(item, request["nf4"]) for item in request["compare"]]
    status = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    answer = {
        "checked": len(tensors),
        "bit_equal": sum(t["bit_equal"] for t in tensors),
        "tensors": tensors,
        "peak_rss_bytes": int(status) * 1024,
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
