"""The train stage on a tiny trained model: what it reads, what it writes, what it refuses."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from pico import make_pico
from train_rows import IGNORED, make_context, pico_dataset, write_rows
from tuneserve.artifacts import Artifact, file_sha256
from tuneserve.errors import DataError, RunFileError, TrainingDiverged
from tuneserve.lm import hardware
from tuneserve.stages import StageContext
from tuneserve.train.recipe import make_recipe, training_order
from tuneserve.train.stage import run

pytestmark = pytest.mark.usefixtures("one_thread", "float32")

TRAIN = {"effective_batch": 4, "epochs": 2, "learning_rate": 4e-3, "save_steps": 5}


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, pico_model: Path, dataset: Artifact, float32: None
) -> tuple[StageContext, dict[str, Any]]:
    context = make_context(
        tmp_path_factory.mktemp("qlora"), pico_model, {"dataset": dataset}, TRAIN
    )
    return context, run(context)


def test_the_artifact_is_complete(trained: tuple[StageContext, dict[str, Any]]) -> None:
    context, metrics = trained
    assert {path.name for path in context.out.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "base_fingerprint.json",
        "training.json",
        "loss.jsonl",
        "loss.png",
        "memory.json",
        "memory.png",
    }
    tokenizer = context.inputs["dataset"].path / "tokenizer"
    for path in tokenizer.iterdir():
        assert (context.out / path.name).read_bytes() == path.read_bytes()
    sidecar = json.loads((context.out / "training.json").read_text())
    assert sidecar["quantization"] == {
        "quant_type": "nf4",
        "double_quant": True,
        "blocksize": 64,
        "compute_dtype": hardware.dtype_name(hardware.compute_dtype(torch.device("cpu"))),
    }
    # Two layers of seven linear layers; the head is not quantized.
    assert len(sidecar["quantized_modules"]) == 14
    assert "model.layers.1.mlp.down_proj" in sidecar["quantized_modules"]
    text = (context.out / "adapter_config.json").read_text()
    assert str(context.base) not in text and "/tmp" not in text
    memory = json.loads((context.out / "memory.json").read_text())
    assert {"load", "smoke", "train", "evaluate"} <= {p["phase"] for p in memory["timeline"]}
    assert memory["peak_rss_bytes"] > 50 * 2**20
    json.dumps(metrics)


def test_it_learned_and_says_so(
    trained: tuple[StageContext, dict[str, Any]], dataset: Artifact
) -> None:
    context, metrics = trained
    assert metrics["steps"] == 12
    assert metrics["final_loss"] < 0.6 * metrics["first_loss"]
    assert metrics["eval_loss"] < 0.6 * metrics["first_loss"]
    labels = pq.read_table(dataset.path / "train.parquet").column("labels").to_pylist()
    once = sum(label != IGNORED for row in labels for label in row[1:])
    assert metrics["supervised_tokens_seen"] == 2 * once
    points = [json.loads(line) for line in (context.out / "loss.jsonl").read_text().splitlines()]
    assert [p["step"] for p in points if "loss" in p] == list(range(1, 13))
    assert points[-1] == {"step": 12, "eval_loss": metrics["eval_loss"]}


def test_peft_loads_it_and_finds_the_same_loss(
    trained: tuple[StageContext, dict[str, Any]], dataset: Artifact
) -> None:
    """The held-out loss, worked out from full logits of PEFT's own model on an NF4 base."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    context, metrics = trained
    dtype = hardware.compute_dtype(torch.device("cpu"))
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    base = AutoModelForCausalLM.from_pretrained(
        context.base, dtype=dtype, quantization_config=config, device_map="cpu"
    )
    model = peft.PeftModel.from_pretrained(base, context.out).eval()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its kernel rounds what goes in
    table = pq.read_table(dataset.path / "eval.parquet").to_pylist()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in table:
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
            labels = torch.tensor(row["labels"][1:])
            total += float(
                torch.nn.functional.cross_entropy(
                    logits, labels, ignore_index=IGNORED, reduction="sum"
                )
            )
            count += int((labels != IGNORED).sum())
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-4)


