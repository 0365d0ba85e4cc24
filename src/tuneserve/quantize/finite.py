"""Read a checkpoint's tensors piece by piece and name those that hold NaN or infinity.

A float is not finite exactly when all bits of its exponent are set (IEEE 754, and bfloat16 alike),
so whole numbers of the same width are compared and nothing is converted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tuneserve.checkpoint.headers import Checkpoint, TensorInfo
from tuneserve.errors import QuantizeError

# dtype of safetensors: (unsigned integer of the same width, its exponent bits)
_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}
_PIECE_BYTES = 8 * 2**20


def check_finite(folder: Path, what: str, *, hint: str = "") -> None:
    """Read every float tensor of a model folder once; memory stays below a few pieces of 8 MiB
    a core.

    Raises:
        QuantizeError: Names each tensor with values that are not finite, how many, and where the
            first is; and each `scales` tensor with zeros, which would silence its weights.
    """
    tensors = Checkpoint.open(folder).tensors.values()
    # Reading and comparing both leave Python's lock, so threads share the work.
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        problems = [problem for problem in pool.map(tensor_problem, tensors) if problem]
    if problems:
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise QuantizeError(
            f"{what} holds values that cannot be used:\n  " + "\n  ".join(shown),
            expected="finite numbers",
            hint=hint,
            details={"problems": problems[:100]},
        )


def tensor_problem(info: TensorInfo) -> str:
    """What is wrong with the values of one tensor; empty when nothing is."""
    if info.dtype not in _EXPONENTS:
        return ""
    kind, exponent = _EXPONENTS[info.dtype]
    bad, zeros, first = 0, 0, -1
    position = 0
    for piece in _pieces(info, kind):
        wrong = (piece & exponent) == exponent
        count = int(np.count_nonzero(wrong))
        if count and first < 0:
            first = position + int(np.argmax(wrong))
        bad += count
        if info.name.endswith(".scales"):
            zeros += int(np.count_nonzero((piece << 1) == 0))  # minus zero is a zero as well
        position += piece.size
    if bad:
        place = [int(i) for i in np.unravel_index(first, info.shape)] if info.shape else []
        return f"{info.name}: {bad} of {info.numel} values are not finite, the first at {place}"
    if zeros:
        return f"{info.name}: {zeros} of {info.numel} scales are zero"
    return ""


# The zero point of symmetric weights is 8, stored less one, eight in a word.
_SYMMETRIC = 0x77777777


def gptq_problems(folder: Path, group_size: int) -> list[str]:
    """Zero points and group numbers of a GPTQ export that are not what a server takes them for.

    vLLM reads neither of symmetric weights without activation order: it takes 8, and groups one
    after the other. Others would be served wrongly although they say what is right.
    """
    problems = []
    for info in Checkpoint.open(folder).tensors.values():
        if info.name.endswith(".qzeros"):
            words = np.concatenate(list(_pieces(info, "<u4")))
            if wrong := int(np.count_nonzero(words != _SYMMETRIC)):
                problems.append(f"{info.name}: {wrong} of {info.numel} words are not zero points 8")
        elif info.name.endswith(".g_idx"):
            groups = np.concatenate(list(_pieces(info, "<i4")))
            width = len(groups) if group_size == -1 else group_size
            if not np.array_equal(groups, np.arange(len(groups)) // width):
                problems.append(f"{info.name}: its inputs are not in groups of {width} in order")
    return problems


def _pieces(info: TensorInfo, kind: str) -> Iterator[np.ndarray]:
    with info.file.open("rb", buffering=0) as stream:
        stream.seek(info.begin)
        left = info.nbytes
        while left:
            data = stream.read(min(left, _PIECE_BYTES))
            if not data:
                raise QuantizeError(f"{info.file.name}: tensor {info.name} is cut short")
            left -= len(data)
            yield np.frombuffer(data, dtype=kind)
