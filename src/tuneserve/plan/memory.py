"""Peak memory of a training step, component by component.

One step holds what stays (weights, adapters, optimizer) and what comes and goes. Of the latter the
most is alive when the backward pass enters the last block: all activations (or, with checkpointing,
the inputs of all blocks and the recomputed activations of one), the gradient inside its MLP, and
the widest weight dequantized. A frozen linear layer keeps nothing for its backward pass; an adapter
keeps its input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuneserve.plan import fusedstep, several
from tuneserve.plan.arch import Arch, lora_weights
from tuneserve.plan.constants import DEFAULT, NF4_BYTES, NF4_DOUBLE_BYTES, Constants
from tuneserve.plan.trainstep import Step

_KEPT = ("activations: checkpoints", "activations: all layers")

# TRL's fused head projects tiles of so many tokens and so many vocabulary rows (trl 1.16,
# `kernels/chunked_logprob.py`), so that the logits are never whole.
_HEAD_TOKENS = 4096
_HEAD_COLUMNS = 32768


@dataclass(frozen=True)
class Peak:
    """Bytes by component; `droppable` names those that the kernel can take back under pressure."""

    components: Mapping[str, int]
    droppable: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The predicted peak."""
        return sum(self.components.values())

    @property
    def needed_bytes(self) -> int:
        """The peak without what can be dropped."""
        return self.total_bytes - sum(self.components.get(name, 0) for name in self.droppable)


def train_peak(arch: Arch, step: Step, constants: Constants = DEFAULT) -> Peak:
    """Predicted peak of a training step: device memory with a GPU, resident memory without one."""
    parts = _resident(arch, step)
    parts.update(_transient(arch, step, constants))
    whole = {name: int(value) for name, value in parts.items() if value}
    if step.gpu:
        if step.kernels == "fused":
            hidden = step.tokens * arch.hidden * step.element_bytes
            slack = constants.fused_slack_bytes + constants.fused_slack_tensors * hidden
        else:
            slack = constants.slack_blocks * max(_largest_block(arch, step), 2 * 2**20)
        whole["allocator slack"] = int(slack)
        whole["CUDA context"] = constants.cuda_context_bytes
        return Peak(whole)
    return process_peak(whole, arch, constants.train_process_bytes, constants)


def process_peak(
    parts: dict[str, int], arch: Arch, process_bytes: int, constants: Constants
) -> Peak:
    """Resident memory of a process without a GPU: `parts`, the allocator's slack, libraries, and
    the checkpoint that it maps, whose pages the kernel may drop.
    """
    rest = {
        "allocator slack": int(constants.cpu_slack * sum(parts.values())),
        "interpreter and libraries": process_bytes,
        "mapped checkpoint": 2 * arch.weights,
    }
    return Peak({**parts, **rest}, droppable=("mapped checkpoint",))


def _resident(arch: Arch, step: Step) -> dict[str, float]:
    """What stays from step to step."""
    per_weight = NF4_DOUBLE_BYTES if step.double_quant else NF4_BYTES
    trained = lora_weights(step.targets, step.rank, dora=step.dora)
    adapters = trained * step.adapter_element_bytes
    whole = step.whole_weights
    return {
        "weights: linear layers": arch.linear_weights
        * (per_weight if step.quantized else step.element_bytes),
        "weights: embedding and head": arch.embedding_weights * step.element_bytes,
        f"weights: {'experts, ' * bool(arch.experts)}norms and biases": arch.other_weights
        * step.element_bytes,
        "adapters": adapters,
        "modules trained whole": whole * step.adapter_element_bytes,
        "optimizer": (trained + whole) * _optimizer_bytes(step) / (step.gpus if step.zero else 1),
        **several.exchange_bytes(step, trained + whole),
    }


def _optimizer_bytes(step: Step) -> float:
    """Bytes of state per trained parameter."""
    if step.zero:
        return several.zero_bytes(step)
    if step.optimizer == "adamw_8bit":  # two 8-bit moments, each with a float32 scale per 256
        return 2 * (1 + 4 / 256)
    if step.optimizer == "paged_adamw_8bit":  # in unified memory, which gives way to the step
        return 2 * (1 + 4 / 256) if not step.gpu else 0.0
    return 2.0 * step.adapter_element_bytes


def _transient(arch: Arch, step: Step, constants: Constants) -> dict[str, float]:
    """What comes and goes, at the moment when most of it is alive."""
    trained = lora_weights(step.targets, step.rank, dora=step.dora)
    gradient = step.adapter_element_bytes * (trained + step.whole_weights)
    fused = step.kernels == "fused"
    parts = fusedstep.transient(arch, step, constants) if fused else _plain(arch, step, constants)
    # What gives way to gradients as the way back goes on; not what is in host memory.
    offloaded = step.checkpointing == "offload"
    kept = 0 if offloaded else sum(size for name, size in parts.items() if name in _KEPT)
    if step.zero or step.gpus > 1:
        parts["gradients"] = several.gradient_bytes(step, gradient)
    elif step.accumulation > 1:  # of the micro-batches before this one
        parts["gradients"] = gradient
    else:  # gradients grow while activations go; they matter only where there are few of these
        parts["gradients"] = max(0.0, gradient - kept)
    if step.half and fused:  # every node keeps its factors as it multiplied them
        parts["adapters in float16"] = step.element_bytes * trained
    if step.dora:  # norm of the merged weight, in float32
        parts["DoRA norms"] = 2 * 4 * max(t.in_features * t.out_features for t in step.targets)
    return parts


