"""Early checks of the 4-bit export, from headers and config.json alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tuneserve.checkpoint.headers import TensorInfo
from tuneserve.cpu import has_int4_kernel
from tuneserve.errors import ModelError, QuantizeError, RunFileError
from tuneserve.quantize import checks, quantize_model
from tuneserve.quantize.finite import check_finite, gptq_problems
from tuneserve.quantize.support import gptqmodel_types, vllm_architectures
from tuneserve.runfile import parse_run

NUMPY = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4"}
SMOLLM2 = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}


def write_model(
    folder: Path,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    config: dict[str, Any],
    values: dict[str, np.ndarray] | None = None,
) -> Path:
    """A checkpoint written by hand: header, then bytes (ones where `values` has nothing)."""
    folder.mkdir(parents=True, exist_ok=True)
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        value = (values or {}).get(name)
        if value is None:
            value = np.full(shape, 0x3F80 if dtype == "BF16" else 1, NUMPY[dtype])
        raw = value.astype(NUMPY[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def llama(layers: dict[str, tuple[int, int]] = SMOLLM2, *, tied: bool = True) -> dict[str, Any]:
    tensors: dict[str, Any] = {"model.embed_tokens.weight": ("BF16", (64, 576))}
    tensors |= {f"model.layers.0.{name}.weight": ("BF16", s) for name, s in layers.items()}
    tensors["model.layers.0.input_layernorm.weight"] = ("BF16", (576,))
    if not tied:
        tensors["lm_head.weight"] = ("BF16", (64, 576))
    return tensors


def config(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "vocab_size": 64,
        **more,
    }


def test_d03_a_group_size_that_divides_no_layer_is_refused_with_what_fits(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", llama(), config())
    with pytest.raises(QuantizeError) as caught:
        checks.preflight(model, "gptq", 128)
    text = str(caught.value)
    assert "mlp.gate_proj" in text and "576 input features" in text and "group_size 128" in text
    assert "mlp.down_proj" not in text  # 1536 = 12 x 128
    assert caught.value.details["fitting_group_sizes"] == [64, 32, -1]
    assert caught.value.hint == "set quantize.group_size to 64"
    for size in (64, 32, -1):
        checks.preflight(model, "gptq", size)


def test_group_problems_name_a_kind_of_layer_once_and_count_it() -> None:
    shapes = {f"model.layers.{i}.mlp.up_proj": (1536, 576) for i in range(30)}
    problems = checks.group_size_problems(shapes, 128)
    assert len(problems) == 2
    assert problems[0].startswith("model.layers.*.mlp.up_proj (30 layers): 576 input features")
    assert problems[1] == "group sizes that fit every layer: 64, 32, -1"


def test_tensor_parallel_parts_must_hold_whole_groups() -> None:
    # 1536 / 4 = 384 = 3 x 128 fits; 1536 / 8 = 192 does not; q_proj splits outputs, not inputs.
    shapes = {"model.layers.0.mlp.down_proj": (2048, 1536), "model.layers.0.q_proj": (2048, 2048)}
    assert checks.group_size_problems(shapes, 128, tensor_parallel_size=4) == []
    problems = checks.group_size_problems(shapes, 128, tensor_parallel_size=8)
    assert "192 input features on each of 8 GPUs" in problems[0]
    uneven = checks.group_size_problems(shapes, -1, tensor_parallel_size=5)
    assert len(uneven) == 2 and "do not split evenly over 5 GPUs" in uneven[0]


def test_the_export_is_refused_for_the_gpus_that_will_serve_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", llama(), config())
    checks.preflight(model, "gptq", 64, tensor_parallel_size=3)  # 576 / 3 = 3 x 64
    with pytest.raises(QuantizeError, match="o_proj: 144 input features on each of 4 GPUs") as odd:
        checks.preflight(model, "gptq", 64, tensor_parallel_size=4)  # 144 is no multiple of 32
    assert odd.value.hint == "set quantize.group_size to -1"
    assert odd.value.details["fitting_group_sizes"] == [-1]
    with pytest.raises(QuantizeError, match="do not split evenly over 5 GPUs") as uneven:
        checks.preflight(model, "gptq", 64, tensor_parallel_size=5)
    assert uneven.value.hint is not None and "serve.tensor_parallel" in uneven.value.hint
    with pytest.raises(QuantizeError, match="self_attn.o_proj: 576 outputs and 36 inputs") as words:
        checks.preflight(model, "gptq", -1, tensor_parallel_size=16)
    assert words.value.hint is not None and "serve.tensor_parallel" in words.value.hint


@pytest.mark.parametrize(
    ("leaf", "split"),
    [("w2", True), ("fc_out", True), ("dense_4h_to_h", True), ("o_proj", True), ("w1", False)],
)
def test_every_familys_row_parallel_layers_split_their_inputs(leaf: str, split: bool) -> None:
    shapes = {f"model.layers.0.mlp.{leaf}": (2048, 1536)}
    assert checks.group_size_problems(shapes, 128, tensor_parallel_size=2) == []  # 6 x 128
    assert checks.group_size_problems(shapes, 128, tensor_parallel_size=4) == []  # 3 x 128
    odd = checks.group_size_problems(shapes, 128, tensor_parallel_size=8)
    assert bool(odd) is split  # 192 of the 1536 inputs, or all of them


def test_parts_of_a_layer_must_hold_whole_words() -> None:
    """36 values of 576 on each of 16 GPUs are four and a half words of eight; 72 on 8 are nine."""
    row = {"model.layers.0.self_attn.o_proj": (2048, 576)}
    column = {"model.layers.0.self_attn.q_proj": (576, 2048)}
    for shapes, part in ((row, "2048 outputs and 36 inputs"), (column, "36 outputs and 2048")):
        assert checks.kernel_problems(shapes) == []
        assert checks.kernel_problems(shapes, tensor_parallel_size=8) == []
        (problem,) = checks.kernel_problems(shapes, tensor_parallel_size=16)
        assert f"{part}" in problem and "on each of 16 GPUs" in problem


@pytest.mark.parametrize(("shape", "bad"), [((48, 64), True), ((64, 48), True), ((64, 32), False)])
def test_features_that_the_kernels_cannot_tile(shape: tuple[int, int], bad: bool) -> None:
    assert bool(checks.kernel_problems({"layers.0.up_proj": shape})) is bad


def test_d07_an_unknown_architecture_is_refused_before_anything_runs(tmp_path: Path) -> None:
    unknown = config(model_type="nosuchmodel", architectures=["NoSuchForCausalLM"])
    model = write_model(tmp_path / "m", llama(), unknown)
    with pytest.raises(QuantizeError, match="nosuchmodel.*GPTQModel") as caught:
        checks.preflight(model, "gptq", 64)
    assert "NoSuchForCausalLM" in str(caught.value) and "none" in caught.value.hint


def test_known_architectures_are_read_without_importing_an_engine() -> None:
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma3"} <= gptqmodel_types()
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= vllm_architectures()
    code = (
        "import sys; import tuneserve.quantize; from tuneserve.quantize import checks, support; "
        "support.gptqmodel_types(); support.vllm_architectures(); "
        "print(sorted({'torch', 'gptqmodel', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_architectures_are_known_also_where_training_hides_gptqmodel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gptqmodel", None)
    gptqmodel_types.cache_clear()
    assert "llama" in gptqmodel_types()


def test_d04_a_missing_or_quantized_head() -> None:
    tied, untied = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
    embedding = {"model.embed_tokens.weight": 0}
    assert checks.head_problems(embedding, tied) == []
    assert "lm_head.weight is missing" in checks.head_problems(embedding, untied)[0]
    assert checks.head_problems({**embedding, "lm_head.weight": 0}, untied) == []
    packed = {**embedding, "lm_head.qweight": 0}
    assert "quantized" in checks.head_problems(packed, tied)[0]
    assert checks.scheme_problems({**GPTQ, "lm_head": True})


GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
    "checkpoint_format": "gptq",
}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "gemm",
}


def test_d08_only_schemes_with_fast_kernels_pass() -> None:
    assert checks.scheme_problems(GPTQ) == []
    assert checks.scheme_problems(AWQ) == []
    assert checks.scheme_problems({**GPTQ, "desc_act": True, "group_size": -1}) == []
    for wrong in (
        {**GPTQ, "desc_act": True},
        {**GPTQ, "sym": False},
        {**GPTQ, "bits": 8},
        {**GPTQ, "group_size": 48},
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        {**AWQ, "zero_point": False},
        {**AWQ, "version": "gemv"},
        {**GPTQ, "quant_method": "bitsandbytes"},
        {},
    ):
        assert checks.scheme_problems(wrong), wrong


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("desc_act", True, "vLLM refuses activation order with groups"),
        ("sym", False, "vLLM serves GPTQ with sym: true alone"),
        ("lm_head", True, "the head stays in 16 bits"),
    ],
)
def test_d04_d08_schemes_that_are_not_served_are_refused_with_the_run_file(
    field: str, value: bool, why: str
) -> None:
    run = {"name": "x", "model": {"base": "b"}, "data": {"train": "t"}, "quantize": {field: value}}
    with pytest.raises(RunFileError, match=f"quantize: {field} is no choice: {why}"):
        parse_run(run)


def exported(method: str = "gptq", group: int = 64) -> dict[str, Any]:
    """Tensors of an export, by the formats' definitions."""
    tensors: dict[str, Any] = {"model.embed_tokens.weight": ("BF16", (64, 576))}
    tensors["model.layers.0.input_layernorm.weight"] = ("BF16", (576,))
    for name, (n, k) in SMOLLM2.items():
        module = f"model.layers.0.{name}"
        tensors[f"{module}.qzeros"] = ("I32", (k // group, n // 8))
        tensors[f"{module}.scales"] = ("F16", (k // group, n))
        if method == "gptq":
            tensors[f"{module}.qweight"] = ("I32", (k // 8, n))
            tensors[f"{module}.g_idx"] = ("I32", (k,))
        else:
            tensors[f"{module}.qweight"] = ("I32", (k, n // 8))
    return tensors


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_whole_export_passes_the_static_check(tmp_path: Path, method: str) -> None:
    merged = write_model(tmp_path / "m", llama(), config())
    scheme = {"gptq": GPTQ, "awq": AWQ}[method]
    export = write_model(tmp_path / "q", exported(method), config(quantization_config=scheme))
    asked = {"method": method, "bits": 4, "group_size": 64}
    assert checks.static_check(export, merged, **asked) == []


def test_an_export_of_a_family_that_is_tied_by_default_needs_no_flag(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "vocab_size": 64}
    stored = {**llama(), "lm_head.weight": ("BF16", (64, 576))}  # a copy, which is left out
    merged = write_model(tmp_path / "m", stored, gemma)
    export = write_model(tmp_path / "q", exported(), {**gemma, "quantization_config": GPTQ})
    asked: dict[str, Any] = {"method": "gptq", "bits": 4, "group_size": 64}
    assert checks.static_check(export, merged, **asked) == []
    checks.preflight(merged, "gptq", 64)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.block_sparse_moe.gate",  # Mixtral
        "model.layers.0.mlp.gate",  # Qwen3-MoE
        "model.layers.0.mlp.shared_expert_gate",  # Qwen2-MoE
        "transformer.blocks.0.ffn.router.layer",  # DBRX
        "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1",  # Gemma 3
        "visual.blocks.0.attn.qkv",  # Qwen2-VL
    ],
)
def test_routers_and_vision_are_not_quantized(name: str) -> None:
    def info(module: str) -> Any:
        return TensorInfo(f"{module}.weight", Path("m"), "BF16", (8, 64), 0, 0)

    up = "model.layers.0.mlp.gate_proj"
    shapes = checks.quantized_shapes({f"{n}.weight": info(n) for n in (name, up)})
    assert list(shapes) == [up]


def test_layers_stored_transposed_and_nested_models_are_refused_at_once(tmp_path: Path) -> None:
    shapes = {"transformer.h.0.attn.c_attn.weight": ("BF16", (64, 192))}
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    with pytest.raises(QuantizeError, match="gpt2 stores its layers transposed"):
        checks.preflight(write_model(tmp_path / "g", shapes, gpt2), "gptq", 64)
    both = config(text_config={"model_type": "gemma3_text"}, model_type="gemma3")
    with pytest.raises(QuantizeError, match="nested beside another part"):
        checks.preflight(write_model(tmp_path / "n", llama(), both), "gptq", 64)


def test_the_bias_of_a_packed_layer_may_be_float16(tmp_path: Path) -> None:
    """GPTQModel writes it so, whatever the model's type; only there."""
    bias = "model.layers.0.self_attn.k_proj.bias"
    merged = write_model(tmp_path / "m", {**llama(), bias: ("BF16", (192,))}, config())
    asked: dict[str, Any] = {"method": "gptq", "bits": 4, "group_size": 64}
    for dtype, fine in (("F16", True), ("BF16", True), ("F32", False)):
        tensors = {**exported(), bias: (dtype, (192,))}
        export = write_model(tmp_path / "q", tensors, config(quantization_config=GPTQ))
        assert (checks.static_check(export, merged, **asked) == []) is fine
    norm = "model.layers.0.input_layernorm.weight"
    tensors = {**exported(), bias: ("F16", (192,)), norm: ("F16", (576,))}
    export = write_model(tmp_path / "q", tensors, config(quantization_config=GPTQ))
    assert "is F16" in checks.static_check(export, merged, **asked)[0]


def test_the_static_check_finds_each_fault(tmp_path: Path) -> None:
    merged = write_model(tmp_path / "m", llama(), config())
    q = "model.layers.0.self_attn.k_proj"

    def check(tensors: dict[str, Any], scheme: dict[str, Any] = GPTQ) -> str:
        export = write_model(tmp_path / "q", tensors, config(quantization_config=scheme))
        return "\n".join(checks.static_check(export, merged, method="gptq", bits=4, group_size=64))

    whole = exported()
    assert check(whole) == ""
    assert f"{q}.scales: is missing" in check(
        {k: v for k, v in whole.items() if k != f"{q}.scales"}
    )
    assert f"{q}.qweight: is I32 [72, 200]" in check({**whole, f"{q}.qweight": ("I32", (72, 200))})
    assert "group_size is 32, asked was 64" in check(whole, {**GPTQ, "group_size": 32})
    assert "sym is not true" in check(whole, {**GPTQ, "sym": False})
    left = {k: v for k, v in whole.items() if not k.startswith(q)}
    left[f"{q}.weight"] = ("BF16", (192, 576))
    assert "k_proj is not quantized, but q_proj is" in check(left)  # a fused group of two schemes
    stray = {**whole, "model.layers.0.extra": ("BF16", (4,))}
    assert "model.layers.0.extra: belongs to nothing" in check(stray)
    doubled = {**whole, "lm_head.weight": ("BF16", (64, 576))}
    assert "lm_head.weight: belongs to nothing" in check(doubled)  # D04: tied, stored twice
    lost = {k: v for k, v in whole.items() if "layernorm" not in k}
    assert "input_layernorm.weight: is missing" in check(lost)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("BF16", 0x7F80), ("BF16", 0xFFC1), ("F16", 0xFC00), ("F32", 0x7FC00000), ("F32", 0xFF800000)],
)
def test_d02_d05_a_value_that_is_not_finite_is_named(tmp_path: Path, dtype: str, bits: int) -> None:
    kind = "<u2" if dtype != "F32" else "<u4"
    raw = np.ones((3, 32), kind)
    raw[1, 5] = bits
    model = tmp_path / "m"
    write_model(model, {"a": (dtype, (3, 32)), "b": ("F32", (2,))}, {})
    path = model / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:begin] + raw.tobytes() + data[begin + raw.nbytes :])
    with pytest.raises(QuantizeError, match=r"a: 1 of 96 values .* first at \[1, 5\]"):
        check_finite(model, "m")


def test_d05_a_zero_scale_is_named_and_a_zero_weight_is_not(tmp_path: Path) -> None:
    scales = np.ones((2, 4), "<f2")
    scales[1, 2] = -0.0
    tensors = {"x.scales": ("F16", (2, 4)), "x.weight": ("F16", (2, 4))}
    values = {"x.scales": scales, "x.weight": np.zeros((2, 4), "<f2")}
    with pytest.raises(QuantizeError, match="x.scales: 1 of 8 scales are zero") as caught:
        check_finite(write_model(tmp_path / "m", tensors, {}, values), "m")
    assert len(caught.value.details["problems"]) == 1


def test_zero_points_and_groups_that_a_server_would_not_read_are_named(tmp_path: Path) -> None:
    """vLLM takes 8 for every zero point of symmetric GPTQ, and groups in their order."""
    zeros, groups = np.full((2, 4), 0x77777777, "<i4"), np.arange(128, dtype="<i4") // 64
    tensors = {"x.qzeros": ("I32", (2, 4)), "x.g_idx": ("I32", (128,))}

    def found(group_size: int, **values: np.ndarray) -> list[str]:
        given = {"x.qzeros": zeros, "x.g_idx": groups, **{f"x.{k}": v for k, v in values.items()}}
        return gptq_problems(write_model(tmp_path / "m", tensors, {}, given), group_size)

    assert found(64) == []
    other = zeros.copy()
    other[1, 2] = 0x77777787  # a zero point of 9
    assert found(64, qzeros=other) == ["x.qzeros: 1 of 8 words are not zero points 8"]
    assert found(64, g_idx=groups[::-1]) == ["x.g_idx: its inputs are not in groups of 64 in order"]
    assert len(found(-1)) == 1 and found(-1, g_idx=np.zeros(128, "<i4")) == []


def test_the_largest_finite_numbers_pass(tmp_path: Path) -> None:
    values = {"a": np.array([65504.0, -65504.0], "<f2"), "b": np.array([3.4e38], "<f4")}
    tensors = {"a": ("F16", (2,)), "b": ("F32", (1,))}
    check_finite(write_model(tmp_path / "m", tensors, {}, values), "m")


def test_a_model_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", llama(), config(quantization_config=GPTQ))
    with pytest.raises(QuantizeError, match="quantized already"):
        checks.preflight(model, "gptq", 64)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    odd = {**SMOLLM2, "mlp.up_proj": (1530, 576)}
    wrong = config(model_type="nosuchmodel", tie_word_embeddings=False)
    model = write_model(tmp_path / "m", llama(odd), wrong)
    with pytest.raises(QuantizeError) as caught:
        checks.preflight(model, "awq", 128)
    text = str(caught.value)
    for part in ("nosuchmodel", "group_size 128", "1530 outputs", "lm_head.weight is missing"):
        assert part in text


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    gone = [f".q.{ended}", f".q.{ended}.work", f".q.{os.getpid()}.work"]
    kept = [f".q.{os.getppid()}", ".q.notes", f".other.{ended}", f".q.{ended}.txt"]
    for name in (*gone, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    with pytest.raises(ModelError, match="no-model: is not a folder"):
        quantize_model(tmp_path / "no-model", "gptq", tmp_path / "d", tmp_path / "q")
    assert {path.name for path in tmp_path.iterdir()} == set(kept)


def test_cpus_without_avx512_have_no_int4_kernel(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx avx2\n")
    assert not has_int4_kernel(info)
    info.write_text("processor : 0\nflags : fpu avx2 avx512f avx512bw\n")
    assert has_int4_kernel(info)
    info.write_text("processor : 0\nFeatures : asimd sve\n")  # not x86
    assert has_int4_kernel(info)


def test_d09_the_server_reads_the_method_from_the_export(tmp_path: Path) -> None:
    from tuneserve.config import ServeSection
    from tuneserve.release import capacity, vllm_command
    from tuneserve.release.model_files import read_model

    export = write_model(tmp_path / "q", exported(), config(quantization_config=GPTQ))
    (export / "chat_template.jinja").write_text("{{ messages }}")
    facts = read_model(export)
    assert facts.quantization == "gptq"
    names = {field.name for field in dataclasses.fields(capacity.Capacity)}
    room = mock.Mock(spec=sorted(names), device="cpu", max_model_len=64, kv_cache_bytes=1)
    arguments = vllm_command.serving_arguments(facts, ServeSection(), room, False)
    assert "--quantization" not in arguments  # a flag could only contradict it


@pytest.mark.parametrize(
    ("config", "capability", "why"),
    [
        ({"model_type": "llama", "dtype": "float16"}, (8, 0), "config.json says float16"),
        ({"model_type": "llama", "dtype": "bfloat16"}, (8, 0), ""),
        ({"model_type": "llama", "dtype": "bfloat16"}, None, ""),
        ({"model_type": "llama", "dtype": "bfloat16"}, (7, 5), "Tesla T4 has no bfloat16"),
        ({"model_type": "gemma2", "dtype": "bfloat16"}, (7, 5), ""),  # vLLM takes float32
    ],
)
def test_where_float16_overflows(
    config: dict[str, str], capability: tuple[int, int] | None, why: str
) -> None:
    from tuneserve.plan.machine import Gpu
    from tuneserve.quantize.smoke import why_float16

    assert why_float16(config, Gpu("Tesla T4", 1, 1, (), capability)).startswith(why)
    assert bool(why_float16(config, Gpu("Tesla T4", 1, 1, (), capability))) == bool(why)
    assert bool(why_float16(config, None)) == (config["dtype"] == "float16")
