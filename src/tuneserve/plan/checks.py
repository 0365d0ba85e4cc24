"""What in a run would fail later, seen now and all at once: names, shapes, lengths, families."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from tuneserve.config import EnginesSection, RunFile
from tuneserve.devices import FLOAT32_FAMILIES
from tuneserve.parallel import ServedShape, tensor_parallel_problems
from tuneserve.plan.arch import EMBEDDINGS, HEADS, Arch, Linear
from tuneserve.plan.rows import DataShape
from tuneserve.quantize.calibration import enough
from tuneserve.quantize.checks import KERNEL_FEATURES
from tuneserve.quantize.support import architecture_problems, gptqmodel_types
from tuneserve.train.recipe import uneven
from tuneserve.train.trackers import missing_trackers

# Model types of which `test_quantize_families` exports a small model by both methods, and of which
# vLLM 0.32.0 knows the architecture. GPTQModel 7.6.0 lists more.
_BOTH_METHODS = frozenset(
    """
    cohere ernie4_5 exaone4 gemma gemma2 gpt_bigcode gptj granite hunyuan_v1_dense lfm2 llama
    ministral3 mistral olmo2 olmo3 opt phi qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
    """.split()
)
# Its AWQ fails on these, on their rotary embedding, norm or attention.
GPTQ_ONLY = frozenset("apertus bloom cohere2 gemma3_text gemma4_text".split())
QUANTIZABLE = _BOTH_METHODS | GPTQ_ONLY
# Those that were tried with it and failed, and those that the export's own checks refuse.
_TRIED = "GPTQModel 7.6.0"
_NESTED_REASON = "its language model is nested beside another part, whose tensors are named anew"
_FAILS = {
    **dict.fromkeys(("phi3", "glm", "glm4"), f"{_TRIED} splits its fused layers"),
    **dict.fromkeys(("mixtral", "olmoe"), f"{_TRIED} names its experts not as they are stored"),
    **dict.fromkeys(("gpt_neox", "minicpm3"), f"{_TRIED} does not finish it"),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "mistral3"), _NESTED_REASON),
    "gpt2": "its layers are stored transposed",
}
_GROUPS = (128, 64, 32)
# Families that transformers 5.19 gives no attention by torch's kernel; a test compares them.
EAGER_ONLY = frozenset("bloom codegen gpt_neo gpt_oss gptj granite_swa granitemoe_swa mpt".split())
# What chooses among experts stays in 16 bits.
_ROUTERS = ("gate", "router", "shared_expert_gate")


def problems(
    run: RunFile,
    arch: Arch,
    data: DataShape | None,
    *,
    gpu: bool,
    gpus: int | None = None,
    bf16: bool = True,
) -> list[str]:
    """Everything that would fail later, as sentences that begin with the field to mend.

    Args:
        run: The run file.
        arch: The base.
        data: The data set, where known.
        gpu: Whether there is a GPU, or one is supposed.
        gpus: How many there are; None: not known.
        bf16: Whether they compute in bfloat16.
    """
    return [
        *_adapter_problems(run, arch),
        *_length_problems(run, arch, data),
        *_quantize_problems(run, arch, data),
        *_serve_problems(run, data),
        *_kernel_problems(run, arch, gpu=gpu),
        *_tracker_problems(run),
        *_several_problems(run, arch, data, gpu=gpu, gpus=gpus),
        *_zero_problems(run, arch, half=gpu and not bf16),
    ]


def known_to_fail(arch: Arch, method: str, engines: EnginesSection | None = None) -> str:
    """Why `method` cannot export a base of this family; empty where nothing is known against it.

    Args:
        arch: The base.
        method: gptq, awq or none.
        engines: The interpreters that would export and serve, which are asked what they know; None:
            they are not, and the export asks them.
    """
    reason = ""
    if method == "none":
        return reason
    if "ConditionalGeneration" in arch.architecture:
        return f"{arch.architecture} cannot be exported: {_NESTED_REASON}"
    if method == "awq" and arch.model_type in GPTQ_ONLY:
        reason = f"AWQ of {_TRIED} fails on its rotary embedding, norm or attention"
    reason = reason or _FAILS.get(arch.model_type, "")
    if not reason and engines is not None:
        names = [arch.architecture] if arch.architecture else []
        config = {"model_type": arch.model_type, "architectures": names}
        reason = "; ".join(
            architecture_problems(config, engines.quantize.python, engines.serve.python)
        )
    return f"{arch.model_type} cannot be exported by {method}: {reason}" if reason else ""


def exportable(arch: Arch) -> bool:
    """Whether a base of this family and of these sizes is known to be served in 4 bits."""
    known = arch.model_type in QUANTIZABLE and not known_to_fail(arch, "gptq", EnginesSection())
    return known and not _odd_sizes(arch)


def target_linears(run: RunFile, arch: Arch) -> tuple[Linear, ...]:
    """The linear layers that get an adapter; names that match none are left to `problems`."""
    wanted = run.train.lora.target_modules
    if wanted == "all-linear":
        return arch.linears
    names = {name.rsplit(".", 1)[-1] for name in wanted}
    return tuple(linear for linear in arch.linears if linear.name in names)


def whole_linears(run: RunFile, arch: Arch) -> tuple[Linear, ...]:
    """The linear layers that `train.lora.modules_to_save` trains whole: copies of the base's.

    A name with a number in it, such as ``layers.3.mlp.up_proj``, is one layer's.
    """
    found = []
    for linear in arch.linears:
        names = [
            name.split(".")
            for name in run.train.lora.modules_to_save
            if name.rsplit(".", 1)[-1] == linear.name
        ]
        if all(any(part.isdigit() for part in parts) for parts in names):
            linear = replace(linear, count=min(len(names), linear.count))
        found += [linear] if names else []
    return tuple(found)


def _adapter_problems(run: RunFile, arch: Arch) -> list[str]:
    found = []
    lora = run.train.lora
    available = ", ".join(arch.linear_names())
    wanted = [] if lora.target_modules == "all-linear" else list(lora.target_modules)
    for name in wanted:
        leaf = name.rsplit(".", 1)[-1]
        if leaf in HEADS + EMBEDDINGS and arch.tied:
            found.append(
                f"train.lora.target_modules: {name} is tied to the embedding of this model, and an "
                "adapter on one would change both; leave it out"
            )
        elif leaf in HEADS:
            found.append(
                f"train.lora.target_modules: {name} cannot have an adapter, because the loss reads "
                "the head's weight itself; list it in train.lora.modules_to_save instead"
            )
        elif leaf not in arch.linear_names() and arch.source != "guess":  # the training looks
            found.append(
                f"train.lora.target_modules: {name} matches no linear layer; there are {available}"
            )
    found += [
        f"train.lora.target_modules: {name} is in modules_to_save as well, by which it is trained "
        "whole and gets no adapter; list it in one of the two"
        for name in wanted
        if any(f".{name}".endswith(f".{whole}") for whole in lora.modules_to_save)
    ]
    known = (*arch.linear_names(), *HEADS, *EMBEDDINGS, *(_ROUTERS if arch.experts else ()))
    for name in lora.modules_to_save:
        leaf = name.rsplit(".", 1)[-1]
        unknown = leaf not in known and arch.source != "guess"
        if unknown and "norm" not in leaf and not leaf.startswith("ln_"):
            found.append(
                f"train.lora.modules_to_save: {name} is no module of this model; there are "
                f"embed_tokens, lm_head and {available}"
            )
        elif leaf in arch.linear_names() and run.train.method == "qlora":
            found.append(
                f"train.lora.modules_to_save: {name} is quantized, so it cannot be trained whole; "
                "list it in train.lora.target_modules instead, or set train.method: lora"
            )
    return found


def _length_problems(run: RunFile, arch: Arch, data: DataShape | None) -> list[str]:
    found = []
    if run.train.keep == "best" and not (run.data.eval or run.data.eval_fraction):
        found.append(
            "train.keep: best chooses by held-out rows, and data.eval_fraction is 0 without "
            "data.eval; name some there, or set train.keep: last"
        )
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


def _quantize_problems(run: RunFile, arch: Arch, data: DataShape | None) -> list[str]:
    findings = _without_export(run, arch, data)
    found = []
    if "none" not in run.quantize.methods:  # with it, the ladder ends in 16 bits
        found = [f"{finding}or add none to quantize.methods" for finding in findings]
    possible = [m for m in _four_bit(run) if not known_to_fail(arch, m, run.engines)]
    if possible and not _odd_sizes(arch):
        found = _group_problems(run.quantize.group_size, arch) + found
    return found


def _four_bit(run: RunFile) -> list[str]:
    return [method for method in run.quantize.methods if method != "none"]


def _without_export(run: RunFile, arch: Arch, data: DataShape | None) -> list[str]:
    """Why no 4-bit export of `quantize.methods` can be made, each with the beginning of a way."""
    methods = _four_bit(run)
    if not methods:
        return []
    reasons = [known_to_fail(arch, method, run.engines) for method in methods]
    if all(reasons):
        gptq = not known_to_fail(arch, "gptq", run.engines)
        other = "gptq" if gptq else "another model.base"
        return [f"quantize.methods: {'; '.join(reasons)}; take {other}, "]
    found = []
    if odd := _odd_sizes(arch):
        found.append(
            f"quantize.methods: vLLM's 4-bit kernels need sizes divisible by {KERNEL_FEATURES}, "
            f"which {', '.join(odd)} are not; take another model.base, "
        )
    if data is not None and (little := enough(data.lengths, run.quantize)):
        fewest = run.quantize.model_copy(update={"min_calibration_tokens": 1})
        fewer = "" if enough(data.lengths, fewest) else "lower quantize.min_calibration_tokens, "
        found.append(f"quantize.methods: {little}; add data, {fewer}")
    return found


def _quantized(arch: Arch) -> list[Linear]:
    """The linear layers that an export packs."""
    return [linear for linear in arch.linears if linear.name not in _ROUTERS]


def _odd_sizes(arch: Arch) -> list[str]:
    """Linear layers whose sizes vLLM's 4-bit kernels do not take, whatever the group size."""
    return sorted(
        {
            f"{t.name} ({t.in_features} to {t.out_features})"
            for t in _quantized(arch)
            if t.in_features % KERNEL_FEATURES or t.out_features % KERNEL_FEATURES
        }
    )


