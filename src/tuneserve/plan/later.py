"""Peak memory and disk of the stages after training: merge, quantize, evaluate and serve."""

from __future__ import annotations

from dataclasses import dataclass

from tuneserve.config import RunFile
from tuneserve.parallel import key_value_share
from tuneserve.plan.arch import Arch, lora_weights
from tuneserve.plan.constants import DEFAULT, Constants, quantized_bytes
from tuneserve.plan.memory import Peak, process_peak
from tuneserve.plan.trainstep import Step

# A block of vLLM's KV cache on CPU, the larger of the two platforms; each chat wastes at most one.
_KV_BLOCK_TOKENS = 128
# Rows are scored in batches of at most so many padded tokens, a longer row alone.
_EVALUATE_TOKENS = 4096
_HEAD_TOKENS = 4096
_HEAD_COLUMNS = 32768
# Tokenizer, configs and reports beside the weights.
_SMALL_FILES_BYTES = 20 * 2**20
# The export's loss is compared on so many tokens of a row, where the 16-bit model has room: so many
# times the checkpoint on a card, or in half of the free memory. As in `tuneserve.quantize.smoke`.
COMPARED_TOKENS = 192
GPU_FACTOR, MEMORY_FACTOR = 1.5, 3
# Of the widest layer while it is unpacked: values, zeros and their difference in int64, the scales
# and the difference in float32. Of a logit: 16 bits and twice float32.
_UNPACKED_BYTES = 3 * 8 + 2 * 4
_LOGIT_BYTES = 2 + 2 * 4
# The trainer keeps the checkpoint being written beside the last complete one.
_CHECKPOINTS_KEPT = 2


@dataclass(frozen=True)
class Serving:
    """What one server takes.

    Attributes:
        kv_cache_bytes: Room for `concurrent_chats` of full length, on each of its GPUs.
        peak: One server, of each of its GPUs.
    """

    max_model_len: int
    concurrent_chats: int
    kv_cache_bytes: int
    peak: Peak


def merge_peak(run: RunFile) -> Peak:
    """The merge streams in bounded memory: what the run file allows it, torch included."""
    return Peak({"merge.max_memory": run.merge.max_memory})


def quantize_peak(
    arch: Arch,
    run: RunFile,
    *,
    gpu: bool,
    constants: Constants = DEFAULT,
    room_bytes: int | None = None,
) -> Peak:
    """The larger of the two: GPTQ of one block at a time, and the comparison of losses after it.

    AWQ keeps no Hessian but the same inputs; GPTQ is the larger, and what is planned for.

    Args:
        arch: The model.
        run: The run file.
        gpu: Whether the peak is of a card.
        constants: Of this machine.
        room_bytes: What the stage may take there: the comparison is made where it fits. None: it
            is not counted.
    """
    if run.quantize.methods == ["none"]:
        return Peak({})
    exporting = _exporting(arch, run, gpu=gpu, constants=constants)
    if room_bytes is None or not compares(arch, room_bytes, gpu=gpu, constants=constants):
        return exporting
    comparing = _comparing(arch, gpu=gpu, constants=constants)
    return max(exporting, comparing, key=lambda peak: peak.needed_bytes)


def _exporting(arch: Arch, run: RunFile, *, gpu: bool, constants: Constants) -> Peak:
    """GPTQ's block, the Hessians of its widest layer, and the calibration rows."""
    widest = max(arch.linears, key=lambda t: t.in_features * t.out_features)
    deepest = max(linear.in_features for linear in arch.linears)
    tokens = run.quantize.calibration_rows * run.quantize.calibration_max_tokens
    element = 2 if gpu else 4
    parts = {
        "one block": element * arch.linear_weights // max(arch.layers, 1),
        "Hessians": constants.hessian_copies * 4 * deepest**2,
        "weights in work": 3 * 4 * widest.in_features * widest.out_features,
        "calibration inputs and outputs": 2 * element * tokens * arch.hidden,
    }
    if gpu:
        parts["CUDA context"] = constants.cuda_context_bytes
        return Peak(parts)
    parts["weights: embedding and head"] = element * arch.embedding_weights
    parts["attention and MLP of one batch"] = (
        8 * run.quantize.calibration_max_tokens * (4 * arch.query + 3 * arch.inner) * element
    )
    return process_peak(parts, arch, constants.quantize_process_bytes, constants)


def compares(arch: Arch, room_bytes: int, *, gpu: bool, constants: Constants) -> bool:
    """Whether the 16-bit model will be compared there, as `tuneserve.quantize.smoke` decides."""
    checkpoint = 2 * arch.weights
    if gpu:
        return GPU_FACTOR * checkpoint < room_bytes - constants.cuda_context_bytes
    return MEMORY_FACTOR * checkpoint <= room_bytes // 2


