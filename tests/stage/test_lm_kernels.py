"""Which form of a kernel is launched, and where Triton is left alone. No GPU is needed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuneserve.lm import elementwise

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


class Kernel:
    """Stands for a kernel of Triton's, and for the forms that it is compiled in."""

    def __init__(self, forms: bool = True) -> None:
        self.forms, self.launches = forms, []  # type: tuple[bool, list[str]]

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.launches.append("looked at")
            return Form(self.launches) if self.forms else None

        return launch


class Form:
    function = 1

    def __init__(self, launches: list[str]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append("by its form")


def launch(
    kernel: Kernel, tensor: torch.Tensor, *, number: int = 7, constant: int = 64, rows: int = 1
) -> str:
    """How the kernel was launched."""
    from tuneserve.lm import kernels

    kernels._launch(kernel, (rows, 1, 1), (tensor,), (0.5,), (number,), (constant,))
    return kernel.launches[-1]


def test_a_form_is_looked_up_by_what_decides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuneserve.lm import kernels

    # Forms are kept by the kernel's identity; real kernels stay, those of tests come and go.
    monkeypatch.setattr(kernels, "_compiled", {})
    kernel, another, flat = Kernel(), Kernel(), torch.zeros(64)
    assert flat.data_ptr() % 16 == 0
    assert [launch(kernel, flat) for _ in range(2)] == ["looked at", "by its form"]
    assert launch(kernel, flat.clone()) == "by its form"
    for other in (
        lambda: launch(kernel, flat, rows=9),
        lambda: launch(kernel, flat.half()),
        lambda: launch(kernel, flat, number=16),
        lambda: launch(kernel, flat, constant=32),
        lambda: launch(another, flat),
    ):
        assert other() == "looked at"
    # Not on a multiple of 16 bytes: a form of its own, which Triton itself finds each time.
    assert [launch(kernel, flat[1:]) for _ in range(2)] == ["looked at"] * 2
    interpreted = Kernel(forms=False)
    assert [launch(interpreted, flat) for _ in range(2)] == ["looked at"] * 2


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], bool]]:
    """Asks anew whether Triton works, on what looks like a GPU, with this `silu_mul`."""
    real = torch.linspace
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "linspace", lambda *range, device: real(*range))

    def ask(silu_mul: Any) -> bool:
        monkeypatch.setattr(elementwise, "_kernels", lambda: SimpleNamespace(silu_mul=silu_mul))
        elementwise.has_triton.cache_clear()
        return elementwise.has_triton()

    yield ask
    elementwise.has_triton.cache_clear()


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(torch.nn.functional.silu(gate), up, out=out)


class PTXASError(Exception):
    """Triton's errors have no base that others share."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        PTXASError("sm_999 is not known"),
        AssertionError("libcuda.so cannot found!"),
        TypeError("function takes exactly 14 arguments (17 given)"),
        None,
    ],
    ids=repr,
)
@pytest.mark.parametrize("launched", [0, 1])
def test_where_triton_fails_torch_stands_in(
    fresh: Callable[[Any], bool],
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    launched: int,
) -> None:
    """At the first launch, or at the second, which goes another way; None: wrong numbers."""
    launches = []

    def failing(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        launches.append(gate)
        if len(launches) <= launched:
            return silu_mul(gate, up, out)
        if error:
            raise error
        return out

    with caplog.at_level(logging.WARNING):
        assert not fresh(failing)
    assert "torch's are slower" in caplog.text and len(launches) == launched + 1
    assert fresh(silu_mul)


def test_a_full_gpu_says_nothing_of_triton(fresh: Callable[[Any], bool]) -> None:
    def full(*tensors: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        fresh(full)
    assert fresh(silu_mul)
