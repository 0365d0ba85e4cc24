"""What in a run would fail later, seen now and all at once: names, shapes, lengths, families."""

from __future__ import annotations

import importlib.util

from tuneserve.config import RunFile
from tuneserve.parallel import ServedShape, tensor_parallel_problems
from tuneserve.plan.arch import Arch, Linear
from tuneserve.plan.rows import DataShape
from tuneserve.train.recipe import uneven

# Model types that both GPTQModel 7.6.0 (`models/auto.py::MODEL_MAP`) and vLLM 0.32.0
# (`model_executor/models/registry.py`) know, read on 2026-11-29; `test_plan_checks` compares.
QUANTIZABLE = frozenset(
    """
    afmoe apertus bloom cohere cohere2 cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 ernie4_5 ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3
    gemma3_text gemma3n gemma3n_text gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite
    glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 jamba laguna lfm2 lfm2_moe llama llama4 llama4_text
    longcat_flash minicpm3 minimax_m2 ministral3 mistral mixtral nemotron_h olmo2 olmo3 olmoe
    opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2
    zamba2
    """.split()
)
# vLLM's CPU kernel for 4-bit weights works on blocks of so many features (vllm 0.32,
# `CPUWNA16LinearKernel`).
_CPU_BLOCK = 32
_GROUPS = (128, 64, 32)
_HEAD_NAMES = ("lm_head", "embed_out")
_EMBEDDING_NAMES = ("embed_tokens", "wte", "word_embeddings")


def problems(
    run: RunFile, arch: Arch, data: DataShape | None, *, gpu: bool, gpus: int | None = None
) -> list[str]:
    """Everything that would fail later, as sentences that begin with the field to mend.

    Args:
        run: The run file.
        arch: The base.
        data: The data set, where known.
        gpu: Whether there is a GPU, or one is supposed.
        gpus: How many there are; None: not known.
    """
    return [
        *_adapter_problems(run, arch),
        *_length_problems(run, arch, data),
        *_quantize_problems(run, arch, data, gpu=gpu),
        *_serve_problems(run, data),
        *_kernel_problems(run, gpu=gpu),
        *_several_problems(run, arch, data, gpu=gpu, gpus=gpus),
    ]


def target_linears(run: RunFile, arch: Arch) -> tuple[Linear, ...]:
    """The linear layers that get an adapter; names that match none are left to `problems`."""
    wanted = run.train.lora.target_modules
    if wanted == "all-linear":
        return arch.linears
    names = {name.rsplit(".", 1)[-1] for name in wanted}
    return tuple(linear for linear in arch.linears if linear.name in names)


def _adapter_problems(run: RunFile, arch: Arch) -> list[str]:
    found = []
    lora = run.train.lora
    available = ", ".join(arch.linear_names())
    wanted = [] if lora.target_modules == "all-linear" else list(lora.target_modules)
    for name in wanted:
        leaf = name.rsplit(".", 1)[-1]
        if leaf in _HEAD_NAMES + _EMBEDDING_NAMES and arch.tied:
            found.append(
                f"train.lora.target_modules: {name} is tied to the embedding of this model, and an "
                "adapter on one would change both; leave it out"
            )
        elif leaf in _HEAD_NAMES:
            found.append(
                f"train.lora.target_modules: {name} cannot have an adapter, because the loss reads "
                "the head's weight itself; list it in train.lora.modules_to_save instead"
            )
        elif leaf not in arch.linear_names():
            found.append(
                f"train.lora.target_modules: {name} matches no linear layer; there are {available}"
            )
    if not wanted and lora.target_modules != "all-linear":
        found.append(f"train.lora.target_modules is empty; there are {available}")
    known = (*arch.linear_names(), *_HEAD_NAMES, *_EMBEDDING_NAMES)
    for name in lora.modules_to_save:
        leaf = name.rsplit(".", 1)[-1]
        if leaf not in known and "norm" not in leaf and not leaf.startswith("ln_"):
            found.append(
                f"train.lora.modules_to_save: {name} is no module of this model; there are "
                f"embed_tokens, lm_head and {available}"
            )
    return found


def _length_problems(run: RunFile, arch: Arch, data: DataShape | None) -> list[str]:
    found = []
    if run.data.max_length > arch.context:
        found.append(
            f"data.max_length: {run.data.max_length} is over the model's context of {arch.context}"
        )
    serve = run.serve.max_model_len
    if serve is not None and serve > arch.context:
        found.append(f"serve.max_model_len: {serve} is over the model's context of {arch.context}")
    if serve is not None and data is not None and serve < data.longest:
        found.append(
            f"serve.max_model_len: {serve} is shorter than the longest training row "
            f"({data.longest} tokens), which the server must be able to repeat"
        )
    return found