def _comparing(arch: Arch, *, gpu: bool, constants: Constants) -> Peak:
    """The whole model (float32 without a GPU), one layer of its export unpacked, one row's
    logits.
    """
    widest = max(linear.in_features * linear.out_features for linear in arch.linears)
    parts = {
        "16-bit model to compare with" if gpu else "model to compare with, in float32": (
            2 if gpu else 4
        )
        * arch.weights,
        "one layer unpacked": _UNPACKED_BYTES * widest,
        "logits of a row": _LOGIT_BYTES * COMPARED_TOKENS * arch.vocab,
    }
    if gpu:
        parts["remains of the export"] = constants.compare_rest_bytes
        parts["CUDA context"] = constants.cuda_context_bytes
        return Peak(parts)
    return process_peak(parts, arch, constants.quantize_process_bytes, constants)


def evaluate_peak(arch: Arch, step: Step, constants: Constants = DEFAULT) -> Peak:
    """The merged model in 16 bits, forward only; base and adapter are scored before it."""
    element = step.element_bytes
    tokens = max(step.length, _EVALUATE_TOKENS)
    rows, columns = min(tokens, _HEAD_TOKENS), min(arch.vocab, _HEAD_COLUMNS)
    parts = {
        "weights": element * arch.weights,
        "activations": element * tokens * (6 * arch.hidden + 2 * arch.query + 3 * arch.inner),
        # In float32, hidden states and a slice of the head's weight included.
        "head tile": 4
        * (rows * columns * (1 if step.gpu else 4) + (tokens + columns) * arch.hidden),
    }
    if step.gpu:  # a 7B reserved 16.1 GiB, rounding to 4 bits included
        parts["allocator slack"] = int(constants.evaluate_slack * sum(parts.values()))
        parts["CUDA context"] = constants.cuda_context_bytes
        return Peak(parts)
    return process_peak(parts, arch, constants.train_process_bytes, constants)


def served_weight_bytes(arch: Arch, run: RunFile) -> int:
    """Weights of the largest model that the ladder may serve."""
    if "none" in run.quantize.methods:
        return 2 * arch.weights
    linears = sum(
        quantized_bytes(linear.weights, run.quantize.group_size, linear.in_features)
        for linear in arch.linears
    )
    return linears + 2 * (arch.embedding_weights + arch.other_weights)


def kv_cache_bytes(arch: Arch, length: int, chats: int) -> int:
    """Keys and values of so many chats of full length, each with a block to spare."""
    blocks = -(-length // _KV_BLOCK_TOKENS) + 1
    return chats * blocks * _KV_BLOCK_TOKENS * arch.kv_bytes_per_token()


def serving(
    arch: Arch, run: RunFile, length: int, *, gpu: bool, constants: Constants = DEFAULT
) -> Serving:
    """One server with room for `serve.max_concurrent_chats` chats of `length` tokens.

    Spread over several GPUs (`serve.tensor_parallel`), it is the share of one of them.
    """
    chats = run.serve.max_concurrent_chats
    gpus = run.serve.tensor_parallel
    # Of each GPU; vLLM takes the size of its KV cache so as well.
    share = key_value_share(gpus, arch.key_value_heads)
    cache = int(share * kv_cache_bytes(arch, length, chats))
    weights = served_weight_bytes(arch, run)
    parts = {"weights": -(-weights // gpus), "KV cache": cache}
    if gpu:
        parts["context, graphs, activations"] = constants.server_gpu_bytes
    else:
        parts["processes"] = constants.server_process_bytes
    return Serving(length, chats, cache, Peak(parts))


def disk_bytes(arch: Arch, run: RunFile, step: Step) -> dict[str, int]:
    """What each stage leaves on disk, in the store."""
    trained = lora_weights(step.targets, step.rank, dora=step.dora) + step.whole_weights
    adapter = trained * step.adapter_element_bytes
    both = run.merge.base == "auto" and run.train.method == "qlora"
    four_bit = sum(
        quantized_bytes(linear.weights, run.quantize.group_size, linear.in_features)
        for linear in arch.linears
    ) + 2 * (arch.embedding_weights + arch.other_weights)
    exports = sum(method != "none" for method in set(run.quantize.methods))
    return {
        # Optimizer and scheduler go into a checkpoint beside the adapter.
        "train": adapter + _CHECKPOINTS_KEPT * (adapter + 3 * trained) + _SMALL_FILES_BYTES,
        "merge": (2 * arch.weights + _SMALL_FILES_BYTES) * (2 if both else 1),
        "quantize": (four_bit + _SMALL_FILES_BYTES) * exports,
        "evaluate": _SMALL_FILES_BYTES,
        "serve": 0,
    }
