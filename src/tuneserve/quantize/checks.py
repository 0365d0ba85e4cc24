"""What can be known about a 4-bit export from headers and config.json alone, before and after it.

Nothing here imports an engine, so the plan can ask the same questions before training spends
anything. Layouts: GPTQ and AWQ-GEMM as vLLM 0.32 reads them
(``vllm/model_executor/layers/quantization/{auto_gptq,auto_awq}.py``).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.headers import Checkpoint, TensorInfo
from tuneserve.checkpoint.ties import is_tied
from tuneserve.errors import QuantizeError
from tuneserve.quantize.support import architecture_problems

log = logging.getLogger(__name__)

GROUP_SIZES = (128, 64, 32, -1)
METHODS = ("gptq", "awq")
# vLLM's CPU kernel takes 4-bit layers in tiles of 32 features on both sides
# (`CPUWNA16LinearKernel.can_implement`).
KERNEL_FEATURES = 32
# Packed tensors hold eight 4-bit values in one int32.
PACKED = 8
# Modules that vLLM fuses into one matrix: either all of a group are quantized, or none.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
# Linear layers whose input is split over GPUs under tensor parallelism (`RowParallelLinear` in the
# families' files of vLLM); the others split outputs.
ROW_PARALLEL = frozenset(
    "o_proj down_proj out_proj dense dense_4h_to_h fc2 fc_out c_proj w2".split()
)

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.")
# Two-dimensional weights inside a layer that no method quantizes: routers, embeddings, norms.
_NOT_LINEAR = re.compile(
    r"(?:norm|embed\w*|router(?:\.\w+)?|(?:mlp|moe|ffn)\.gate|expert_gate|\.gate\.wg|conv1d)"
    r"\.weight$"
)
# Parts beside the language model, which GPTQModel leaves as they are.
_BESIDE = re.compile(r"(?:^|\.)(?:vision\w*|visual|audio\w*|image\w*|multi_modal_projector)\.")
# Families whose layers are stored as (in, out), which nothing here takes into account.
_TRANSPOSED = ("gpt2",)


def quantized_shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[int, int]]:
    """Modules of a 16-bit checkpoint that are quantized, with (out, in) features each."""
    shapes = {}
    for name, info in tensors.items():
        if not name.endswith(".weight") or len(info.shape) != 2 or not _LAYER.search(name):
            continue
        if not (_NOT_LINEAR.search(name) or _BESIDE.search(name)):
            shapes[name.removesuffix(".weight")] = (info.shape[0], info.shape[1])
    return shapes


def group_size_problems(
    shapes: Mapping[str, tuple[int, int]], group_size: int, *, tensor_parallel_size: int = 1
) -> list[str]:
    """Layers whose input features the group size does not divide, and what would.

    Args:
        shapes: (out, in) features by module name, the shape of torch's `weight`.
        group_size: Weights per scale; -1 for one scale per row, which always fits.
        tensor_parallel_size: GPUs over which vLLM splits a layer; each part must hold whole groups.
    """
    if group_size == -1 and tensor_parallel_size == 1:
        return []
    problems = []
    parts = {name: _part(name, shape, tensor_parallel_size) for name, shape in shapes.items()}
    for label, name, count in _kinds(shapes):
        features, part = shapes[name], parts[name]
        if part is None:
            problems.append(
                f"{label}{count}: {features[0]} x {features[1]} features do not split evenly over "
                f"{tensor_parallel_size} GPUs"
            )
        elif group_size != -1 and part[1] % group_size:
            where = f" on each of {tensor_parallel_size} GPUs" if part[1] != features[1] else ""
            problems.append(
                f"{label}{count}: {part[1]} input features{where} are not a multiple of "
                f"group_size {group_size}"
            )
    if problems and all(part is not None for part in parts.values()):
        fitting = fitting_group_sizes([part for part in parts.values() if part is not None])
        problems.append(f"group sizes that fit every layer: {', '.join(map(str, fitting))}")
    return problems


def fitting_group_sizes(shapes: list[tuple[int, int]]) -> list[int]:
    """The group sizes, of those that vLLM serves, that divide the inputs of all `shapes`."""
    return [g for g in GROUP_SIZES if g == -1 or all(inputs % g == 0 for _, inputs in shapes)]


def kernel_problems(
    shapes: Mapping[str, tuple[int, int]], *, tensor_parallel_size: int = 1
) -> list[str]:
    """Layers that vLLM's 4-bit kernels cannot take, whatever the group size.

    A whole layer must suit the CPU's kernel, so that an export can be served anywhere. Of one that
    is split, which needs GPUs, each part must hold whole words; their kernels pad the rest.
    """
    problems = []
    for label, name, count in _kinds(shapes):
        part = _part(name, shapes[name], tensor_parallel_size) or shapes[name]
        if any(features % KERNEL_FEATURES for features in shapes[name]):
            problems.append(
                f"{label}{count}: {shapes[name][0]} outputs and {shapes[name][1]} inputs; vLLM's "
                f"4-bit kernels take multiples of {KERNEL_FEATURES}"
            )
        elif any(features % PACKED for features in part):
            problems.append(
                f"{label}{count}: {part[0]} outputs and {part[1]} inputs on each of "
                f"{tensor_parallel_size} GPUs; 4-bit weights are stored by {PACKED}"
            )
    return problems


def scheme_problems(scheme: Mapping[str, Any]) -> list[str]:
    """Why vLLM would not serve a `quantization_config`, or only with a slow kernel."""
    method = scheme.get("quant_method")
    problems = []
    if scheme.get("bits") != 4:
        problems.append(f"bits is {scheme.get('bits')!r}; 4 is what is served everywhere")
    if scheme.get("group_size") not in GROUP_SIZES:
        problems.append(f"group_size is {scheme.get('group_size')!r}; vLLM takes {GROUP_SIZES}")
    if scheme.get("lm_head"):
        problems.append("lm_head is quantized; it must stay in 16 bits")
    if method == "gptq":
        if scheme.get("sym") is not True:
            problems.append("sym is not true; vLLM serves GPTQ with symmetric weights only")
        if scheme.get("desc_act") and scheme.get("group_size") != -1:
            problems.append("desc_act is true with groups; vLLM's fast kernels do not take that")
        if scheme.get("checkpoint_format", "gptq") != "gptq":
            problems.append(f"checkpoint_format is {scheme['checkpoint_format']!r}, not gptq")
    elif method == "awq":
        if scheme.get("sym") is True or scheme.get("zero_point") is False:
            problems.append("AWQ without zero points falls off the fast kernels; sym must be false")
        if str(scheme.get("version") or scheme.get("checkpoint_format")).lower() != "gemm":
            problems.append("AWQ's version is not gemm, the layout that vLLM reads")
    else:
        problems.append(f"quant_method is {method!r}; one of {', '.join(METHODS)} is served")
    return problems


def head_problems(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """A head that is nowhere, or stored twice although it is tied to the embedding."""
    heads = [name for name in tensors if re.search(r"(?:^|\.)lm_head\.", name)]
    if any(not name.endswith((".weight", ".bias")) for name in heads):
        return ["lm_head is quantized; it must stay in 16 bits"]
    if heads or is_tied(config, False):
        return []
    if any(name.endswith("embed_tokens.weight") for name in tensors):
        return ["lm_head.weight is missing, and config.json does not tie it to the embedding"]
    return []


def preflight(
    model: Path,
    method: str,
    group_size: int,
    *,
    tensor_parallel_size: int = 1,
    server: str | None = None,
) -> Checkpoint:
    """Refuse a model whose 4-bit export could not be made or not be served; nothing is loaded.

    Args:
        model: Folder of a 16-bit model.
        method: gptq or awq.
        group_size: Weights per scale.
        tensor_parallel_size: GPUs that will serve it together.
        server: The interpreter that has vLLM; None: this one.

    Returns:
        The checkpoint's headers.

    Raises:
        QuantizeError: Lists every reason.
    """
    if method not in METHODS:
        raise QuantizeError(f"method {method!r} is not known", expected="gptq or awq")
    checkpoint = Checkpoint.open(model)
    config = read_config(model)
    shapes = quantized_shapes(checkpoint.tensors)
    problems = architecture_problems(config, server=server)
    if "quantization_config" in config:
        problems.append("config.json has a quantization_config: the model is quantized already")
    if not shapes:
        problems.append("no linear layer was found in its decoder layers")
    if isinstance(config.get("text_config"), dict):
        problems.append("its language model is nested beside another part, which is not handled")
    if config.get("model_type") in _TRANSPOSED:
        problems.append(
            f"{config['model_type']} stores its layers transposed, which is not handled"
        )
    problems += group_size_problems(shapes, group_size, tensor_parallel_size=tensor_parallel_size)
    problems += kernel_problems(shapes, tensor_parallel_size=tensor_parallel_size)
    problems += head_problems(checkpoint.tensors, config)
    if problems:
        parts = [_part(name, shape, tensor_parallel_size) for name, shape in shapes.items()]
        whole = [part for part in parts if part is not None]
        fitting = fitting_group_sizes(whole)
        hint = "add none to quantize.methods to serve the 16-bit model"
        if len(whole) < len(parts) or any(n % PACKED for part in whole for n in part):
            hint = "set serve.tensor_parallel to a number that splits every layer evenly"
        elif group_size not in fitting:
            hint = f"set quantize.group_size to {fitting[0]}"
        raise QuantizeError(
            f"{model.name} cannot be exported with {method}:\n  " + "\n  ".join(problems),
            expected="layers that vLLM's 4-bit kernels serve",
            hint=hint,
            details={"problems": problems, "fitting_group_sizes": fitting},
        )
    return checkpoint


def static_check(
    export: Path, merged: Path, *, method: str, bits: int, group_size: int
) -> list[str]:
    """Compare a finished export with what was asked and with the model it came from.

    Names, shapes and dtypes of every tensor, fused groups, the head and `quantization_config`.

    Returns:
        What is wrong; empty when vLLM can load it.
    """
    config = read_config(export)
    scheme = config.get("quantization_config") or {}
    found, wanted = Checkpoint.open(export).tensors, Checkpoint.open(merged).tensors
    shapes = quantized_shapes(wanted)
    problems = scheme_problems(scheme)
    asked = {"quant_method": method, "bits": bits, "group_size": group_size}
    for key, value in asked.items():
        if scheme.get(key) != value:
            problems.append(f"config.json: {key} is {scheme.get(key)!r}, asked was {value!r}")
    problems += head_problems(found, config)
    problems += fused_problems(found, shapes)
    expected: set[str] = set()
    for module, (outputs, inputs) in shapes.items():
        layout = packed_layout(method, outputs, inputs, group_size)
        expected |= {f"{module}.{part}" for part in layout}
        for part, (shape, dtypes) in layout.items():
            problems += _tensor_problems(found, f"{module}.{part}", shape, dtypes)
    tied = is_tied(config, any(name.endswith("lm_head.weight") for name in wanted))
    for name, info in wanted.items():
        module = name.removesuffix(".weight")
        if module in shapes or (tied and name.endswith("lm_head.weight")):
            continue
        expected.add(name)
        # GPTQModel keeps the bias of a packed layer in float16; vLLM casts it while loading.
        packed = name.removesuffix(".bias") in shapes
        dtypes = (info.dtype, "F16") if packed else (info.dtype,)
        problems += _tensor_problems(found, name, info.shape, dtypes)
    for name in sorted(set(found) - expected):
        problems.append(f"{name}: belongs to nothing in the merged model")
    return problems


def packed_layout(
    method: str, outputs: int, inputs: int, group_size: int
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and allowed dtypes of the tensors that stand for one linear layer."""
    groups = 1 if group_size == -1 else inputs // group_size
    layout: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "qzeros": ((groups, outputs // PACKED), ("I32",)),
        "scales": ((groups, outputs), ("F16", "BF16")),
    }
    if method == "gptq":
        layout["qweight"] = ((inputs // PACKED, outputs), ("I32",))
        layout["g_idx"] = ((inputs,), ("I32",))
    else:
        layout["qweight"] = ((inputs, outputs // PACKED), ("I32",))
    return layout


def fused_problems(
    found: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Groups that vLLM fuses, of which only a part is quantized."""
    problems = []
    for module in shapes:
        parent, _, leaf = module.rpartition(".")
        for group in FUSED:
            if leaf != group[0]:
                continue
            present = [m for m in group if f"{parent}.{m}" in shapes]
            packed = [m for m in present if f"{parent}.{m}.qweight" in found]
            if packed and packed != present:
                missing = ", ".join(m for m in present if m not in packed)
                problems.append(f"{parent}: {missing} is not quantized, but {packed[0]} is")
    return problems


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        QuantizeError: It is missing or no JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QuantizeError(f"{folder.name}/config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise QuantizeError(f"{folder.name}/config.json is not a JSON object")
    return config


def _tensor_problems(
    found: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> list[str]:
    info = found.get(name)
    if info is None:
        return [f"{name}: is missing"]
    if info.shape != shape or info.dtype not in dtypes:
        return [
            f"{name}: is {info.dtype} {list(info.shape)}, not {' or '.join(dtypes)} {list(shape)}"
        ]
    return []


def _part(name: str, shape: tuple[int, int], gpus: int) -> tuple[int, int] | None:
    """(out, in) features on one GPU; None when they do not split evenly."""
    split_inputs = name.rpartition(".")[2] in ROW_PARALLEL
    if shape[1 if split_inputs else 0] % gpus:
        return None
    return (shape[0], shape[1] // gpus) if split_inputs else (shape[0] // gpus, shape[1])


def _kinds(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, str, str]]:
    """One entry for modules that differ in nothing but their number: (label, a name, how many)."""
    kinds: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for name, shape in shapes.items():
        kinds.setdefault((re.sub(r"\.\d+\.", ".*.", name), shape), []).append(name)
    return [
        (label, names[0], f" ({len(names)} layers)") if len(names) > 1 else (names[0], names[0], "")
        for (label, _), names in kinds.items()
    ]
