"""What a merge refuses or accepts before it begins, and what it says of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_house import WIDTH, A, make_adapter, make_base, rewrite
from tuneserve.artifacts import file_sha256
from tuneserve.errors import AdapterError
from tuneserve.merge import merge_adapter
from tuneserve.merge.proof import read_proof, verify

LAST = "model-00003-of-00003.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def add_to_base(base: Path, file: str = LAST, **tensors: torch.Tensor) -> None:
    values = {**load_file(base / file), **tensors}
    save_file(values, base / file, {"format": "pt"})
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(dict.fromkeys(tensors, file))
    path.write_text(json.dumps(index))


def change_config(base: Path, **changes: Any) -> None:
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_whole(adapter: Path, **tensors: torch.Tensor) -> None:
    rewrite(adapter, lambda t: t.update({f"base_model.model.{k}": v for k, v in tensors.items()}))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([EMBEDDING], "lm_head has 300 rows, embed_tokens 304: the new rows were not saved"),
        ([HEAD], "embed_tokens has 300 rows, lm_head 304: the new rows were not saved"),
        ([EMBEDDING, HEAD], None),
    ],
)
def test_a_vocabulary_grows_on_both_sides_or_not_at_all(
    saved: list[str], message: str | None, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """An untied model with 304 rows on one side alone could not be loaded."""
    add_to_base(base, **{HEAD: torch.ones(300, WIDTH, dtype=torch.bfloat16)})
    change_config(base, tie_word_embeddings=False)
    save_whole(adapter, **{name: torch.full((304, WIDTH), 0.5) for name in saved})
    if message is None:
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 304
        return
    with pytest.raises(AdapterError, match=message):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert not (tmp_path / "out").exists()


def test_a_tied_embedding_grown_and_trained_alone_lacks_the_rows_of_its_head(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Trained whole, it is untied; its head would stay at 300 rows."""
    save_whole(adapter, **{EMBEDDING: torch.ones(304, WIDTH)})
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["modules_to_save"] = ["embed_tokens"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="lm_head has 300 rows, embed_tokens 304"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)


@pytest.mark.parametrize("nested", [False, True])
def test_layers_that_predict_further_tokens_need_no_update(
    nested: bool, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """They are stored beside the model, which is loaded and trained without them."""
    extra = ["model.layers.6.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_proj.weight"]
    extra += ["mtp.embed_tokens.weight", "mtp.lm_head.weight"]
    values = {name: torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16) for name in extra}
    add_to_base(base, **values)
    count = {"num_hidden_layers": 6}
    change_config(base, **({"text_config": count} if nested else count))
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    after = load_file(tmp_path / "out" / LAST)
    assert all(torch.equal(after[name], values[name]) for name in extra)


