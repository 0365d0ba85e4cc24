"""Serve 4-bit exports with vLLM on CPUs without AVX-512, where vLLM has no kernel for them.

vLLM 0.32's build for AVX2 lacks `cpu_gemm_wna16`: a GPTQ or AWQ model loads, answers /health, and
its first request kills the engine. This plugin (entry point group ``vllm.general_plugins``, which
vLLM calls in each of its processes) takes the 4-bit weights apart once while loading. Such a model
needs the memory of a 16-bit one, and computes what the export says. Where the kernel exists, and on
GPUs, nothing is changed.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def register() -> None:
    """Give vLLM's 4-bit CPU layer a way to compute, if it has none. Safe to call twice."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return
    log.warning("this CPU has no AVX-512: 4-bit weights are unpacked to 16 bits for serving")
    CPUWNA16LinearKernel.process_weights_after_loading = _unpack
    CPUWNA16LinearKernel.apply_weights = _apply


def _unpack(kernel: Any, layer: Any) -> None:
    """Replace the packed weight by the dense (out, in) matrix ``(q - zero) * scale``.

    When vLLM calls this, weights of all formats are in GPTQ's packing: eight inputs an int32,
    (in / 8, out). Scales are (groups, out) and zero points eight outputs an int32,
    (groups, out / 8), or either transposed, which their `output_dim` says: AWQ's zero points are
    (`vllm/model_executor/layers/quantization/auto_awq.py`, `_convert_awq_to_standard_format`).
    """
    import torch

    packed = getattr(layer, kernel.w_q_name)
    if packed.input_dim == 1:
        packed.data = packed.data.t()
    scales = _outputs_last(getattr(layer, kernel.w_s_name))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = (packed.data.unsqueeze(1) >> shifts[None, :, None]) & 15
    values = values.reshape(-1, packed.shape[1])
    width = values.shape[0] // scales.shape[0]
    if kernel.config.zero_points:
        zeros = _outputs_last(getattr(layer, kernel.w_zp_name))
        zeros = ((zeros.unsqueeze(2) >> shifts) & 15).reshape(scales.shape)
        values = values - zeros.repeat_interleave(width, dim=0)
    else:
        values = values - kernel.config.weight_type.bias
    dense = values.float() * scales.float().repeat_interleave(width, dim=0)
    dtype = kernel.config.act_type
    packed.data = dense.T.contiguous().to(dtype)
    for name in (kernel.w_s_name, kernel.w_zp_name):
        if name is not None and getattr(layer, name, None) is not None:
            setattr(layer, name, None)


def _outputs_last(parameter: Any) -> Any:
    """Scales or zero points as (groups, outputs)."""
    return parameter.data.t() if parameter.output_dim == 0 else parameter.data


def _apply(kernel: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """``x @ weight.T + bias``, computed in float32: such CPUs are slow in bfloat16."""
    import torch

    weight = getattr(layer, kernel.w_q_name)
    wide = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    return wide.to(x.dtype)
