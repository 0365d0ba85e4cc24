"""Whether a checkpoint's weights are quantized already: nothing can be merged into those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.headers import TensorInfo

# What AutoGPTQ, AutoAWQ and ModelOpt write beside config.json, where older ones say nothing.
_BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_SETTINGS = ("quantization_config", "compression_config")
# Ends of names that only packed weights and their scales have (GPTQ and AWQ, compressed-tensors,
# FP8, bitsandbytes).
_PACKED = (
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight.absmax",
    ".weight.quant_map",
)


def quantized_by(config: Mapping[str, Any]) -> str:
    """The method that a config names, also inside its language part; empty for plain weights."""
    text = config.get("text_config")
    parts = [config, text if isinstance(text, Mapping) else {}]
    settings = next((part[name] for part in parts for name in _SETTINGS if part.get(name)), None)
    if not settings:
        return ""
    named = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    return named if isinstance(named, str) else "unknown method"


def packed_by(folder: Path, tensors: Iterable[TensorInfo]) -> str:
    """What shows that weights are packed though the config is silent; empty where nothing does.

    A small file of a quantizer may have stayed behind beside 16-bit weights.
    """
    files = [name for name in _BESIDE if (folder / name).is_file()]
    for info in tensors:
        matrix = len(info.shape) > 1 and info.name.endswith(".weight")
        if info.name.endswith(_PACKED) or (matrix and info.dtype.startswith("F8")):
            return ", ".join(files) or f"tensor {info.name}, {info.dtype}"
        if files and info.dtype in ("I32", "I8", "U8"):
            return ", ".join(files)
    return ""
