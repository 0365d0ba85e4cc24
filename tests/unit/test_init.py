"""`tuneserve init`: what it finds in data, what it chooses for a card, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

import data_bases as bases
from tuneserve.checkpoint import base as base_module
from tuneserve.data.conversation import check
from tuneserve.data.formats import convert, detect
from tuneserve.data.sources import Sources
from tuneserve.errors import (
    DataError,
    HubError,
    HubRefused,
    ModelError,
    OutOfMemory,
    OutputExists,
)
from tuneserve.init import init_run
from tuneserve.init.bases import SUGGESTED
from tuneserve.init.look import DataLook
from tuneserve.init.outliers import usual_limit
from tuneserve.init.write import _scalar
from tuneserve.plan.build import plan_for
from tuneserve.plan.machine import Gpu, GpuProcess, Machine
from tuneserve.runfile import load_run_file

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "data_templates"
GIB = 2**30

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A base's small files, as after looking at the hub: tokenizer and config, no weights."""
    folder = bases.make_base(tmp_path / "base")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SHAPE}))
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any, **__: Any) -> Path:
        raise HubError("x: the hub cannot be reached", hint="check the network")

    monkeypatch.setattr(base_module, "download", silent)


def chats(path: Path, count: int = 60, answer: str = "The lamp is red.") -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What colour is lamp {number}?"},
                {"role": "assistant", "content": answer},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_counts_with_the_tokenizer_and_fits_this_machine(tmp_path: Path, local: Path) -> None:
    data = chats(tmp_path / "Lamp Chats.jsonl")
    out = tmp_path / "run.yaml"
    made = init_run([str(data)], out, base=str(local))
    # The longest row, rendered by hand: the template puts a system turn before it.
    text = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat colour is lamp 59?"
        "<|im_end|>\n<|im_start|>assistant\nThe lamp is red.<|im_end|>\n"
    )
    tokens = len(Tokenizer.from_file(str(local / "tokenizer.json")).encode(text).ids)
    assert made.look is not None
    assert (made.look.counted, made.look.distinct, made.look.longest) == (True, 60, tokens)
    run = load_run_file(out)
    assert run == made.choice.run
    assert run.name == "lamp-chats" and run.data.train == [str(data)]
    assert run.data.max_length == 256 and run.data.eval_fraction == 0.3
    assert run.model.base == str(local)
    assert plan_for(run, base_dir=local).fits
    written = out.read_text()
    assert f"the longest row has {tokens}" in written and "train: Lamp Chats.jsonl" in written
    assert made.next_commands[0] == f"tuneserve validate {out}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Lamp Chats.jsonl", "base", "run.yaml"]


@pytest.mark.parametrize(
    ("base", "memory", "methods", "why"),
    [
        (None, None, ["none"], "small models lose to 4 bits what they learned"),
        (None, 24 * GIB, ["gptq", "none"], "16 bits where a small model loses too much"),
        ("Qwen/Qwen2.5-7B-Instruct", 24 * GIB, ["gptq"], "add none at the end to fall back"),
    ],
)
def test_a_small_model_need_not_be_served_in_4_bits(
    tmp_path: Path, local: Path, no_hub: None, base: str | None, memory: int | None,
    methods: list[str], why: str,
) -> None:  # fmt: skip
    data, out = chats(tmp_path / "a.jsonl"), tmp_path / "run.yaml"
    init_run([str(data)], out, base=base or str(local), gpu_memory_bytes=memory)
    run = load_run_file(out)
    assert run.quantize.methods == methods
    # On a CPU also so short a run has checkpoints.
    assert run.train.epochs == 3 and run.train.save_steps == (50 if memory else 10)
    assert why in out.read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 11000},  # 32 does not divide it
        {"model_type": "phi3"},  # known to fail
        {"model_type": "qwen3_moe"},  # listed, and not tested
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {**SHAPE, "model_type": "mistral"},
        },
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {**SHAPE, "model_type": "gemma3_text"},
        },
    ],
)
@pytest.mark.parametrize("memory", [None, 24 * GIB])
def test_what_cannot_be_exported_is_served_in_16_bits(
    tmp_path: Path, local: Path, changes: dict[str, Any], memory: int | None
) -> None:
    config = json.loads((local / "config.json").read_text())
    if "text_config" in changes:
        changes["text_config"]["vocab_size"] = config["vocab_size"]
    (local / "config.json").write_text(json.dumps({**config, **changes}))
    data, out = chats(tmp_path / "a.jsonl"), tmp_path / "run.yaml"
    init_run([str(data)], out, base=str(local), gpu_memory_bytes=memory)
    assert load_run_file(out).quantize.methods == ["none"]
    assert "no 4-bit export of this family" in out.read_text()