def test_a_missing_last_layer_is_still_missed(base: Path, tmp_path: Path) -> None:
    """An adapter of five layers on a model that has six."""
    change_config(base, num_hidden_layers=6)
    adapter = make_adapter(tmp_path / "five", layers=5)
    with pytest.raises(AdapterError, match=r"has nothing: model\.layers\.5\.self_attn\.q_proj"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_a_transposed_update_needs_a_model_that_is_stored_so(
    fan_in_fan_out: bool, base: Path, tmp_path: Path
) -> None:
    """(out, in) is (WIDTH, 64) in the base, and 64 x WIDTH in the adapter."""
    name = "model.layers.0.self_attn.q_proj"
    first = "model-00001-of-00003.safetensors"
    weight = torch.randn(WIDTH, 64).bfloat16()
    add_to_base(base, first, **{f"{name}.weight": weight})
    adapter = make_adapter(tmp_path / "adapter", fan_in_fan_out=fan_in_fan_out)
    a, b = torch.randn(8, WIDTH), torch.randn(64, 8)
    key = A.format(0)
    rewrite(adapter, lambda t: t.update({key: a, key.replace("lora_A", "lora_B"): b}))
    if not fan_in_fan_out:
        with pytest.raises(AdapterError, match=r"the update is 64 x 256, .* shape \[256, 64\]"):
            merge_adapter(base, adapter, tmp_path / "out", sample=False)
        return
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    merged = load_file(tmp_path / "out" / first)[f"{name}.weight"]
    expected = weight.double() + 2.0 * (b.double() @ a.double()).T  # alpha / r is 16 / 8
    torch.testing.assert_close(merged.double(), expected, rtol=2**-7, atol=1e-6)


def test_the_index_counts_parameters_again(base: Path, adapter: Path, tmp_path: Path) -> None:
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_parameters"] = 5
    path.write_text(json.dumps(index))
    save_whole(adapter, **{EMBEDDING: torch.ones(304, WIDTH)})
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    metadata = json.loads((tmp_path / "out" / path.name).read_text())["metadata"]
    count = 304 * WIDTH + 6 * (WIDTH * WIDTH + WIDTH)
    assert metadata == {"total_size": 2 * count, "total_parameters": count}


NORM, QUERY = "model.layers.4.input_layernorm.weight", "model.layers.4.self_attn.q_proj"


@pytest.mark.parametrize("kind", ["replace", "overflow", "tokens", "bias", "nf4"])
def test_no_value_that_is_not_finite_is_written(
    kind: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Whatever makes the rows: values trained whole, or too large for the base's dtype, too."""
    weights: Any = "original"
    if kind == "replace":
        save_whole(adapter, **{NORM: torch.full((WIDTH,), float("nan"))})
    elif kind == "overflow":  # finite in float32, not in float16
        path = base / "model-00002-of-00003.safetensors"
        values = load_file(path)
        save_file({**values, NORM: values[NORM].half()}, path, {"format": "pt"})
        save_whole(adapter, **{NORM: torch.full((WIDTH,), 70_000.0)})
    elif kind == "tokens":
        rows = {f"{EMBEDDING[:-7]}.token_adapter.trainable_tokens_delta": torch.ones(1, WIDTH)}
        next(iter(rows.values()))[0, 3] = float("inf")
        save_whole(adapter, **rows)
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["trainable_token_indices"] = [7]
        (adapter / "adapter_config.json").write_text(json.dumps(config))
    elif kind == "bias":
        add_to_base(base, **{f"{QUERY}.bias": torch.ones(WIDTH, dtype=torch.bfloat16)})
        save_whole(adapter, **{f"{QUERY}.bias": torch.full((WIDTH,), float("-inf"))})
    else:
        weights = "nf4"
        path = base / "model-00002-of-00003.safetensors"
        values = load_file(path)
        values["model.layers.1.mlp.up_proj.weight"] = torch.ones(WIDTH, WIDTH).bfloat16()
        values["model.layers.1.mlp.up_proj.weight"][5, 5] = float("inf")
        add_to_base(base, path.name, **values)
        record = {
            "quantization": {"quant_type": "nf4", "double_quant": False, "blocksize": 64},
            "quantized_modules": ["model.layers.1.mlp.up_proj"],
        }
        (adapter / "training.json").write_text(json.dumps(record))
    with pytest.raises(AdapterError, match="not finite"):
        merge_adapter(base, adapter, tmp_path / "out", base_weights=weights, sample=False)
    assert not list((tmp_path / "out").glob(".*.part"))
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("piece_bytes", [1000, 4 * 2**20])
def test_hashes_are_the_files_wherever_the_first_change_lies(
    piece_bytes: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file without any change, one changed from its middle on, one with another header."""
    monkeypatch.setattr("tuneserve.merge.tiling.DEFAULT_PIECE_BYTES", piece_bytes)
    adapter = make_adapter(tmp_path / "adapter", layers_to_transform=[4])
    rewrite(adapter, lambda t: [t.pop(k) for k in list(t) if ".layers.4." not in k])
    save_whole(adapter, **{EMBEDDING: torch.ones(304, WIDTH)})
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    proof = read_proof(tmp_path / "out")
    assert proof is not None
    files = {p.name: file_sha256(p) for p in base.glob("*.safetensors")}
    assert proof["base"]["sha256"] == files
    outputs = {name: proof["outputs"][name]["sha256"] for name in files}
    assert outputs == {p.name: file_sha256(p) for p in (tmp_path / "out").glob("*.safetensors")}
    assert [files[name] == outputs[name] for name in sorted(files)] == [False, False, True]
    verify(tmp_path / "out")


def test_bytes_before_the_first_change_are_hashed_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    from tuneserve.merge import stream

    hashed = 0

    class Counting:
        """SHA-256 that counts; copies go on counting."""

        def __init__(self, data: bytes = b"", inner: Any = None) -> None:
            self.inner = inner or hashlib.sha256()
            self.update(data)

        def update(self, data: Any) -> None:
            nonlocal hashed
            hashed += len(data)
            self.inner.update(data)

        def copy(self) -> Counting:
            return Counting(inner=self.inner.copy())

        def hexdigest(self) -> str:
            return str(self.inner.hexdigest())

    class Hashes:
        sha256 = Counting

    monkeypatch.setattr(stream, "hashlib", Hashes)
    adapter = make_adapter(tmp_path / "adapter", layers_to_transform=[4])
    rewrite(adapter, lambda t: [t.pop(k) for k in list(t) if ".layers.4." not in k])
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    total = sum(p.stat().st_size for p in base.glob("*.safetensors"))
    # safetensors writes the names in order: after layer 4's weight there is nothing else.
    assert hashed == total + 2 * WIDTH * WIDTH
    verify(tmp_path / "out")