def _group_problems(group: int, arch: Arch) -> list[str]:
    if group < 0:
        return []
    linears = _quantized(arch)
    odd = sorted({f"{t.name} ({t.in_features})" for t in linears if t.in_features % group})
    if not odd:
        return []
    fitting = [str(size) for size in _GROUPS if all(t.in_features % size == 0 for t in linears)]
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


def _kernel_problems(run: RunFile, arch: Arch, *, gpu: bool) -> list[str]:
    if run.train.method == "qlora" and arch.model_type == "falcon":
        return [
            "train.method: qlora quantizes nothing of falcon, whose linear layers are a class of "
            "their own that bitsandbytes passes over; set train.method: lora"
        ]
    if run.train.attention == "sdpa" and arch.model_type in EAGER_ONLY:
        return [f"train.attention: {arch.model_type} has no attention by sdpa; set it to eager"]
    if run.train.attention != "flash_attention_2":
        return []
    if not gpu:
        return ["train.attention: flash_attention_2 needs a GPU; use sdpa"]
    if run.engines.train.python is None and importlib.util.find_spec("flash_attn") is None:
        return ["train.attention: flash_attention_2 is not installed; use sdpa, or install it"]
    return []


def _tracker_problems(run: RunFile) -> list[str]:
    if run.engines.train.python is not None:
        return []  # the training asks that interpreter
    return [
        f"train.report_to: {name} is not installed; leave it out, or install it beside tuneserve "
        f"(pip install {name})"
        for name in missing_trackers(run.train.report_to)
    ]