def test_collated_ids_are_the_parquets(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row arrives whole and in order, padded by length: its end token is the pad token."""
    from tuneserve.train.trainer import RowTrainer

    seen: list[tuple[list[int], list[int]]] = []
    original = RowTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "num_items_in_batch" in kwargs:  # not the smoke step
            for ids, labels, mask in zip(
                inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True
            ):
                size = int(mask.sum())
                assert mask[:size].all() and not mask[size:].any()
                assert (labels[size:] == IGNORED).all()
                seen.append((ids[:size].tolist(), labels[:size].tolist()))
        return original(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(RowTrainer, "compute_loss", spy)
    context = make_context(
        tmp_path, pico_model, {"dataset": dataset}, {**TRAIN, "epochs": 1}, {"micro_batch": 2}
    )
    run(context)
    rows = pq.read_table(dataset.path / "train.parquet").to_pylist()
    recipe = make_recipe(context.run.train, len(rows), 2)
    order = training_order([len(row["input_ids"]) for row in rows], recipe, 0)
    assert sorted(order) == list(range(24))
    assert [ids for ids, _ in seen] == [rows[i]["input_ids"] for i in order]
    assert [labels for _, labels in seen] == [rows[i]["labels"] for i in order]


def test_a_token_weighs_the_same_in_any_micro_batch(
    tmp_path: Path, pico_model: Path, dataset: Artifact
) -> None:
    """4x1, 2x2 and 1x4 rows of unequal length: the same losses, the same adapter."""
    from safetensors.torch import load_file

    found = []
    for micro in (4, 2, 1):
        context = make_context(
            tmp_path / str(micro),
            pico_model,
            {"dataset": dataset},
            {**TRAIN, "epochs": 1},
            {"micro_batch": micro},
        )
        metrics = run(context)
        assert (metrics["micro_batch"], metrics["gradient_accumulation"]) == (micro, 4 // micro)
        lines = (context.out / "loss.jsonl").read_text().splitlines()
        losses = [json.loads(line).get("loss") for line in lines[:6]]
        found.append((losses, load_file(context.out / "adapter_model.safetensors")))
    for losses, adapter in found[1:]:
        assert losses == pytest.approx(found[0][0], abs=1e-5 * max(found[0][0]))
        for name, tensor in adapter.items():
            torch.testing.assert_close(tensor, found[0][1][name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_lora_on_a_16_bit_base(
    tmp_path: Path, pico_model: Path, dataset: Artifact, lora: dict[str, Any]
) -> None:
    context = make_context(
        tmp_path,
        pico_model,
        {"dataset": dataset},
        {**TRAIN, "max_steps": 4, "method": "lora", "lora": {"r": 8, **lora}},
    )
    metrics = run(context)
    assert metrics["final_loss"] < metrics["first_loss"]
    sidecar = json.loads((context.out / "training.json").read_text())
    assert sidecar["quantization"] is None and sidecar["quantized_modules"] == []


def test_checkpointing_changes_memory_not_the_gradients(
    tmp_path: Path, pico_model: Path, dataset: Artifact
) -> None:
    """B01: gradients arrive with checkpointing on a frozen base; every target's lora_B moves."""
    from safetensors.torch import load_file

    losses = []
    for on in (True, False):
        context = make_context(
            tmp_path / str(on),
            pico_model,
            {"dataset": dataset},
            {**TRAIN, "max_steps": 3, "gradient_checkpointing": on},
        )
        metrics = run(context)
        assert metrics["gradient_checkpointing"] is on
        losses.append(metrics["final_loss"])
        tensors = load_file(context.out / "adapter_model.safetensors")
        ends = [t for name, t in tensors.items() if "lora_B" in name]
        assert len(ends) == 14 and all(t.count_nonzero() for t in ends)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_same_seed_gives_the_same_bytes(
    tmp_path: Path, pico_model: Path, trained: tuple[StageContext, dict[str, Any]]
) -> None:
    first, _ = trained
    again = make_context(tmp_path, pico_model, dict(first.inputs), TRAIN)
    run(again)
    for path in sorted(first.out.iterdir()):
        if not path.name.startswith("memory."):
            assert file_sha256(path) == file_sha256(again.out / path.name), path.name


def test_wrong_module_names_are_all_named(
    tmp_path: Path, pico_model: Path, dataset: Artifact
) -> None:
    """B02: one wrong name among right ones."""
    lora = {"target_modules": ["q_proj", "query"], "modules_to_save": ["classifier"]}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, {**TRAIN, "lora": lora})
    with pytest.raises(RunFileError) as caught:
        run(context)
    assert "'query'" in str(caught.value) and "'classifier'" in str(caught.value)
    assert "'q_proj'" not in caught.value.message
    for name in ("q_proj", "down_proj", "o_proj"):
        assert name in caught.value.expected
    assert "lm_head" not in caught.value.expected
    assert list(context.out.iterdir()) == []