def _plain(arch: Arch, step: Step, constants: Constants) -> dict[str, float]:
    """Activations, and what the way back needs, of modules that are not fused."""
    hidden_state = step.tokens * arch.hidden * step.element_bytes
    layer = step.tokens * saved_bytes_per_token(arch, step) + _attention_bytes(arch, step)
    parts: dict[str, float] = {}
    recomputed = layer if step.checkpointing else 0
    if step.checkpointing:
        parts["activations: checkpoints"] = fusedstep.held_inputs(arch, step) * hidden_state
    else:
        parts["activations: all layers"] = arch.layers * layer
    gradients, buffer = _backward_bytes(arch, step)
    head = _head_bytes(arch, step)
    if head > recomputed + gradients + buffer:  # the loss comes before the first block goes back
        parts["head tile"] = head
    else:
        parts["activations: one layer"] = recomputed
        parts["gradients inside the MLP"] = gradients
        parts["dequantization buffer"] = buffer
    parts["hidden states and their gradients"] = constants.edge_tensors * hidden_state
    return parts


def saved_bytes_per_token(arch: Arch, step: Step) -> int:
    """Bytes that one block keeps for its backward pass, per token, attention scores excluded.

    Plain modules compute norms in float32 and keep that copy; Liger's keep the 16-bit input. The
    plain gate keeps three tensors of the MLP's width, Liger's two.
    """
    liger = step.kernels == "liger"
    one = step.element_bytes
    norm = one if liger else 4
    targets = {target.name: target for target in step.targets}
    outputs = ("o_proj", "out_proj", "dense")
    into_attention = any(t.in_attention and t.name not in outputs for t in step.targets)
    into_mlp = any(not t.in_attention and t.in_features == arch.hidden for t in step.targets)
    into_down = any(not t.in_attention and t.in_features == arch.inner for t in step.targets)
    total = (norm * arch.hidden + 4) * (2 + arch.extra_norms)  # and each row's root mean square
    total += one * arch.hidden * (into_attention + into_mlp + step.compiled)
    total += one * _query_key_value(arch, step) + one * arch.query  # and the attention's output
    total += (norm * arch.head_dim + 4) * (arch.heads + arch.key_value_heads) * arch.qk_norm
    total += one * arch.inner * ((2 if liger else 3) + into_down)
    total += one * step.rank * len(targets)
    if step.dropout:  # each adapter has its own: a scaled input and a mask
        total += sum((one + 1) * target.in_features for target in targets.values())
    if step.half:  # each adapter widens its input for itself, and keeps x A' wide
        wide = step.adapter_element_bytes - (one if step.dropout else 0)
        total += sum(wide * target.in_features for target in targets.values())
        total += (step.adapter_element_bytes - one) * step.rank * len(targets)
    return total


def _masked(arch: Arch, step: Step) -> bool:
    """Whether attention gets a mask: for padded rows, and in Phi-3's module always."""
    return step.padded or arch.model_type == "phi3"


def _query_key_value(arch: Arch, step: Step) -> int:
    """Elements of q, k and v as attention keeps them, per token.

    Beside a mask the kernel wants keys and values repeated for all heads. Phi-3's dropouts keep one
    hidden state even at probability zero.
    """
    dropouts = arch.hidden if arch.model_type == "phi3" else 0
    shared = arch.query if _masked(arch, step) else arch.key_value
    return arch.query + 2 * shared + dropouts


def _attention_bytes(arch: Arch, step: Step) -> int:
    """Attention scores (eager), or their logarithmic sums and the mask in the scores' type."""
    square = step.tokens * step.length
    if step.attention == "eager":
        return (4 + step.element_bytes) * arch.heads * square
    mask = step.element_bytes * square if _masked(arch, step) else 0
    return 4 * arch.heads * step.tokens + mask


def _mlp_gradient_bytes(arch: Arch, step: Step) -> int:
    """One gradient of the MLP's width."""
    return step.tokens * arch.inner * step.element_bytes


def _backward_bytes(arch: Arch, step: Step) -> tuple[int, int]:
    """Gradients and dequantized weight at the widest moment of going back through the MLP.

    That is either the down projection (one gradient, the weight dequantized) or, with plain
    modules, the gate (gradients of its product and of both factors).
    """
    one = _mlp_gradient_bytes(arch, step)
    buffer = step.element_bytes * _widest(arch) if step.quantized else 0
    if step.kernels == "liger" or one + buffer >= 3 * one:
        return one, buffer
    return 3 * one, 0


def _widest(arch: Arch) -> int:
    return max((linear.in_features * linear.out_features for linear in arch.linears), default=0)


def _head_bytes(arch: Arch, step: Step) -> int:
    """The loss: one tile of logits, and the hidden states' gradient in float32 and in 16 bits."""
    rows, columns = min(step.tokens, _HEAD_TOKENS), min(arch.vocab, _HEAD_COLUMNS)
    if step.kernels == "liger":  # a tile as wide as the vocabulary, as large as the hidden states
        rows, columns = max(1, step.tokens * arch.hidden // arch.vocab), arch.vocab
    # Without Triton torch transforms the tile out of place: in its backward pass seven float32
    # copies and a mask are alive at once (trl 1.16, `_backward_tile`).
    per_logit = 2 if step.gpu else step.element_bytes + 7 * 4 + 1
    return rows * columns * per_logit + step.tokens * arch.hidden * 8


def _largest_block(arch: Arch, step: Step) -> int:
    buffer = step.element_bytes * _widest(arch) if step.quantized else 0
    return max(_mlp_gradient_bytes(arch, step), buffer)
