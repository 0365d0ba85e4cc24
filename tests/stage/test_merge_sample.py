"""The comparison with PEFT's own layer finds a merge that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from merge_house import WIDTH, InProcessSampler, make_adapter, make_base, rewrite
from tuneserve.errors import AdapterError
from tuneserve.merge import merge_adapter
from tuneserve.merge.journal import JOURNAL_NAME
from tuneserve.merge.proof import read_proof
from tuneserve.merge.tiles import TensorMerger

pytestmark = pytest.mark.filterwarnings("ignore")

QUERY = "model.layers.{}.self_attn.q_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


def adapter_of(kind: str, base: Path, folder: Path) -> Path:
    """An update of a tenth of the weights' norm, as training makes it, or smaller."""
    adapter = make_adapter(folder, use_dora=kind == "dora")
    prefix = "base_model.model.model"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if kind == "dora":
            for path in base.glob("*.safetensors"):
                for name, value in load_file(path).items():
                    if "q_proj" in name:
                        key = f"base_model.model.{name[:-7]}.lora_magnitude_vector"
                        tensors[key] = value.float().norm(dim=1)
        elif kind == "embedding":
            tensors.clear()
            generator = torch.Generator().manual_seed(3)
            tensors[f"{prefix}.embed_tokens.lora_embedding_A"] = torch.randn(
                8, 300, generator=generator
            )
            tensors[f"{prefix}.embed_tokens.lora_embedding_B"] = (
                torch.randn(WIDTH, 8, generator=generator) * 0.01
            )

    rewrite(adapter, change)
    if kind == "embedding":
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["target_modules"] = ["embed_tokens"]
        (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


@pytest.mark.parametrize("kind", ["lora", "dora", "embedding"])
@pytest.mark.parametrize("factor", [1.0, 4.0, -1.0, 0.0])
def test_a_wrong_update_is_found(
    kind: str, factor: float, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times the scale, the wrong sign, no update at all."""
    adapter = adapter_of(kind, base, tmp_path / "adapter")
    right = TensorMerger._delta

    def wrong(self: TensorMerger, begin: int, end: int) -> tuple[torch.Tensor, float]:
        delta, squared = right(self, begin, end)
        return delta * factor, squared

    monkeypatch.setattr(TensorMerger, "_delta", wrong)
    monkeypatch.setattr("tuneserve.merge.tiles.adds_last", lambda *shape: False)
    monkeypatch.setattr("tuneserve.merge.sample.Sampler", InProcessSampler)
    out = tmp_path / "out"
    if factor == 1.0:
        assert merge_adapter(base, adapter, out).sampled >= 1
        return
    with pytest.raises(AdapterError, match="merged rows differ from what PEFT makes") as caught:
        merge_adapter(base, adapter, out)
    assert all(t["far"] for t in caught.value.details["tensors"])
    names = {p.name for p in out.iterdir()}  # no config, no proof: not a model
    assert names == {JOURNAL_NAME, *(p.name for p in base.glob("*.safetensors"))}


def change_second_layer(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], None]
) -> None:
    """Of what is written of its query, bits of bfloat16, 256 rows; rows 18 to 146 are compared."""
    right = TensorMerger._add_update

    def wrong(self: TensorMerger, weight: torch.Tensor, begin: int, end: int) -> None:
        right(self, weight, begin, end)
        if self.output.name == QUERY.format(1):
            change(weight.view(torch.int16))

    monkeypatch.setattr(TensorMerger, "_add_update", wrong)
    monkeypatch.setattr("tuneserve.merge.sample.Sampler", InProcessSampler)


def test_the_last_place_of_few_values_is_said_and_no_obstacle(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another matrix library sums in another order: values halfway between two round apart."""

    def change(bits: torch.Tensor) -> None:
        bits[100, :5] ^= 1

    change_second_layer(monkeypatch, change)
    adapter = make_adapter(tmp_path / "adapter")
    result = merge_adapter(base, adapter, tmp_path / "out")
    assert (result.sampled, result.sampled_equal) == (6, 5)
    proof: Any = read_proof(tmp_path / "out")
    (found,) = [t for t in proof["peft_sample"]["tensors"] if not t["bit_equal"]]
    assert found["name"] == QUERY.format(1)
    assert (found["different_elements"], found["far"]) == (5, False)
    assert "1 of 6 compared tensors are PEFT's up to the last place of 5 values" in caplog.text


@pytest.mark.parametrize(
    ("rows", "columns", "bit"),
    [
        (slice(100, 101), slice(0, 1), 10),  # one value eight times as large, or an eighth
        (slice(None), slice(0, 5), 0),  # the last place of one value in fifty
    ],
)
def test_more_than_the_last_place_of_few_values_is_found(
    rows: slice, columns: slice, bit: int, base: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def change(bits: torch.Tensor) -> None:
        bits[rows, columns] ^= 1 << bit

    change_second_layer(monkeypatch, change)
    adapter = make_adapter(tmp_path / "adapter")
    with pytest.raises(AdapterError, match=r"layers\.1\.self_attn\.q_proj") as caught:
        merge_adapter(base, adapter, tmp_path / "out")
    assert [t["name"] for t in caught.value.details["tensors"]] == [QUERY.format(1)]
    assert "--in-memory into another folder" in caught.value.hint


def test_a_missing_update_of_less_than_a_last_place_is_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousandth of the weights: a last place is four times as much."""
    adapter = make_adapter(tmp_path / "adapter")

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] *= 2**-9 if "lora_B" in name else 1

    rewrite(adapter, shrink)
    monkeypatch.setattr("tuneserve.merge.sample.Sampler", InProcessSampler)
    assert merge_adapter(base, adapter, tmp_path / "right").sampled_equal == 6
    right = TensorMerger._delta

    def none(self: TensorMerger, begin: int, end: int) -> tuple[torch.Tensor, float]:
        delta, squared = right(self, begin, end)
        return delta * 0, squared

    monkeypatch.setattr(TensorMerger, "_delta", none)
    monkeypatch.setattr("tuneserve.merge.tiles.adds_last", lambda *shape: False)
    with pytest.raises(AdapterError, match="merged rows differ") as caught:
        merge_adapter(base, adapter, tmp_path / "out")
    assert len(caught.value.details["tensors"]) == 6


def test_the_process_compares_shards_as_they_are_finished(base: Path, tmp_path: Path) -> None:
    """Also those that were finished before an interruption."""
    adapter = make_adapter(tmp_path / "adapter")
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if (out / "model-00001-of-00003.safetensors").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(base, adapter, out, sample=False, progress=stop)
    result = merge_adapter(base, adapter, out)
    assert result.sampled == result.sampled_equal == 6
    proof: Any = read_proof(out)
    sampled = [t["name"] for t in proof["peft_sample"]["tensors"]]
    assert sorted(sampled) == [QUERY.format(layer) for layer in range(6)]
    assert proof["peft_sample"]["peak_rss_bytes"] > 50 * 2**20


def test_a_process_that_dies_is_said(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = make_adapter(tmp_path / "adapter")
    monkeypatch.setattr("tuneserve.merge.sample.sys.executable", "/bin/false")
    result = merge_adapter(base, adapter, tmp_path / "out")
    assert result.sampled == 0
    assert "the comparison with PEFT could not be made" in caplog.text
