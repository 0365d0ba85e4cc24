"""The few numbers of the plan that were measured rather than derived.

`bench/bench_plan.py` compares the plan with published measurements; the reasons stand beside each
number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Constants:
    """What differs from machine to machine or from library to library.

    Attributes:
        cuda_context_bytes: Context, cuBLAS workspaces and kernels of a torch process on a card.
        slack_blocks: Memory that torch's allocator holds but cannot use, in units of the largest
            block that comes and goes in a step: fragmentation grows with that block, not with the
            total.
        edge_tensors: Hidden-state sized tensors alive at the peak beside the layer's own: the
            gradient that comes in, the sum of residual gradients, the final norm's input and
            output.
        fused_edge_tensors: The same of a step with fused products.
        fused_back_tensors: What attention takes on its way back, in hidden states; it matters under
            checkpointing, where no MLP's activations have just been given back.
        workspace_bytes: Of cuBLAS, for the thread that goes back; the other's is given back.
        fused_slack_bytes: What the allocator holds and cannot use in a step with fused products,
            whose widest buffers are never given back: rounding to pages, small tensors.
        fused_slack_tensors: And in hidden states, which alone come and go there.
        evaluate_slack: Share that torch's allocator holds beyond what is counted, on a GPU.
        cpu_slack: Share that malloc keeps beyond what is asked, without a GPU.
        train_process_bytes: Interpreter with torch, transformers, peft, trl and bitsandbytes.
        merge_process_bytes: Interpreter with torch alone; part of `merge.max_memory`.
        quantize_process_bytes: Interpreter with gptqmodel.
        gpu_process_bytes: What a torch process holds in RAM once CUDA's libraries are loaded.
        hessian_copies: Float32 matrices of the widest layer's input size that GPTQ keeps at once
            (Hessian, its damped copy, Cholesky factor, inverse).
        server_process_bytes: The three processes of one vLLM on CPU, without weights and cache.
        compare_rest_bytes: What is reserved beyond what is counted while an export's loss is
            compared on a card: GPTQModel's remains, holes. Of one measurement
            (`bench/results/quantize_h200_gptq.json`).
        server_gpu_bytes: CUDA context, graphs and activations of one vLLM on a card.
    """

    cuda_context_bytes: int = 740 * MIB
    slack_blocks: float = 2.0
    edge_tensors: float = 5.0
    fused_edge_tensors: float = 3.7
    fused_back_tensors: float = 2.2
    fused_slack_bytes: int = 109 * MIB
    fused_slack_tensors: float = 2.7
    workspace_bytes: int = 32 * MIB
    evaluate_slack: float = 0.02
    cpu_slack: float = 0.10
    train_process_bytes: int = 900 * MIB
    merge_process_bytes: int = 350 * MIB
    quantize_process_bytes: int = 1600 * MIB
    gpu_process_bytes: int = 3 * GIB
    hessian_copies: int = 4
    compare_rest_bytes: int = 881 * MIB
    server_process_bytes: int = 2662 * MIB
    server_gpu_bytes: int = 2560 * MIB


DEFAULT = Constants()

# From this size on vLLM takes more sequences at once, and captures graphs for them. As in
# `tuneserve.release.capacity`; a test compares them. Of two servers on one H200
# (`bench/results/serve_h200.json`): 3.66 GiB each when both were up, 3.88 after load on one.
LARGE_GPU_BYTES = 70 * GIB
LARGE_SERVER_BYTES = 3840 * MIB


def for_card(constants: Constants, gpu_bytes: int | None) -> Constants:
    """The same with what a server takes beside weights and cache on a card of that size."""
    if gpu_bytes is None or gpu_bytes < LARGE_GPU_BYTES:
        return constants
    return replace(constants, server_gpu_bytes=max(constants.server_gpu_bytes, LARGE_SERVER_BYTES))


# NF4: 4 bits, and one scale for 64 weights: float32, or under double quantization 8 bits and a
# float32 for 256 of these (bitsandbytes `quantize_4bit`; QLoRA, arXiv 2305.14314, section 3).
NF4_BYTES = 0.5 + 4 / 64
NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def quantized_bytes(weights: int, group_size: int, in_features: int) -> int:
    """Bytes of 4-bit weights, with a 16-bit scale and a 4-bit zero per group (GPTQ, AWQ)."""
    group = group_size if group_size > 0 else in_features
    return int(weights * (0.5 + 2.5 / group))
