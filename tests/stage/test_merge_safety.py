"""Kills, second merges, wrong inputs: what is on disk then, and that it resumes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_house import WIDTH, A, make_adapter, make_base, rewrite, weights
from tuneserve.checkpoint.fingerprint import fingerprint
from tuneserve.errors import AdapterError, ModelError, OutOfMemory, OutputExists
from tuneserve.merge import merge_adapter
from tuneserve.merge.journal import JOURNAL_NAME, Journal
from tuneserve.merge.proof import read_proof, verify

RUN = """
import sys
from pathlib import Path
from tuneserve.merge import merge_adapter
base, adapter, out = map(Path, sys.argv[1:4])
say = lambda done, total: print(done, flush=True)
merge_adapter(base, adapter, out, sample=False, progress=say)
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def test_layout_index_and_metadata_are_the_bases(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = merge_adapter(base, adapter, out, sample=False)
    assert (result.merged, result.copied) == (6, 7)
    assert {p.name for p in out.iterdir()} == {p.name for p in base.iterdir()} | {"mergeproof.json"}
    before = json.loads((base / "model.safetensors.index.json").read_text())
    after = json.loads((out / "model.safetensors.index.json").read_text())
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"]["total_size"] == 2 * (300 * WIDTH + 6 * WIDTH * WIDTH + 6 * WIDTH)
    for path in base.glob("*.safetensors"):
        ours, theirs = (out / path.name).read_bytes(), path.read_bytes()
        length = 8 + int.from_bytes(theirs[:8], "little")
        assert ours[:length] == theirs[:length] and len(ours) == len(theirs)
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_the_same_merge_again_is_a_no_op_and_the_bytes_are_reproducible(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    first = merge_adapter(base, adapter, tmp_path / "one", sample=False)
    again = merge_adapter(base, adapter, tmp_path / "one", sample=False)
    assert first.bytes_written > 0 and again.bytes_written == 0
    merge_adapter(base, adapter, tmp_path / "two", sample=False)
    assert weights(tmp_path / "one") == weights(tmp_path / "two")


def start(base: Path, adapter: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(base), str(adapter), str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def assert_nothing_half(out: Path, expected: dict[str, bytes]) -> None:
    """Every file with a final name is whole; provisional ones are hidden."""
    for path in out.iterdir() if out.exists() else ():
        if path.name == JOURNAL_NAME or path.name.startswith(".") or path.name == "mergeproof.json":
            continue
        assert path.read_bytes() == expected[path.name], path.name


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(
    kills: int, adapter: Path, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "large", layers=6, shards=6)
    merge_adapter(base, adapter, tmp_path / "whole", sample=False)
    expected = weights(tmp_path / "whole")
    total = sum(p.stat().st_size for p in base.glob("*.safetensors"))
    chance = random.Random(7)
    for _ in range(kills):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        child = start(base, adapter, out)
        limit = chance.randrange(total)
        assert child.stdout is not None
        for line in child.stdout:  # as far as a random byte, then a random moment more
            if int(line) >= limit:
                break
        time.sleep(chance.random() * 0.02)
        child.kill()
        child.wait()
        assert_nothing_half(out, expected)
        journal = out / JOURNAL_NAME
        lines = journal.read_text().splitlines()[1:] if journal.exists() else []
        finished = [json.loads(line) for line in lines]
        merge_adapter(base, adapter, out, sample=False)
        assert weights(out) == expected
        for line in finished:  # they were kept, not written again
            assert (out / line["shard"]).stat().st_mtime_ns == line["mtime_ns"]
        verify(out)


def test_a_finished_shard_is_kept_and_a_torn_journal_line_is_not_believed(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    merge_adapter(base, adapter, tmp_path / "whole", sample=False)
    first = "model-00001-of-00003.safetensors"
    stop = Stop(after=first, out=out)
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(base, adapter, out, sample=False, progress=stop)
    assert sorted(p.name for p in out.iterdir()) == [JOURNAL_NAME, first]
    mtime = (out / first).stat().st_mtime_ns
    with (out / JOURNAL_NAME).open("ab") as stream:
        stream.write(b'{"shard": "model-00002-of-00003.safete')
    merge_adapter(base, adapter, out, sample=False)
    assert (out / first).stat().st_mtime_ns == mtime
    assert weights(out) == weights(tmp_path / "whole")
    assert not (out / JOURNAL_NAME).exists()


class Stop:
    """A progress callback that interrupts once a file is finished."""

    def __init__(self, after: str, out: Path) -> None:
        self.path = out / after

    def __call__(self, done: int, total: int) -> None:
        if self.path.exists():
            raise KeyboardInterrupt


def test_ctrl_c_ends_within_a_second_and_resumes(adapter: Path, tmp_path: Path) -> None:
    base = make_base(tmp_path / "large", layers=6, shards=6)
    child = start(base, adapter, tmp_path / "out")
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    child.wait(20)
    assert time.monotonic() - began < 5  # a second alone; the machine may be busy
    merge_adapter(base, adapter, tmp_path / "out", sample=False)
    verify(tmp_path / "out")


def test_a_second_merge_into_the_folder_is_refused(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    refused: list[OutputExists] = []

    def second(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(OutputExists, match="another merge is writing") as caught:
                merge_adapter(base, adapter, out, sample=False)
            refused.append(caught.value)

    merge_adapter(base, adapter, out, sample=False, progress=second)
    assert refused and refused[0].exit_status == 2
    verify(out)


def test_a_foreign_folder_is_left_alone(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors.index.json").write_text("old")
    with pytest.raises(OutputExists, match="is not empty"):
        merge_adapter(base, adapter, out, sample=False)
    assert [p.name for p in out.iterdir()] == ["model.safetensors.index.json"]


def test_the_unfinished_work_of_another_merge_is_left_alone(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    Journal.open(out, "another").close()
    with pytest.raises(OutputExists, match="another base, adapter or setting"):
        merge_adapter(base, adapter, out, sample=False)
    assert [p.name for p in out.iterdir()] == [JOURNAL_NAME]


BAD_ADAPTERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "foreign": (lambda t: t.update(x=torch.ones(1)), "x: does not begin with"),
    "prefix twice": (
        lambda t: t.update({f"base_model.model.{A.format(0)}": t.pop(A.format(0))}),
        "base_model.model.base_model.model.*does not begin with base_model.model. once",
    ),
    "half a pair": (lambda t: t.pop(A.format(2)), "layers.2.self_attn.q_proj: has only b"),
    "adapter name left in": (
        lambda t: t.update({A.format(0).replace(".weight", ".default.weight"): torch.ones(8, 256)}),
        "lora_A.default.weight: is not a part of a LoRA layer",
    ),
    "rank": (
        lambda t: t.update(
            {
                A.format(0): torch.ones(4, WIDTH),
                A.format(0).replace("_A", "_B"): torch.ones(WIDTH, 4),
            }
        ),
        "has rank 4, its config says 8",
    ),
    "width": (lambda t: t.update({A.format(0): torch.ones(8, 128)}), "the update is 256 x 128"),
    "no such layer": (
        lambda t: t.update(
            {
                A.format(9): t[A.format(0)].clone(),
                A.format(9).replace("_A", "_B"): torch.ones(WIDTH, 8),
            }
        ),
        "the base has no model.layers.9.self_attn.q_proj.weight",
    ),
    "layers missing": (
        lambda t: [t.pop(k) for k in list(t) if ".layers.5." in k],
        "targets 1 modules of the base for which it has nothing: model.layers.5",
    ),
    "integers": (
        lambda t: t.update({A.format(0): torch.ones(8, WIDTH, dtype=torch.int8)}),
        "has dtype I8",
    ),
    "unknown parameter": (
        lambda t: t.update({"base_model.model.score.weight": torch.ones(2)}),
        "the base has no score.weight",
    ),
    "wrong shape": (
        lambda t: t.update(
            {"base_model.model.model.layers.0.input_layernorm.weight": torch.ones(2)}
        ),
        "has shape .2., model.layers.0.input_layernorm.weight has",
    ),
}


@pytest.mark.parametrize("name", BAD_ADAPTERS)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    name: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    change, message = BAD_ADAPTERS[name]
    rewrite(adapter, change)
    with pytest.raises(AdapterError, match=message):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "ADALORA"}, "its method is ADALORA"),
        ({"peft_type": "VERA"}, "its method is VERA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "changed the base"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "fused parameters"),
        ({"layer_replication": [[0, 2]]}, "layer replication"),
        ({"task_type": "SEQ_CLS"}, "its task is SEQ_CLS"),
        ({"sparkle": 3}, "not known: sparkle"),
    ],
)
def test_other_methods_are_refused_by_name(
    config: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "a", **config)
    with pytest.raises(AdapterError, match=message) as caught:
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert "--in-memory" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_another_base_of_the_same_shape_is_refused(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    (adapter / "base_fingerprint.json").write_text(json.dumps(fingerprint(base)))
    merge_adapter(base, adapter, tmp_path / "good", sample=False)
    path = base / "model-00002-of-00003.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(AdapterError, match="tensor model.layers.1.self_attn.q_proj.weight"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert not (tmp_path / "out").exists()


def test_quantized_bases_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantized \(fp8\)"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)


def test_values_that_are_not_finite_end_the_merge(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    rewrite(adapter, lambda t: t[A.format(3)].fill_(float("nan")))
    with pytest.raises(AdapterError, match="layers.3.self_attn.q_proj.weight.*not finite"):
        merge_adapter(base, adapter, tmp_path / "out", sample=False)
    assert not list((tmp_path / "out").glob(".*.part"))
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_memory_floor_is_stated(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="--max-memory of at least") as caught:
        merge_adapter(base, adapter, tmp_path / "out", max_memory_bytes=2**20, sample=False)
    floor = caught.value.details["needed_bytes"]
    merge_adapter(base, adapter, tmp_path / "out", max_memory_bytes=floor, sample=False)


def test_small_changes_are_accounted_for(base: Path, adapter: Path, tmp_path: Path) -> None:
    """A change far below the step of bfloat16 is mostly lost, and the proof says so."""
    full = merge_adapter(base, adapter, tmp_path / "full", sample=False)
    rewrite(adapter, lambda t: [v.mul_(1e-3) for k, v in t.items() if "lora_B" in k])
    tiny = merge_adapter(base, adapter, tmp_path / "tiny", sample=False)
    assert full.delta_survival is not None and full.delta_survival > 0.9
    assert tiny.delta_survival is not None and tiny.delta_survival < 0.5
    before = load_file(base / "model-00001-of-00003.safetensors")
    after = load_file(tmp_path / "tiny" / "model-00001-of-00003.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    lora = load_file(adapter / "adapter_model.safetensors")
    exact = lora[A.format(0).replace("_A", "_B")] @ lora[A.format(0)] * 2.0
    applied = after[name].float() - before[name].float()
    survived = 1 - min(1.0, float((applied - exact).norm() / exact.norm()))
    proof = read_proof(tmp_path / "tiny")
    assert proof is not None
    assert proof["tensors"][name]["delta_survival"] == pytest.approx(survived, abs=1e-3)


def test_verify_names_what_changed(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    merge_adapter(base, adapter, out, sample=False)
    path = out / "model-00002-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (out / "config.json").unlink()
    with pytest.raises(ModelError) as caught:
        verify(out)
    assert sorted(caught.value.details["problems"]) == [
        "config.json is missing",
        "model-00002-of-00003.safetensors has other bytes",
    ]


def test_the_command_checks_a_folder_against_its_proof(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    merge_adapter(base, adapter, out, sample=False)
    command = [sys.executable, "-m", "tuneserve", "merge", "--json", "--verify", str(out)]
    good = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["bytes"] == sum(
        p.stat().st_size for p in out.iterdir() if p.name != "mergeproof.json"
    )
    (out / "config.json").unlink()
    bad = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2
    assert "config.json is missing" in json.loads(bad.stdout)["error"]["message"]


def sparse_base(folder: Path, name: str, shape: tuple[int, int]) -> Path:
    """One large file of zeros that takes no room on disk."""
    folder.mkdir()
    size = 2 * shape[0] * shape[1]
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}
    raw = json.dumps({name: entry}).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + size)
    (folder / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": false}')
    return folder


@pytest.mark.parametrize("rows", [80_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_memory_is_the_same_for_any_file_size(rows: int, tmp_path: Path) -> None:
    """A tensor of 655 MB (8.2 GB in the full run) in one file, with the interpreter and torch."""
    module = "model.layers.0.mlp.up_proj"
    base = sparse_base(tmp_path / "base", f"{module}.weight", (rows, 4096))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(8, 4096),
        f"base_model.model.{module}.lora_B.weight": torch.ones(rows, 8),
    }
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    code = (
        RUN.replace("merge_adapter(base", "result = merge_adapter(base", 1)
        + "print(result.peak_rss_bytes)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(base), str(adapter)]
    done = subprocess.run(
        [*command, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    (tmp_path / "out" / "model.safetensors").unlink()
    assert int(done.stdout.splitlines()[-1]) < 420 * 2**20
