"""What GPTQModel's log says, and what is refused because of it. No engine is imported."""

from __future__ import annotations

from typing import Any

import pytest

from tuneserve.errors import QuantizeError
from tuneserve.quantize.modules import judge, module_logs
from tuneserve.quantize.record import worst_table


def entry(loss: str, *, samples: str = "4000", damp: str = "0.05000", layer: int = 3) -> Any:
    module = "mlp.down_proj"
    return {"layer": layer, "module": module, "loss": loss, "samples": samples, "damp": damp}


def test_losses_come_as_numbers_in_the_order_of_the_layers() -> None:
    found = module_logs([entry("0.25", layer=2), entry("not applicable", layer=0)])
    assert [(m.name, m.loss, m.samples) for m in found] == [
        ("0.mlp.down_proj", None, 4000),
        ("2.mlp.down_proj", 0.25, 4000),
    ]


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_d02_a_loss_that_is_not_finite_is_an_error(loss: str) -> None:
    with pytest.raises(QuantizeError, match="not finite in 3.mlp.down_proj"):
        judge(module_logs([entry("0.1", layer=1), entry(loss)]), 4000, "", allow_fallback=True)


@pytest.mark.parametrize(
    "weak",
    [
        entry("rtn fallback"),  # GPTQModel said so
        entry("999999999.0000000000"),  # no usable Hessian, without the word
        entry("0.1", samples="19"),  # 0.5 % of 4000 tokens are 20
    ],
)
def test_d01_rounding_to_nearest_is_an_error_unless_allowed(weak: dict[str, Any]) -> None:
    modules = module_logs([entry("0.1", layer=1), weak])
    with pytest.raises(QuantizeError, match="1 modules were rounded .* 3.mlp.down_proj") as caught:
        judge(modules, 4000, "", allow_fallback=False)
    assert "allow_fallback" in caught.value.hint
    assert judge(modules, 4000, "", allow_fallback=True) == ["rounded to nearest: 3.mlp.down_proj"]


def test_d02_a_quiet_retry_without_a_hessian_is_an_error() -> None:
    text = "Failed due to `NaN` loss for `x`, use mock quantization retry for `x`"
    with pytest.raises(QuantizeError, match="1 modules were rounded"):
        judge(module_logs([entry("0.0")]), 4000, text, allow_fallback=False)


def test_d02_raised_damping_is_noted() -> None:
    modules = module_logs([entry("0.1", layer=1), entry("0.1", damp="0.09000")])
    assert judge(modules, 4000, "", allow_fallback=False) == [
        "3.mlp.down_proj: damping rose to 0.09"
    ]


def test_nothing_quantized_is_an_error() -> None:
    with pytest.raises(QuantizeError, match="no module at all"):
        judge([], 4000, "", allow_fallback=True)


def test_the_worst_modules_come_first_in_the_table() -> None:
    modules = module_logs(
        [entry("0.001", layer=i) for i in range(20)] + [entry("0.5", layer=30, damp="0.09")]
    )
    lines = worst_table([*modules, *module_logs([entry("rtn fallback", layer=40)])]).splitlines()
    assert len(lines) == 11
    assert lines[0].split() == ["module", "loss", "damping"]
    assert lines[1].split() == ["30.mlp.down_proj", "0.5", "0.09"]
    assert worst_table([]) == ""
