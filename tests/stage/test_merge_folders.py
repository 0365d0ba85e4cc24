"""Where base, adapter and output lie, and what may lie there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_house import disk_of, make_adapter, make_base, rewrite, weights
from tuneserve.errors import AdapterError, InputError, ModelError, OutputExists
from tuneserve.merge import merge_adapter
from tuneserve.merge.proof import verify


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def link_to_nothing(folder: Path) -> Path:
    (folder / "out").symlink_to(folder / "nowhere")
    return folder / "out"


def file_above(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file" / "deep" / "out"


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    ("place", "message"),
    [(link_to_nothing, "out: is a link to nothing"), (file_above, "is a file")],
)
def test_no_folder_can_be_made_there(
    place: Callable[[Path], Path], message: str, in_memory: bool, base: Path, adapter: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    out = place(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(OutputExists, match=message):
        merge_adapter(base, adapter, out, sample=False, in_memory=in_memory)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_disk_that_takes_no_files_is_named(
    in_memory: bool, base: Path, adapter: Path, tmp_path: Path
) -> None:
    with disk_of(tmp_path / "disk", 1000) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(InputError, match="disk: cannot be written to") as caught:
            merge_adapter(base, adapter, disk / "deep" / "out", in_memory=in_memory)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("which", ["base", "adapter"])
def test_base_and_adapter_are_never_written_over(
    which: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    before = weights(tmp_path)
    with pytest.raises(OutputExists, match="is not empty"):
        merge_adapter(base, adapter, tmp_path / which, sample=False)
    assert weights(tmp_path) == before


@pytest.mark.parametrize("place", ["base/merged", "adapter/merged", "linked"])
def test_the_output_may_lie_below_or_behind_a_link(
    place: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    merge_adapter(base, adapter, tmp_path / "plain", sample=False)
    merge_adapter(base, adapter, tmp_path / place, sample=False)
    assert weights(tmp_path / place) == weights(tmp_path / "plain")
    again = merge_adapter(base, adapter, tmp_path / place, sample=False)
    assert again.bytes_written == 0
    verify(tmp_path / place)


def test_a_snapshot_of_the_hub_is_links_and_its_merge_is_files(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    merge_adapter(base, adapter, tmp_path / "plain", sample=False)
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(base.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    for path in (*blobs.iterdir(), snapshot, blobs):
        path.chmod(0o555)  # as shared ones are
    merge_adapter(snapshot, adapter, tmp_path / "out", sample=False)
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")
    assert not any(p.is_symlink() for p in (tmp_path / "out").iterdir())
    (blobs / f"{1:040x}").unlink()
    with pytest.raises(ModelError, match="model-00001-of-00003.safetensors: cannot be read"):
        merge_adapter(snapshot, adapter, tmp_path / "lost", sample=False)


def test_an_adapter_saved_into_its_bases_folder(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "plain", sample=False)
    for path in adapter.iterdir():
        path.rename(base / path.name)
    merge_adapter(base, base, tmp_path / "out", sample=False)
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")


def test_an_adapter_in_several_files_is_refused_by_their_names(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """PEFT loads one file, too."""
    path = adapter / "adapter_model.safetensors"
    path.rename(adapter / "adapter_model-00001-of-00002.safetensors")
    with pytest.raises(AdapterError, match="only adapter_model-00001-of-00002.safetensors"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_folder_of_two_adapters_is_refused(in_memory: bool, base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapters" / "one")
    make_adapter(tmp_path / "adapters" / "two")
    with pytest.raises(AdapterError, match="adapters lie in one, two below it") as caught:
        merge_adapter(base, tmp_path / "adapters", tmp_path / "out", in_memory=in_memory)
    assert caught.value.hint == f"name one: {tmp_path / 'adapters' / 'one'}"


def test_an_update_of_zeros_is_said(base: Path, adapter: Path, tmp_path: Path) -> None:
    said = "every update of the adapter is zero: the merged weights are the base's"
    assert said not in merge_adapter(base, adapter, tmp_path / "one", sample=False).notes
    rewrite(adapter, lambda t: [v.zero_() for k, v in t.items() if "lora_B" in k])
    assert said in merge_adapter(base, adapter, tmp_path / "out", sample=False).notes
    for path in base.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_tensors_of_any_dtype_and_shape_pass_unchanged(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    """Scalars, nothing at all, integers, 8 and 64 bits; a scalar trained whole is replaced."""
    name = "model-00003-of-00003.safetensors"
    extra = {
        "scalar": torch.tensor(1.5), "trained": torch.tensor(1.5), "empty": torch.zeros(0, 5),
        "whole": torch.arange(3), "flag": torch.tensor([True]), "wide": torch.ones(3).double(),
        "eight": torch.ones(5).to(torch.float8_e4m3fn),
    }  # fmt: skip
    save_file({**load_file(base / name), **extra}, base / name, {"format": "pt", "made": "by hand"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"].update(dict.fromkeys(extra, name))
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    rewrite(adapter, lambda t: t.update({"base_model.model.trained": torch.tensor(2.5)}))
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    after = load_file(tmp_path / "out" / name)
    assert after["trained"].item() == 2.5
    for key in extra.keys() - {"trained"}:
        assert after[key].dtype == extra[key].dtype
        assert torch.equal(
            after[key].reshape(-1).view(torch.uint8), extra[key].reshape(-1).view(torch.uint8)
        )
    ours, theirs = ((f / name).read_bytes() for f in (tmp_path / "out", base))
    length = 8 + int.from_bytes(theirs[:8], "little")
    assert ours[:length] == theirs[:length]  # metadata and order


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "pytorch_model.bin", "adapter_config.json", "chat_template.jinja",
        "generation_config.json", "tokenizer.json", "additional_chat_templates/rag.jinja",
    ],
)  # fmt: skip
def test_verify_names_what_a_loader_would_read_besides(
    name: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    merge_adapter(base, adapter, out, sample=False)
    (out / "README.md").write_text("a card")  # of no matter
    verify(out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    with pytest.raises(ModelError) as caught:
        verify(out)
    assert caught.value.details["problems"] == [f"{name} is not part of the merge"]


@pytest.mark.parametrize(
    "proof",
    ["{", "[]", '{"format": 1}', '{"format": 1, "outputs": [1]}',
     '{"format": 1, "outputs": {"config.json": 3}}', '{"format": 1, "outputs": {"a": {}}}'],
)  # fmt: skip
def test_a_proof_that_cannot_be_used_is_said(
    proof: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    merge_adapter(base, adapter, out, sample=False)
    (out / "mergeproof.json").write_text(proof)
    with pytest.raises(ModelError, match="has no usable mergeproof.json"):
        verify(out)
    with pytest.raises(OutputExists, match="is not empty"):
        merge_adapter(base, adapter, out, sample=False)


def test_a_place_that_cannot_be_looked_at(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be looked at \(File name too long\)"):
        merge_adapter(base, adapter, tmp_path / ("x" * 300), sample=False)
    with pytest.raises(InputError, match="cannot be looked at"):
        merge_adapter(base, adapter, tmp_path / ("x" * 300) / "out", in_memory=True)


@pytest.mark.parametrize(
    "name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]
)
def test_a_base_that_only_a_file_beside_it_calls_quantized(
    name: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    (base / name).write_text('{"bits": 4}')
    merge_adapter(base, adapter, tmp_path / "plain", sample=False)  # it is of 16 bits all the same
    path = next(iter(base.glob("*.safetensors")))
    tensors = load_file(path)
    changed = next(n for n in tensors if n.endswith("norm.weight"))
    save_file({**tensors, changed: tensors[changed].int()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"its weights are quantized \({name}\)"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("quantization", "modules", "message"),
    [
        ("nf4", ["a"], "does not say how its base was quantized"),
        ({}, ["a"], "does not say how its base was quantized"),
        ({"quant_type": "nf4"}, "a", "does not say how its base was quantized"),
        ({"quant_type": "nf4"}, [3], "does not say how its base was quantized"),
        ({"quant_type": "int8"}, ["a"], "quant_type 'int8' is not known"),
        ({"blocksize": "64"}, ["a"], "blocksize '64' is not known"),
        ({"blocksize": 128}, ["a"], "blocksize 128 is not known"),
        ({"quant_type": "nf4"}, ["a"], "the base has no a.weight, quantized in training"),
    ],
)
def test_a_training_record_that_does_not_say_how_is_refused(
    quantization: Any, modules: Any, message: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    record = {"quantization": quantization, "quantized_modules": modules}
    (adapter / "training.json").write_text(json.dumps(record))
    with pytest.raises(AdapterError, match=message):
        merge_adapter(base, adapter, tmp_path / "out", base_weights="nf4", sample=False)
    assert not (tmp_path / "out").exists()