def test_what_is_there_is_not_overwritten(tmp_path: Path, local: Path) -> None:
    data, out = chats(tmp_path / "a.jsonl"), tmp_path / "run.yaml"
    out.write_text("mine")
    with pytest.raises(OutputExists) as caught:
        init_run([str(data)], out, base=str(local))
    assert "--force" in caught.value.hint and caught.value.exit_status == 2
    assert out.read_text() == "mine"
    init_run([str(data)], out, base=str(local), force=True)
    assert load_run_file(out).name == "a"


@pytest.mark.parametrize(
    ("name", "format", "parser"),
    [
        ("messages.jsonl", "messages", None),
        ("sharegpt.json", "sharegpt", None),
        ("alpaca.json", "alpaca", None),
        ("prompt_completion.jsonl", "prompt_completion", None),
        ("tools_messages.jsonl", "messages", "hermes"),
        ("tools_sharegpt.json", "sharegpt", "hermes"),
    ],
)
def test_every_format_is_known(
    tmp_path: Path, no_hub: None, name: str, format: str, parser: str | None
) -> None:
    made = init_run([str(TEMPLATES / name)], tmp_path / "run.yaml", gpu_memory_bytes=24 * GIB)
    assert made.look is not None and made.look.sources.formats == [format]
    assert not made.look.counted and not made.look.reasons
    assert load_run_file(made.run_file).serve.tool_parser == parser


@pytest.mark.parametrize(
    ("gib", "words", "base", "method", "checkpointing"),
    [
        (6, 600, "Qwen/Qwen2.5-1.5B-Instruct", "lora", True),
        (24, 600, "Qwen/Qwen2.5-7B-Instruct", "lora", True),
        (18, 3600, "Qwen/Qwen2.5-7B-Instruct", "qlora", True),
        (80, 600, "Qwen/Qwen2.5-7B-Instruct", "lora", False),
    ],
)
def test_the_card_decides(
    tmp_path: Path, no_hub: None, gib: int, words: int, base: str, method: str, checkpointing: bool
) -> None:
    data = chats(tmp_path / "a.jsonl", 600, "Red, and it glows at night. " * (words // 6))
    made = init_run([str(data)], tmp_path / "run.yaml", gpu_memory_bytes=gib * GIB)
    run = load_run_file(made.run_file)
    assert run.model.base == base
    assert (run.train.method, run.train.gradient_checkpointing) == (method, "auto")
    assert made.choice.plan.step.checkpointing == checkpointing
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(next(s.config for s in SUGGESTED if s.name == base)))
    plan = plan_for(run, base_dir=tmp_path, gpu_memory_bytes=gib * GIB)
    assert plan.fits
    assert plan.stages["train"].peak.needed_bytes <= 0.88 * gib * GIB
    assert made.next_commands[1].endswith(f"--gpu-memory {gib}GiB")


@pytest.mark.parametrize(("gib", "wanted"), [(24, "stop"), (80, "share")])
def test_the_second_run_of_the_same_file_fits_too(
    tmp_path: Path, no_hub: None, gib: int, wanted: str
) -> None:
    """With the first one's server on the card: beside it, or in its place."""
    data = chats(tmp_path / "a.jsonl")
    made = init_run([str(data)], tmp_path / "run.yaml", gpu_memory_bytes=gib * GIB)
    run = load_run_file(made.run_file)
    assert run.serve.while_training == wanted
    text = made.run_file.read_text()
    assert ("while_training: stop" in text) == (wanted == "stop")
    assert ("# downtime in the next run: " in text) == (wanted == "stop")
    assert not any("tuneserve down" in note for note in made.choice.notes)
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(next(s.config for s in SUGGESTED if s.name == run.model.base)))
    served = made.choice.plan.serving.peak.needed_bytes
    server = GpuProcess(7, "vllm", served, ours=True)
    card = Gpu("card", gib * GIB, gib * GIB - served, (server,))
    machine = Machine(card, 64 * GIB, 60 * GIB, 900 * GIB, "store")
    second = plan_for(run, base_dir=tmp_path, machine=machine)
    assert second.fits and second.blue_green_fits == (run.serve.rollout == "blue_green")
    sharing = run.model_copy(
        update={"serve": run.serve.model_copy(update={"while_training": "share"})}
    )
    fits = plan_for(sharing, base_dir=tmp_path, machine=machine).fits
    assert fits == (wanted == "share")


