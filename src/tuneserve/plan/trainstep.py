"""One training step: what of it decides how much memory it takes, and how long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tuneserve.plan.arch import Linear

Kernels = Literal["plain", "liger", "fused"]


@dataclass(frozen=True)
class Step:
    """All that decides the memory of one training step.

    Attributes:
        length: Tokens per row, padding included.
        accumulation: Micro-batches per optimizer step.
        targets: Linear layers that get an adapter.
        whole_weights: Parameters of modules trained whole (`modules_to_save`).
        padded: Rows of unequal length need a mask, under which keys and values are repeated for all
            heads before attention; without one the kernel shares them.
        checkpointing: Recompute activations; `offload`: what is kept for that is in host memory.
        kernels: `fused`, the product's own; `plain` transformers modules, where those do not apply;
            or Liger's norms and gate, which measured peers use.
        compiled: Blocks under torch.compile, which keep one hidden state more.
        element_bytes: Of weights and activations: 2, or 4 on a CPU without bf16 instructions.
        adapter_element_bytes: Of what is trained.
        half: Products are float16, beside which our adapters are float32 and cast at each product.
        gpus: Processes that share a step, each with `micro_batch` x `accumulation` rows.
        zero: 2 when they share gradients and optimizer state as well.
    """

    micro_batch: int
    length: int
    targets: tuple[Linear, ...]
    rank: int
    quantized: bool
    double_quant: bool = True
    accumulation: int = 1
    checkpointing: bool | Literal["offload"] = True
    optimizer: str = "adamw_8bit"
    attention: str = "sdpa"
    dropout: bool = False
    dora: bool = False
    whole_weights: int = 0
    padded: bool = False
    kernels: Kernels = "plain"
    compiled: bool = False
    element_bytes: int = 2
    adapter_element_bytes: int = 2
    gpu: bool = True
    gpus: int = 1
    zero: int = 0
    half: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.length


def with_micro_batch(step: Step, micro_batch: int, effective_batch: int) -> Step:
    """The same step with other rows per pass, and the accumulation that keeps the batch."""
    return replace(step, micro_batch=micro_batch, accumulation=effective_batch // micro_batch)
