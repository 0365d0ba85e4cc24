"""PEFT's own merge, with the whole model in memory: what it gives, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from merge_house import peft_adapter, real_base, rewrite
from tuneserve.checkpoint.fingerprint import fingerprint
from tuneserve.errors import (
    AdapterError,
    DiskFull,
    ModelError,
    OutOfMemory,
    OutputExists,
    TuneserveError,
)
from tuneserve.merge import merge_adapter
from tuneserve.merge.proof import verify

pytestmark = pytest.mark.filterwarnings("ignore")

QUERY = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    base = real_base(folder / "base")
    return base, peft_adapter(base, folder / "adapter")


@pytest.fixture
def base(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return copied(made[0], tmp_path / "base")


@pytest.fixture
def adapter(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return copied(made[1], tmp_path / "adapter")


def copied(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_in_memory_is_pefts_own_merge(base: Path, adapter: Path, tmp_path: Path) -> None:
    """The explicit other way, here for an adapter that streaming refuses."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["layer_replication"] = None
    config["task_type"] = "FEATURE_EXTRACTION"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="--in-memory"):
        merge_adapter(base, adapter, tmp_path / "out")

    result = merge_adapter(base, adapter, tmp_path / "out", in_memory=True)

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    expected = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    assert result.bytes_written > 0
    verify(tmp_path / "out")
    with pytest.raises(OutputExists):
        merge_adapter(base, adapter, tmp_path / "out", in_memory=True)


@pytest.mark.parametrize("method", ["adalora", "vera"])
def test_other_methods_are_merged(method: str, base: Path, tmp_path: Path) -> None:
    """Nothing of theirs is taken for a tensor without a place."""
    settings: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config: Any = (
        AdaLoraConfig(r=4, init_r=4, total_step=10, **settings)
        if method == "adalora"
        else VeraConfig(r=4, **{**settings, "target_modules": ["q_proj", "o_proj"]})
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.03)
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", in_memory=True)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    peft = PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    expected = peft.merge_and_unload().state_dict()
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def refused(
    kind: type[TuneserveError], match: str, base: Path, adapter: Path, out: Path, **options: Any
) -> TuneserveError:
    """It is refused so, and nothing was made."""
    before = sorted(p.name for p in out.parent.iterdir())
    with pytest.raises(kind, match=match) as caught:
        merge_adapter(base, adapter, out, in_memory=True, **options)
    assert sorted(p.name for p in out.parent.iterdir()) == before
    return caught.value


def test_no_4_bit_merge_here_either(base: Path, adapter: Path, tmp_path: Path) -> None:
    change(base / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    refused(ModelError, r"quantized \(bitsandbytes\)", base, adapter, tmp_path / "out")


def test_another_base_is_refused_here_too(base: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "base_fingerprint.json").write_text(json.dumps(fingerprint(base)))
    path = base / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, {"format": "pt"})
    match = "is not the base .* tensor model.norm.weight"
    refused(AdapterError, match, base, adapter, tmp_path / "out")


@pytest.mark.parametrize("fault", ["unused", "missing"])
def test_every_tensor_of_the_adapter_is_used(
    fault: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """PEFT merges what fits, and at most warns."""
    if fault == "unused":
        values = torch.ones(8, 192)
        rewrite(adapter, lambda t: t.update({QUERY.format(5): values}))
        match = r"layers\.5\.self_attn\.q_proj.*the model has no place for it"
    else:
        rewrite(adapter, lambda t: t.pop(QUERY.format(1)))
        match = r"layers\.1\.self_attn\.q_proj.*is not in the adapter"
    refused(AdapterError, match, base, adapter, tmp_path / "out")


def test_weights_through_nf4_are_not_dropped_in_silence(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    refused(AdapterError, "--base-weights nf4", base, adapter, out, base_weights="nf4")


def test_the_limit_on_memory_holds(base: Path, adapter: Path, tmp_path: Path) -> None:
    limit = 700 * 2**20
    match = r"700.0 MiB are allowed \(--max-memory\)"
    error = refused(OutOfMemory, match, base, adapter, tmp_path / "out", max_memory_bytes=limit)
    size = (base / "model.safetensors").stat().st_size
    assert 2**30 + size < error.details["needed_bytes"] < 2**30 + 2 * size


def test_a_second_merge_in_memory_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    part = tmp_path / ".out.part"
    part.mkdir()
    (part / "model.safetensors").write_text("half")
    descriptor = os.open(part, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    out = tmp_path / "out"
    refused(OutputExists, "another merge is writing", base, adapter, out)
    assert (part / "model.safetensors").read_text() == "half"
    os.close(descriptor)  # a killed one holds nothing: its rest is removed
    merge_adapter(base, adapter, out, in_memory=True)
    verify(out)
    assert not part.exists()


def test_a_folder_filled_meanwhile_is_left_alone(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuneserve.merge import in_memory

    def meanwhile(*_: Any) -> int:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
        (tmp_path / ".out.part" / "config.json").write_text("{}")
        return 1

    monkeypatch.setattr(in_memory, "_merge_and_save", meanwhile)
    with pytest.raises(OutputExists, match="filled by something else"):
        merge_adapter(base, adapter, tmp_path / "out", in_memory=True)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["theirs"]
    assert not (tmp_path / ".out.part").exists()


@pytest.mark.parametrize("by", ["system", "safetensors"])
def test_a_full_disk_leaves_nothing(
    by: str, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full(*_: Any, **__: Any) -> None:
        if by == "system":
            raise OSError(errno.ENOSPC, "No space left on device")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    error = refused(DiskFull, "no room left", base, adapter, tmp_path / "out")
    assert error.exit_status == 3
    assert error.details["needed_bytes"] > (base / "model.safetensors").stat().st_size