def _several_problems(
    run: RunFile, arch: Arch, data: DataShape | None, *, gpu: bool, gpus: int | None
) -> list[str]:
    found = []
    train, parts = run.train, run.serve.tensor_parallel
    shared = uneven(train, data.rows, train.gpus) if data else ""
    found += [shared] if shared else []
    if gpu and gpus is not None and train.gpus > gpus:
        found.append(f"train.gpus: {train.gpus}, and this machine shows {gpus}")
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


def _zero_problems(run: RunFile, arch: Arch, *, half: bool) -> list[str]:
    zero = run.train.zero
    if not zero:
        return []
    found = []
    if not _installed("deepspeed", run.engines.train.python):
        found.append(
            f"train.zero: {zero} needs DeepSpeed, which is not installed; `make venv` installs it, "
            "or set train.zero: 0"
        )
    if half and arch.model_type not in FLOAT32_FAMILIES:
        found.append(
            f"train.zero: {zero} needs bfloat16, which this GPU has not; set train.zero: 0, by "
            "which every GPU holds the whole optimizer"
        )
    return found


def _installed(name: str, elsewhere: str | None) -> bool:
    return elsewhere is not None or importlib.util.find_spec(name) is not None


def warnings(run: RunFile, arch: Arch, data: DataShape | None, *, gpu: bool) -> list[str]:
    """What works, but perhaps not as expected."""
    found = []
    if arch.source == "guess":
        found.append(f"the family {arch.model_type} is not known here; its shape is a guess")
    methods = _four_bit(run)
    findings = _without_export(run, arch, data)
    if "none" in run.quantize.methods:
        found += [f"{finding}or it will be served in 16 bits" for finding in findings]
    reasons = [reason for method in methods if (reason := known_to_fail(arch, method, run.engines))]
    if methods and (python := run.engines.quantize.python) and not gptqmodel_types(python):
        found.append(
            f"engines.quantize.python: {python} does not say which families it quantizes; the "
            "export will"
        )
    if len(reasons) < len(methods):
        found += [f"{reason}; it is passed over, the others are tried" for reason in reasons]
        if arch.model_type not in QUANTIZABLE:
            found.append(f"quantize.methods: no 4-bit export of {arch.model_type} was tested here")
    if arch.experts:
        found.append(
            f"{arch.experts} experts a block stay in 16 bits and get no adapter: they are one "
            "tensor when they run, and no linear layer"
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
    if gpu and methods and not findings:
        narrow = sorted(
            {t.name for t in _quantized(arch) if t.in_features % 128 or t.out_features % 64}
        )
        if narrow:
            found.append(
                f"{', '.join(narrow)}: sizes that vLLM's Marlin kernel does not take (128 in, 64 "
                "out); a slower kernel serves them"
            )
    return found
