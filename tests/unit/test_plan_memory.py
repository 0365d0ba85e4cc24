"""The training peak against measured steps, and its parts against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuneserve.config import RunFile
from tuneserve.plan.arch import arch_from_config
from tuneserve.plan.constants import quantized_bytes
from tuneserve.plan.later import (
    disk_bytes,
    evaluate_peak,
    kv_cache_bytes,
    merge_peak,
    quantize_peak,
    served_weight_bytes,
    serving,
)
from tuneserve.plan.memory import saved_bytes_per_token, train_peak
from tuneserve.plan.trainstep import Step, with_micro_batch
from tuneserve.runfile import parse_run

GIB = 2**30
QWEN2_7B = arch_from_config(
    {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
)
ATTENTION = tuple(linear for linear in QWEN2_7B.linears if linear.in_attention)
STEP = Step(2, 2048, ATTENTION, 64, True, optimizer="paged_adamw_8bit", kernels="liger")

# One step of Qwen2-7B's shape on one H200 (peak of torch's allocator: allocated, reserved, in GiB).
MEASURED = [
    ("nf4 r64", STEP, 6.8296, 7.2559),
    ("nf4 r64, float32 adapter", replace(STEP, adapter_element_bytes=4), 6.9075, 7.4102),
    ("nf4 all linears r16", replace(STEP, targets=QWEN2_7B.linears, rank=16), 6.9981, 7.2012),
    ("nf4 compiled", replace(STEP, compiled=True), 6.8836, 7.1387),
    ("bf16 all kept", replace(STEP, quantized=False, checkpointing=False), 26.7369, 26.7852),
    ("nf4 all kept, compiled", replace(STEP, checkpointing=False, compiled=True), 18.6190, 19.2344),
]


@pytest.mark.parametrize(
    ("step", "allocated", "reserved"), [m[1:] for m in MEASURED], ids=[m[0] for m in MEASURED]
)
def test_measured_steps(step: Step, allocated: float, reserved: float) -> None:
    parts = dict(train_peak(QWEN2_7B, step).components)
    del parts["CUDA context"]
    slack = parts.pop("allocator slack")
    assert sum(parts.values()) / GIB == pytest.approx(allocated, rel=0.01)
    assert (sum(parts.values()) + slack) / GIB == pytest.approx(reserved, rel=0.04)


@pytest.mark.parametrize(
    ("quantized", "double", "loaded"),
    [(True, True, 5.1663), (True, False, 5.4494), (False, False, 14.1852)],
)
def test_loaded_weights_as_measured(quantized: bool, double: bool, loaded: float) -> None:
    step = replace(STEP, quantized=quantized, double_quant=double)
    parts = train_peak(QWEN2_7B, step).components
    weights = sum(size for name, size in parts.items() if name.startswith("weights"))
    assert weights / GIB == pytest.approx(loaded, rel=0.001)


def test_experts_stay_in_16_bits() -> None:
    """Mixtral-8x7B: 4 bits for its attention alone, 2 bytes for 32 x 8 experts of 3 x 4096 x 14336,
    their routers and 65 norms.
    """
    mixtral = arch_from_config(
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_local_experts": 8,
        }
    )
    parts = train_peak(mixtral, replace(STEP, targets=mixtral.linears)).components
    others = 32 * 8 * (3 * 4096 * 14336 + 4096) + 65 * 4096
    assert parts["weights: experts, norms and biases"] == 2 * others
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    per_weight = 0.5 + 1 / 64 + 4 / (64 * 256)
    assert parts["weights: linear layers"] == int(attention * per_weight)


def test_checkpoints_by_hand() -> None:
    """28 blocks x 4096 tokens x 3584 x 2 bytes."""
    parts = train_peak(QWEN2_7B, STEP).components
    assert parts["activations: checkpoints"] == 28 * 4096 * 3584 * 2
    assert parts["dequantization buffer"] == 3584 * 18944 * 2


def test_saved_bytes_by_hand() -> None:
    """Hidden 8, two heads of 4 of which one for keys, MLP 16, rank 2 on q_proj, plain modules.

    Norms 2 x (8 x 4 + 4); the input of q_proj 16; q 16, k 8, v 8, output 16; gate, its sigmoid
    product and up 3 x 32; rank 4.
    """
    arch = arch_from_config(
        {
            "model_type": "llama",
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
            "vocab_size": 10,
        }
    )
    target = tuple(linear for linear in arch.linears if linear.name == "q_proj")
    step = Step(1, 4, target, 2, False)
    assert saved_bytes_per_token(arch, step) == 72 + 16 + 48 + 96 + 4
    # With a mask keys and values are repeated for both heads.
    assert saved_bytes_per_token(arch, replace(step, padded=True)) == 72 + 16 + 64 + 96 + 4


def test_each_choice_moves_the_peak_the_right_way() -> None:
    base = train_peak(QWEN2_7B, STEP).total_bytes
    larger = [
        replace(STEP, micro_batch=4),
        replace(STEP, length=4096),
        replace(STEP, rank=128),
        replace(STEP, checkpointing=False),
        replace(STEP, quantized=False),
        replace(STEP, kernels="plain"),
        replace(STEP, padded=True),
        replace(STEP, attention="eager"),
        replace(STEP, optimizer="adamw_torch"),
        replace(STEP, accumulation=2),
        replace(STEP, dora=True),
        replace(STEP, dropout=True),
        replace(STEP, whole_weights=10**8),
    ]
    assert all(train_peak(QWEN2_7B, step).total_bytes > base for step in larger)


def test_a_cpu_has_no_context_and_counts_its_mapped_checkpoint_as_droppable() -> None:
    peak = train_peak(QWEN2_7B, replace(STEP, gpu=False, element_bytes=4))
    assert "CUDA context" not in peak.components
    assert peak.total_bytes - peak.needed_bytes == 2 * QWEN2_7B.weights


def test_micro_batch_keeps_the_effective_batch() -> None:
    step = with_micro_batch(STEP, 4, 16)
    assert (step.micro_batch, step.accumulation) == (4, 4)


def run(**changes: dict[str, object]) -> RunFile:
    return parse_run({"name": "t", "model": {"base": "b"}, "data": {"train": ["a"]}, **changes})


def test_four_bit_sizes_by_hand() -> None:
    """1024 weights in groups of 128: 512 bytes, 8 scales of 2 bytes and 8 zeros of 4 bits."""
    assert quantized_bytes(1024, 128, 256) == 512 + 16 + 4
    # -1: one group per row, here four rows of 256.
    assert quantized_bytes(1024, -1, 256) == 512 + 8 + 2


def test_served_weights_of_7b_as_measured() -> None:
    """vLLM reported 5.3 GiB for the GPTQ model and 14.3 GiB for the 16-bit one."""
    assert served_weight_bytes(QWEN2_7B, run()) / GIB == pytest.approx(5.3, rel=0.03)
    both = run(quantize={"methods": ["gptq", "none"]})
    assert served_weight_bytes(QWEN2_7B, both) / GIB == pytest.approx(14.3, rel=0.02)


def test_quantize_of_7b_as_measured() -> None:
    """GPTQModel took 8.0 GiB of GPU memory with 128 rows of 512 tokens in groups of 128."""
    peak = quantize_peak(QWEN2_7B, run(quantize={"calibration_rows": 128}), gpu=True)
    assert peak.total_bytes / GIB == pytest.approx(8.0, rel=0.05)
    assert not quantize_peak(QWEN2_7B, run(quantize={"methods": ["none"]}), gpu=True).components


def test_kv_cache_by_hand() -> None:
    """Two chats of 200 tokens: two blocks of 128 and one to spare each, 57,344 bytes a token."""
    assert kv_cache_bytes(QWEN2_7B, 200, 2) == 2 * 3 * 128 * 2 * 28 * 512 * 2


def test_serving_adds_up() -> None:
    found = serving(QWEN2_7B, run(), 2048, gpu=True)
    assert found.concurrent_chats == 8
    assert found.peak.components["KV cache"] == found.kv_cache_bytes
    assert found.peak.total_bytes == sum(found.peak.components.values())


def test_merge_takes_what_it_is_allowed() -> None:
    assert merge_peak(run(merge={"max_memory": "300MiB"})).total_bytes == 300 * 2**20


def test_evaluate_holds_one_16_bit_model() -> None:
    parts = evaluate_peak(QWEN2_7B, STEP).components
    assert parts["weights"] == 2 * 7615616512


def test_disk_counts_both_merges_and_each_export() -> None:
    one = disk_bytes(QWEN2_7B, run(merge={"base": "original"}), STEP)
    auto = disk_bytes(QWEN2_7B, run(quantize={"methods": ["gptq", "awq", "none"]}), STEP)
    assert one["merge"] > 2 * 7615616512
    assert auto["merge"] == 2 * one["merge"]
    assert auto["quantize"] == 2 * one["quantize"]
