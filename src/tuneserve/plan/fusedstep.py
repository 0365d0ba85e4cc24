"""What comes and goes in a training step whose products are fused (`tuneserve.lm.fused`).

The moment of the peak is the same, the way back into the last block, but other things are alive.
A norm keeps its input, which the residual keeps anyway. A linear layer's weight is dequantized
into scratch memory that the widest user decides and that is never given back. An MLP goes through
its inner width in parts, of which one lies in that scratch; it keeps its input, or without
checkpointing its gate and up projection.
"""

from __future__ import annotations

from tuneserve.plan.arch import Arch
from tuneserve.plan.constants import Constants
from tuneserve.plan.trainstep import Step

# As in `tuneserve.lm.fused`, which cannot be imported without torch; a test compares them.
PART_BYTES = 216 * 2**20
PART_WIDTH = 2048
PART_MULTIPLE = 1024
LOGITS_BYTES = 128 * 2**20
TOGETHER = ("q_proj", "k_proj", "v_proj")
# As in `tuneserve.train.offload`: block inputs that stay on the card.
OFFLOAD_PLACES = 10
OFFLOAD_BYTES = 320 * 2**20


def can_fuse(arch: Arch, *, dropout: bool, dora: bool) -> bool:
    """Whether all that `fuse` replaces will be replaced."""
    names = {linear.name for linear in arch.linears}
    gated = {"gate_proj", "up_proj", "down_proj"} <= names
    return gated and not arch.experts and arch.gate == "silu" and not dropout and not dora


def part_width(tokens: int, arch: Arch, element_bytes: int, *, quantized: bool) -> int:
    """Width of the first of the parts that an MLP's inner width is cut into."""
    inner = arch.inner
    column = 3 * element_bytes * (tokens + (arch.hidden if quantized else 0))
    count = max(1, min(-(-inner * column // PART_BYTES), inner // PART_WIDTH))
    width = -(-inner // count)
    return min(-(-width // PART_MULTIPLE) * PART_MULTIPLE, inner)


def held_inputs(arch: Arch, step: Step) -> int:
    """Inputs of checkpointed blocks that are on the card at once."""
    if step.checkpointing != "offload" or arch.layers <= OFFLOAD_PLACES:
        return arch.layers
    size = step.tokens * arch.hidden * step.element_bytes
    return max(2, min(OFFLOAD_PLACES, OFFLOAD_BYTES // size))


def scratch_bytes(arch: Arch, step: Step) -> int:
    """What the widest user of the scratch memory takes, on its way back: an MLP, queries, keys and
    values of one node (`tuneserve.lm.together`), or the head.
    """
    one = step.element_bytes
    width = part_width(step.tokens, arch, one, quantized=step.quantized)
    mlp = 3 * step.tokens * width * one
    if step.quantized:  # a part of gate, of up and of the down projection
        mlp += 3 * width * arch.hidden * one
    together = 0
    if step.quantized and any(target.name in TOGETHER for target in step.targets):
        together = (arch.query + 2 * arch.key_value) * (arch.hidden + step.tokens) * one
    rows = min(max(64, LOGITS_BYTES // (arch.vocab * one)), step.tokens)
    return max(mlp, together, rows * arch.vocab * one)


def kept_bytes(arch: Arch, step: Step, *, with_mlp: bool) -> int:
    """What one block keeps for its way back, its own input excepted.

    Args:
        arch: The model.
        step: The step.
        with_mlp: Gate and up projection are kept (no checkpointing), and the MLP's input only for
            adapters; else that input alone.
    """
    one, tokens = step.element_bytes, step.tokens
    targets = {target.name: target for target in step.targets}
    into_attention = any(name in targets for name in TOGETHER)
    into_mlp = not with_mlp or any(name in targets for name in ("gate_proj", "up_proj"))
    width = arch.hidden * (1 + into_attention + into_mlp)  # the first: input of the second norm
    width += 2 * arch.query + 2 * arch.key_value
    width += 2 * arch.inner * with_mlp
    width += step.rank * sum(target.in_attention for target in targets.values())
    total = one * width * tokens + 4 * arch.heads * tokens
    if not step.gpu:  # plain norms: a float32 copy of each input, and no sharing of it
        total += tokens * (4 * arch.hidden + 4) * 2
    if arch.qk_norm:
        total += tokens * one * (arch.query + arch.key_value)
    return total


def transient(arch: Arch, step: Step, constants: Constants) -> dict[str, float]:
    """The components that come and go."""
    hidden = step.tokens * arch.hidden * step.element_bytes
    parts: dict[str, float] = {"scratch: part of an MLP, dequantized": scratch_bytes(arch, step)}
    if step.checkpointing:
        parts["activations: checkpoints"] = held_inputs(arch, step) * hidden
        parts["activations: one layer"] = kept_bytes(arch, step, with_mlp=False)
    else:
        block = hidden + kept_bytes(arch, step, with_mlp=True)
        parts["activations: all layers"] = arch.layers * block
    edge = constants.fused_edge_tensors
    if step.checkpointing:
        edge += constants.fused_back_tensors
    parts["hidden states and their gradients"] = edge * hidden
    if step.gpu:
        parts["cuBLAS workspaces"] = constants.workspace_bytes
    if step.attention == "eager":
        parts["attention scores"] = (
            (4 + step.element_bytes)
            * arch.heads
            * (step.tokens * step.length)
            * (1 if step.checkpointing else arch.layers)
        )
    return parts