def _quantize_problems(run: RunFile, arch: Arch, data: DataShape | None, *, gpu: bool) -> list[str]:
    if all(method == "none" for method in run.quantize.methods):
        return []
    found = []
    known = arch.model_type in QUANTIZABLE
    if not known and "none" not in run.quantize.methods:
        found.append(
            f"quantize.methods: {arch.model_type} is not among the architectures that GPTQModel "
            "quantizes and vLLM serves; set [none] to serve 16 bits, or choose another base"
        )
    found += _group_problems(run.quantize.group_size, arch)
    if not gpu:
        odd = sorted(
            {
                f"{t.name} ({t.in_features} to {t.out_features})"
                for t in arch.linears
                if t.in_features % _CPU_BLOCK or t.out_features % _CPU_BLOCK
            }
        )
        if odd:
            found.append(
                f"quantize.methods: vLLM's 4-bit kernel for CPUs needs sizes divisible by "
                f"{_CPU_BLOCK}, which {', '.join(odd)} are not; set [none]"
            )
    if data is not None:
        tokens = sum(
            min(length, run.quantize.calibration_max_tokens)
            for length in data.lengths[: run.quantize.calibration_rows]
        )
        if tokens < run.quantize.min_calibration_tokens:
            found.append(
                f"quantize.min_calibration_tokens: {run.quantize.min_calibration_tokens} wanted, "
                f"the training rows give {tokens} at most; add data, or lower it knowing that the "
                "4-bit model may be worse"
            )
    return found


def _group_problems(group: int, arch: Arch) -> list[str]:
    if group < 0:
        return []
    odd = sorted({f"{t.name} ({t.in_features})" for t in arch.linears if t.in_features % group})
    if not odd:
        return []
    fitting = [
        str(size) for size in _GROUPS if all(t.in_features % size == 0 for t in arch.linears)
    ]
    return [
        f"quantize.group_size: {group} does not divide the inputs of {', '.join(odd)}, which no "
        f"server would load; use {' or '.join([*fitting, '-1'])}"
    ]


def _serve_problems(run: RunFile, data: DataShape | None) -> list[str]:
    if data is None or not data.has_tool_calls or run.serve.tool_parser:
        return []
    return [
        "serve.tool_parser is unset, but the data has tool calls, which the server would then "
        "refuse; name vLLM's parser for this model (hermes for Qwen, llama3_json for Llama 3, ...)"
    ]


def _kernel_problems(run: RunFile, *, gpu: bool) -> list[str]:
    if run.train.attention != "flash_attention_2":
        return []
    if not gpu:
        return ["train.attention: flash_attention_2 needs a GPU; use sdpa"]
    if run.engines.train.python is None and importlib.util.find_spec("flash_attn") is None:
        return ["train.attention: flash_attention_2 is not installed; use sdpa, or install it"]
    return []


def _several_problems(
    run: RunFile, arch: Arch, data: DataShape | None, *, gpu: bool, gpus: int | None
) -> list[str]:
    found = []
    train, parts = run.train, run.serve.tensor_parallel
    shared = uneven(train, data.rows, train.gpus) if data else ""
    found += [shared] if shared else []
    if gpu and gpus is not None and train.gpus > gpus:
        found.append(f"train.gpus: {train.gpus}, and this machine shows {gpus}")
    if train.zero and not _installed("deepspeed", run.engines.train.python):
        found.append(
            "train.zero: 2 needs DeepSpeed, which is not installed; `make venv` installs it, or "
            "set train.zero: 0"
        )
    if parts == 1:
        return found
    if not gpu:
        found.append(f"serve.tensor_parallel: {parts} needs as many GPUs, and there is none")
    elif gpus is not None and parts > gpus:
        found.append(f"serve.tensor_parallel: {parts}, and this machine shows {gpus} GPUs")
    four_bit = any(method != "none" for method in run.quantize.methods)
    shape = ServedShape(
        arch.heads,
        arch.key_value_heads,
        arch.head_dim,
        arch.inner,
        arch.vocab,
        run.quantize.group_size if four_bit else None,
    )
    return found + tensor_parallel_problems(parts, shape)


def _installed(name: str, elsewhere: str | None) -> bool:
    return elsewhere is not None or importlib.util.find_spec(name) is not None


def warnings(run: RunFile, arch: Arch, data: DataShape | None, *, gpu: bool) -> list[str]:
    """What works, but perhaps not as expected."""
    found = []
    methods = run.quantize.methods
    if arch.source == "guess":
        found.append(f"the family {arch.model_type} is not known here; its shape is a guess")
    if "none" in methods and methods != ["none"] and arch.model_type not in QUANTIZABLE:
        found.append(f"{arch.model_type} cannot be quantized; it will be served in 16 bits")
    if arch.experts:
        found.append(
            f"{arch.experts} experts a block: memory is planned as if all of them were dense"
        )
    if run.train.gpus > 1 and not gpu:
        found.append(
            f"train.gpus: {run.train.gpus}, and there is no GPU: as many processes share the CPU"
        )
    if data is not None and data.rows < run.train.effective_batch:
        found.append(
            f"train.effective_batch is {run.train.effective_batch}, but there are {data.rows} "
            "training rows: every step takes all of them"
        )
    if gpu and run.quantize.methods != ["none"]:
        narrow = sorted(
            {t.name for t in arch.linears if t.in_features % 128 or t.out_features % 64}
        )
        if narrow:
            found.append(
                f"{', '.join(narrow)}: sizes that vLLM's Marlin kernel does not take (128 in, 64 "
                "out); a slower kernel serves them"
            )
    return found
