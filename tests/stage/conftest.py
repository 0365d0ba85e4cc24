"""What tests of the stages share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from release_house import house as house  # a fixture, by its name
from train_rows import pico_dataset
from tuneserve.artifacts import Artifact


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A forked child cannot use its parent's thread pool, and two cores are shared by all tests."""
    import torch

    from tuneserve.lm.load import quiet_libraries

    quiet_libraries()  # as every child does it, before peft is imported
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for hidden in ("gptqmodel", "deepspeed"):
        if sys.modules.get(hidden, 0) is None:
            del sys.modules[hidden]


@pytest.fixture(scope="module")
def float32() -> Iterator[None]:
    """As on a CPU without bfloat16: losses that are worked out another way agree closely."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuneserve.lm.hardware.compute_dtype", lambda device: torch.float32)
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, pico_model: Path) -> Artifact:
    """Rows of pico's world as a dataset artifact."""
    return pico_dataset(tmp_path_factory.mktemp("data") / "dataset", pico_model)
