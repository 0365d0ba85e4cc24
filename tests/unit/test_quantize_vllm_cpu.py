"""The plugin for CPUs without vLLM's 4-bit kernel reads the formats as they are defined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def pack(values: Any, dim: int) -> Any:
    """Eight 4-bit values an int32, low bits first, along `dim`."""
    moved = values.movedim(dim, -1).reshape(*values.movedim(dim, -1).shape[:-1], -1, 8).long()
    words = (moved << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words.movedim(-1, dim).contiguous()


def parameter(data: Any, **layout: int) -> Any:
    made = torch.nn.Parameter(data, requires_grad=False)
    for name, value in layout.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zero_points", [True, False])
def test_weights_zero_points_and_scales_meet_each_other(
    transposed: bool, zero_points: bool
) -> None:
    from tuneserve.quantize.vllm_cpu import _apply, _unpack

    torch.manual_seed(0)
    inputs, outputs, groups = 96, 64, 3  # more than one group, and no square anywhere
    values = torch.randint(0, 16, (inputs, outputs))
    zeros = torch.randint(0, 16, (groups, outputs)) if zero_points else torch.full((3, 64), 8)
    scales = torch.rand(groups, outputs) + 0.5
    width = inputs // groups
    wanted = (values - zeros.repeat_interleave(width, 0)) * scales.repeat_interleave(width, 0)

    layer = SimpleNamespace(qweight=parameter(pack(values, 0), input_dim=0, output_dim=1))
    if transposed:  # as vLLM hands over AWQ's zero points
        layer.scales = parameter(scales.t().contiguous(), input_dim=1, output_dim=0)
        layer.qzeros = parameter(pack(zeros, 1).t().contiguous(), input_dim=1, output_dim=0)
    else:
        layer.scales = parameter(scales, input_dim=0, output_dim=1)
        layer.qzeros = parameter(pack(zeros, 1), input_dim=0, output_dim=1)
    kernel = SimpleNamespace(
        w_q_name="qweight",
        w_s_name="scales",
        w_zp_name="qzeros",
        config=SimpleNamespace(
            zero_points=zero_points, weight_type=SimpleNamespace(bias=8), act_type=torch.float32
        ),
    )
    _unpack(kernel, layer)
    x = torch.randn(5, inputs)
    torch.testing.assert_close(_apply(kernel, layer, x), x @ wanted, rtol=1e-4, atol=1e-3)