def test_one_long_row_does_not_decide_silently(tmp_path: Path, no_hub: None) -> None:
    data = chats(tmp_path / "a.jsonl", 600)
    even = init_run([str(data)], tmp_path / "even.yaml", gpu_memory_bytes=24 * GIB)
    assert not any("longer than" in note for note in even.choice.notes)
    row = json.loads(data.read_text().splitlines()[0])
    row["messages"][1]["content"] = "It glows at night. " * 1500  # 28,500 letters: 8,143 tokens
    with data.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    made = init_run([str(data)], tmp_path / "run.yaml", gpu_memory_bytes=24 * GIB)
    [note] = [note for note in made.choice.notes if "longer than" in note]
    start = (
        "1 row of 601 is longer than 256 tokens; `data.max_length: 256` would leave it out and give"
    )
    assert note.startswith(start)
    # What it would give is what the run without that row got.
    rows = [each.choice.plan.step.micro_batch for each in (even, made)]
    assert f"{rows[0]} rows a pass instead of {rows[1]}" in note and rows[0] > rows[1]
    assert load_run_file(made.run_file).data.max_length == 8192  # and yet no row is left out


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        ([100] * 99 + [5000], 256),
        ([300] * 99 + [5000], 384),
        ([300] * 99 + [700], None),  # less than twice as long
        ([300] * 95 + [5000] * 5, None),  # more than a hundredth
        ([100] * 10 + [5000], None),  # too few to call one unusual
    ],
)
def test_what_is_far_longer_than_the_others(lengths: list[int], limit: int | None) -> None:
    look = DataLook(Sources([], [], [], 0, [], 0), lengths)
    assert usual_limit(look) == limit


def test_several_cards_are_pointed_at(
    tmp_path: Path, no_hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu("NVIDIA H200", 140 * GIB, 140 * GIB)
    machine = Machine(card, 64 * GIB, 60 * GIB, 900 * GIB, "store", gpus=2)
    monkeypatch.setattr("tuneserve.doctor._installed", {"torch": "2.13.0+cpu"}.get)
    monkeypatch.setattr("tuneserve.init.make.look", lambda *_, **__: machine)
    made = init_run([str(chats(tmp_path / "a.jsonl"))], tmp_path / "run.yaml")
    assert any("train.gpus: 2" in note for note in made.choice.notes)
    assert made.choice.notes[0].startswith("torch 2.13.0+cpu cannot use the NVIDIA H200: ")
    assert "rm -rf .venv; make venv ACCEL=cuda" in made.choice.notes[0]
    assert "predicted to take about " in made.run_file.read_text()  # the card's rate is known
    assert any(line.startswith("Time: about ") and " beside train" in line for line in made.found)


def test_a_model_too_large_for_the_card_is_refused(tmp_path: Path, no_hub: None) -> None:
    data = chats(tmp_path / "a.jsonl")
    with pytest.raises(OutOfMemory) as caught:
        init_run(
            [str(data)],
            tmp_path / "run.yaml",
            base="Qwen/Qwen2.5-7B-Instruct",
            gpu_memory_bytes=8 * GIB,
        )
    assert caught.value.exit_status == 3 and "--base" in caught.value.hint
    assert "evaluate needs" in caught.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_without_data_there_is_an_example(tmp_path: Path, local: Path) -> None:
    made = init_run([], tmp_path / "run.yaml", base=str(local))
    assert made.example == tmp_path / "chats.jsonl"
    rows = [json.loads(line) for line in made.example.read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert detect(row) == "messages"
        check(convert(row, "messages"))
    assert load_run_file(made.run_file).data.train == [str(tmp_path / "chats.jsonl")]
    made.example.write_text("mine")
    again = init_run([], tmp_path / "run.yaml", base=str(local), force=True)
    assert again.example is None and (tmp_path / "chats.jsonl").read_text() == "mine"


def test_broken_rows_are_named(tmp_path: Path, local: Path) -> None:
    made = init_run([str(TEMPLATES / "rejected.jsonl")], tmp_path / "run.yaml", base=str(local))
    assert made.look is not None and made.look.reasons["unknown_role"] >= 1
    [note] = [note for note in made.choice.notes if "max_rejected" in note]
    assert "rejected.jsonl:" in note


def test_too_little_data_is_said(tmp_path: Path, local: Path) -> None:
    data, out = chats(tmp_path / "a.jsonl", 3), tmp_path / "run.yaml"
    made = init_run([str(data)], out, base=str(local), gpu_memory_bytes=24 * GIB)
    assert any("min_calibration_tokens" in note for note in made.choice.notes)
    assert any("the gates need 8" in note for note in made.choice.notes)


def test_preference_pairs_are_refused(tmp_path: Path, local: Path) -> None:
    data = tmp_path / "dpo.jsonl"
    data.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(DataError, match="preference pairs"):
        init_run([str(data)], tmp_path / "run.yaml", base=str(local))
    assert not (tmp_path / "run.yaml").exists()


def test_the_files_beside_a_refused_one_are_named(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    chats(folder / "b.jsonl")
    chats(folder / "c.jsonl", answer="It is blue.")
    pair = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "z.jsonl"):
        (folder / name).write_text(pair)
        with pytest.raises(DataError, match="preference pairs") as caught:
            init_run(["all"], tmp_path / "run.yaml", base=str(local))
        assert caught.value.exit_status == 2
        assert caught.value.hint.endswith("that would do: all/b.jsonl all/c.jsonl")
        assert not (tmp_path / "run.yaml").exists()
    init_run(["all/b.jsonl", "all/c.jsonl"], tmp_path / "run.yaml", base=str(local))


def test_no_usable_row_is_refused(tmp_path: Path, local: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "bot", "content": "x"}]}) + "\n")
    with pytest.raises(DataError, match=r"none of 1 rows can be used(.|\n)*unknown_role"):
        init_run([str(data)], tmp_path / "run.yaml", base=str(local))