@pytest.mark.parametrize("name", ["q_proj", "self_attn"])
def test_a_quantized_layer_is_not_trained_whole(
    tmp_path: Path, pico_model: Path, dataset: Artifact, name: str
) -> None:
    lora = {"target_modules": ["down_proj"], "modules_to_save": [name]}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, {**TRAIN, "lora": lora})
    with pytest.raises(RunFileError, match=f"modules_to_save: '{name}' is quantized"):
        run(context)
    assert list(context.out.iterdir()) == []
    in_16_bits = {**TRAIN, "lora": lora, "method": "lora", "max_steps": 1}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, in_16_bits)
    assert run(context)["steps"] == 1


@pytest.mark.parametrize("whole", ["q_proj", "self_attn"])
def test_no_layer_is_trained_whole_and_by_an_adapter(
    tmp_path: Path, pico_model: Path, dataset: Artifact, whole: str
) -> None:
    """B02: PEFT would leave the adapter out in silence."""
    lora = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": [whole]}
    train = {**TRAIN, "lora": lora, "method": "lora"}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, train)
    with pytest.raises(RunFileError, match="'q_proj' is in modules_to_save as well"):
        run(context)
    assert list(context.out.iterdir()) == []


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_adapters_on_a_tied_head_are_refused(
    tmp_path: Path, pico_model: Path, dataset: Artifact, name: str
) -> None:
    lora = {"target_modules": ["q_proj", name]}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, {**TRAIN, "lora": lora})
    with pytest.raises(RunFileError, match=f"'{name}' is the head or embedding"):
        run(context)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_first_bad_number_stops_the_run(tmp_path: Path, dataset: Artifact, method: str) -> None:
    """B04: a NaN in one weight; nothing is saved; step, rows and the weight are named."""
    from safetensors.torch import load_file, save_file

    base = make_pico(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    train = {**TRAIN, "method": method}
    context = make_context(tmp_path, base, {"dataset": dataset}, train)
    with pytest.raises(TrainingDiverged) as caught:
        run(context)
    assert caught.value.exit_status == 2
    assert caught.value.details["tensors"] == ["model.layers.1.mlp.down_proj.weight"]
    assert "1 tensors of the base are not finite, first model.layers.1.mlp." in str(caught.value)
    assert "learning_rate or" not in caught.value.hint
    assert caught.value.details["step"] == 1
    assert caught.value.details["learning_rate"] > 0
    rows = caught.value.details["rows"]
    assert len(rows) == 4 and all(row.startswith("train.jsonl:") for row in rows)
    assert list(context.out.iterdir()) == []
    assert not list(context.work.glob("checkpoint-*"))


def test_fewer_rows_than_a_batch_still_train(
    tmp_path: Path, pico_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B10: not zero steps, and not silently."""
    small = pico_dataset(tmp_path / "data", pico_model, rows=3)
    train = {**TRAIN, "effective_batch": 16, "epochs": 2}
    context = make_context(tmp_path, pico_model, {"dataset": small}, train)
    with caplog.at_level(logging.WARNING):
        metrics = run(context)
    assert (metrics["steps"], metrics["effective_batch"]) == (2, 3)
    assert "only 3 rows" in caplog.text


def test_another_launchers_variables_are_not_waited_for(
    tmp_path: Path, pico_model: Path, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B09: accelerate would take these for one of two processes, and wait for the other."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    train = {**TRAIN, "effective_batch": 4, "max_steps": 2}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, train, {"micro_batch": 2})
    metrics = run(context)
    assert (metrics["steps"], metrics["gpus"], metrics["gradient_accumulation"]) == (2, 1, 2)


def test_trackers_hear_of_every_step_and_their_outage_ends_nothing(
    tmp_path: Path,
    pico_model: Path,
    dataset: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`report_to` passes through; one tracker goes down after the first step."""
    from transformers import TrainerCallback
    from transformers.integrations import integration_utils

    heard: dict[str, list[tuple[int, float]]] = {"Up": [], "Down": []}

    class Up(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
            if "loss" in logs:
                heard[type(self).__name__].append((state.global_step, logs["loss"]))

    class Down(Up):
        def on_log(self, *args: Any, **rest: Any) -> None:
            super().on_log(*args, **rest)
            raise ConnectionError("no route to the tracker")

    for name, kind in {"tensorboard": Up, "mlflow": Down}.items():
        kind.__module__ = integration_utils.__name__
        monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, kind)
    monkeypatch.setattr("tuneserve.train.trackers.find_spec", lambda name: name)  # as if there
    train = {**TRAIN, "max_steps": 3, "report_to": ["tensorboard", "mlflow"]}
    context = make_context(tmp_path, pico_model, {"dataset": dataset}, train)
    with caplog.at_level(logging.INFO):
        assert run(context)["steps"] == 3
    line = r"train: 1/3 steps, \d+ s left, loss \d\.\d{4}, [\d,]+ tokens/s, [\d.]+ [MG]iB\n"
    assert re.search(line, caplog.text)
    lines = (context.out / "loss.jsonl").read_text().splitlines()
    points = [(p["step"], p["loss"]) for p in map(json.loads, lines) if "loss" in p]
    assert heard == {"Up": points, "Down": points[:1]}
    assert caplog.text.count("Down failed (no route to the tracker)") == 1


def test_no_held_out_rows_is_no_held_out_loss(tmp_path: Path, pico_model: Path) -> None:
    alone = pico_dataset(tmp_path / "data", pico_model, rows=4)
    write_rows(alone.path / "eval.parquet", [], "eval")
    context = make_context(tmp_path, pico_model, {"dataset": alone}, {**TRAIN, "max_steps": 1})
    assert run(context)["eval_loss"] is None
    assert "eval_loss" not in (context.out / "loss.jsonl").read_text()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "holds no rows"),
        ([([1, 5, 6], [IGNORED, 5, 6]), ([1, 5], [IGNORED] * 2)], "train.jsonl:2"),
        ([([1, 5], [IGNORED, -1])], "train.jsonl:1: label -1 at position 1"),
        ([([1, 5, 512], [IGNORED, 5, 512])], "train.jsonl:1: token id 512 at position 2"),
    ],
)
def test_rows_that_cannot_be_trained_on(
    tmp_path: Path, pico_model: Path, rows: list[tuple[list[int], list[int]]], problem: str
) -> None:
    bad = pico_dataset(tmp_path / "data", pico_model, rows=1)
    write_rows(bad.path / "train.parquet", rows, "train")
    context = make_context(tmp_path, pico_model, {"dataset": bad}, TRAIN)
    with pytest.raises(DataError, match=problem):
        run(context)
    assert list(context.out.iterdir()) == []


def test_the_quantizers_package_is_never_imported(
    trained: tuple[StageContext, dict[str, Any]],
) -> None:
    """B11: PEFT imports it, patches and all, whenever it is there."""
    assert trained[1]["steps"] and sys.modules["gptqmodel"] is None