def test_a_silent_hub(tmp_path: Path, no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = chats(tmp_path / "a.jsonl")
    with pytest.raises(HubError) as caught:
        init_run([str(data)], tmp_path / "run.yaml", base="some/model")
    assert "--base a folder" in caught.value.hint and caught.value.exit_status == 5

    def refused(*_: Any, **__: Any) -> Path:
        raise HubRefused("gated")

    monkeypatch.setattr(base_module, "download", refused)
    with pytest.raises(HubRefused):
        init_run([str(data)], tmp_path / "run.yaml", base=SUGGESTED[0].name)
    with pytest.raises(ModelError, match="no such folder"):
        init_run([str(data)], tmp_path / "run.yaml", base="./nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_long_file_is_read_in_part_and_extrapolated(tmp_path: Path, no_hub: None) -> None:
    data = chats(tmp_path / "long.jsonl", 60_000)
    made = init_run([str(data)], tmp_path / "run.yaml", gpu_memory_bytes=24 * GIB)
    assert made.look is not None
    assert 20_000 <= made.look.rows_read < 30_000
    assert made.look.rows == pytest.approx(60_000, rel=0.03)
    assert load_run_file(made.run_file).train.epochs == 1


def test_the_command_prints_one_object(tmp_path: Path, local: Path) -> None:
    chats(tmp_path / "my chats.jsonl")
    command = [sys.executable, "-m", "tuneserve", "init", "my chats.jsonl", "--json"]
    done = subprocess.run(
        [*command, "--base", "base"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["run_file"] == "run.yaml" and found["data"]["distinct"] == 60
    assert found["plan"]["fits"] and found["next"][0] == "tuneserve validate run.yaml"
    run = load_run_file(tmp_path / "run.yaml")
    assert (run.data.train, run.model.base) == ([str(tmp_path / "my chats.jsonl")], str(local))


@pytest.mark.parametrize(
    "value",
    ["on", "1.0", "1e5", "a: b", "a #b", "-x", "\u00e9t\u00e9.jsonl", "", "null", "x:y",
     "builtin:a", ".5", ".inf", "s3://b/*.jsonl", "~/a", "a b", "a'b", '"',
     "{a", "[a]", "*.jsonl", "2026-01-01", "0x1f",
     2e-4, 1e-3, 0.05, 5, True, ["gptq"], {"r": 16, "alpha": 32}],
)  # fmt: skip
def test_yaml_gives_back_what_was_written(value: Any) -> None:
    assert yaml.safe_load(f"key: {_scalar(value)}   # comment")["key"] == value
