"""What would fail later is named before anything is spent, all of it at once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.plan.advice import _changes
from tuneserve.plan.arch import Arch, Linear, arch_from_config
from tuneserve.plan.checks import (
    QUANTIZABLE,
    exportable,
    known_to_fail,
    problems,
    target_linears,
    warnings,
    whole_linears,
)
from tuneserve.plan.machine import Machine
from tuneserve.plan.rows import DataShape, data_shape, data_shape_from_metrics
from tuneserve.quantize.checks import kernel_problems
from tuneserve.quantize.support import gptqmodel_types
from tuneserve.runfile import parse_run

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DATA = DataShape((900, 700, 500, *[400] * 5))
LONG = DataShape((400,) * 64)


def run(**changes: Any) -> RunFile:
    data = {"train": ["a"], **changes.pop("data", {})}
    quantize = {"group_size": 64, **changes.pop("quantize", {})}
    return parse_run(
        {"name": "t", "model": {"base": "b"}, "data": data, "quantize": quantize, **changes}
    )


def arch(**changes: Any) -> Arch:
    return arch_from_config({**SMOLLM2, **changes})


def found(
    run_file: RunFile, model: Arch | None = None, data: DataShape | None = DATA, gpu: bool = True
) -> list[str]:
    return problems(run_file, model or arch(), data, gpu=gpu)


def lora(*targets: str, **more: Any) -> dict[str, Any]:
    return {"lora": {"target_modules": list(targets), **more}}


def test_a_good_run_has_no_problem() -> None:
    assert found(run()) == []
    assert found(run(), gpu=False) == []


def test_group_size_must_divide_every_quantized_layer() -> None:
    """D03: SmolLM2's 576 inputs are no multiple of 128."""
    [problem] = found(run(quantize={"group_size": 128}))
    assert problem.startswith("quantize.group_size: 128")
    assert "q_proj (576)" in problem and "down_proj" not in problem
    assert problem.endswith("use 64 or 32 or -1")
    assert found(run(quantize={"group_size": -1})) == []
    assert found(run(quantize={"group_size": 128, "methods": ["none"]})) == []


def test_every_target_name_must_match() -> None:
    """B02: one wrong name among right ones."""
    [problem] = found(run(train=lora("q_proj", "query")))
    assert "query matches no linear layer" in problem
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in problem
    assert found(run(train=lora("q_proj", "self_attn.v_proj"))) == []
    with pytest.raises(RunFileError, match="train.lora.target_modules: is empty"):
        run(train=lora())


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_adapter_on_a_tied_head(name: str) -> None:
    """C03: an adapter on one of two tied tensors would change both."""
    [problem] = found(run(train=lora("q_proj", name)))
    assert f"{name} is tied" in problem


def test_adapter_on_an_untied_head() -> None:
    [problem] = found(run(train=lora("lm_head")), arch(tie_word_embeddings=False))
    assert "modules_to_save" in problem


def test_modules_trained_whole_must_exist() -> None:
    [problem] = found(run(train=lora("q_proj", modules_to_save=["embed", "lm_head", "norm"])))
    assert "embed is no module" in problem


def test_a_quantized_layer_is_not_trained_whole() -> None:
    whole = {"modules_to_save": ["q_proj", "norm"]}
    [problem] = found(run(train=lora("v_proj", **whole)))
    assert problem.startswith("train.lora.modules_to_save: q_proj is quantized")
    assert found(run(train={**lora("v_proj", **whole), "method": "lora"})) == []


def test_no_layer_is_trained_whole_and_by_an_adapter() -> None:
    """PEFT would leave the adapter out in silence, or refuse when nothing else has one."""
    both = {**lora("q_proj", "v_proj", modules_to_save=["q_proj"]), "method": "lora"}
    [problem] = found(run(train=both))
    assert problem.startswith("train.lora.target_modules: q_proj is in modules_to_save as well")
    every = {"lora": {"modules_to_save": ["q_proj"]}, "method": "lora"}  # all others, that is
    assert found(run(train=every)) == []
    inner = {**lora("self_attn.q_proj", modules_to_save=["q_proj"]), "method": "lora"}
    assert len(found(run(train=inner))) == 1


def test_one_layer_is_trained_whole_and_the_others_by_adapters() -> None:
    one = ["layers.3.self_attn.q_proj", "layers.5.self_attn.q_proj"]
    some = run(train={**lora("q_proj", modules_to_save=one), "method": "lora"})
    assert found(some) == []
    [whole] = whole_linears(some, arch())
    every = run(train={"lora": {"modules_to_save": [*one, "q_proj"]}, "method": "lora"})
    [all_of_them] = whole_linears(every, arch())
    assert (whole.count, all_of_them.count) == (2, arch().layers)


def test_advice_of_later_stages_stays_within_what_the_run_file_takes() -> None:
    few = run(quantize={"calibration_rows": 3, "calibration_max_tokens": 31})
    machine, values = Machine(None, 1, 1, 1, ""), {}
    for stage in ("quantize", "serve"):
        values |= {field: found for field, found, _ in _changes(few, stage, machine, 70)}
    assert values["quantize.calibration_rows"] == [1]
    assert values["quantize.calibration_max_tokens"] == []
    assert values["serve.max_model_len"] == [35, 17]


def test_lengths_within_the_context() -> None:
    """A13: a guard from the config, not from an exception."""
    texts = found(run(data={"max_length": 9000}, serve={"max_model_len": 10000}))
    assert [text.split(":")[0] for text in texts] == ["data.max_length", "serve.max_model_len"]
    [short] = found(run(serve={"max_model_len": 512}))
    assert "900 tokens" in short


def test_the_best_adapter_needs_held_out_rows() -> None:
    """Without them there is nothing to choose by, and the last one would be kept in silence."""
    best = {"keep": "best", "eval_steps": 5}
    [problem] = found(run(train=best, data={"eval_fraction": 0}))
    assert problem.startswith("train.keep: best chooses by held-out rows")
    assert found(run(train=best)) == []
    assert found(run(train=best, data={"eval_fraction": 0, "eval": ["e.jsonl"]})) == []


def test_unknown_architecture() -> None:
    """D07: said before training, unless 16 bits are allowed as well."""
    novel = arch(model_type="novel")
    [problem] = found(run(), novel)
    assert "'novel' is not one that GPTQModel quantizes" in problem
    assert problem.endswith("or add none to quantize.methods")
    laddered = run(quantize={"methods": ["gptq", "none"]})
    assert found(laddered, novel) == []
    assert any("16 bits" in text for text in warnings(laddered, novel, DATA, gpu=True))


def test_routers_are_not_quantized_and_may_have_any_size() -> None:
    """Qwen2-MoE chooses among 60 experts, and whether to ask the shared one."""
    linears = (
        *arch().linears,
        Linear("gate", 576, 60, 30),
        Linear("shared_expert_gate", 576, 1, 30),
    )
    experts = replace(arch(), linears=linears)
    assert found(run(), experts) == []
    odd = replace(arch(), linears=(*linears, Linear("up_proj", 576, 60, 30)))
    assert "which up_proj (576 to 60) are not" in found(run(), odd)[0]


@pytest.mark.parametrize("gpu", [True, False])
def test_kernel_sizes(gpu: bool) -> None:
    """The rule that `preflight` has, on any device: it refuses the export otherwise."""
    narrow = arch(intermediate_size=1520)
    [problem] = found(run(quantize={"group_size": -1}), narrow, gpu=gpu)
    assert "divisible by 32" in problem and "up_proj (576 to 1520)" in problem
    assert "q_proj" not in problem
    assert found(run(quantize={"methods": ["none"]}), narrow, gpu=gpu) == []
    assert kernel_problems({"layers.0.up_proj": (1520, 576)})
    assert problem.endswith("or add none to quantize.methods")
    assert [problem] == found(run(quantize={"group_size": 64}), narrow, gpu=gpu)  # no size helps
    laddered = run(quantize={"methods": ["gptq", "none"]})
    assert found(laddered, narrow, gpu=gpu) == []  # it ends in 16 bits
    [warned] = warnings(laddered, narrow, LONG, gpu=gpu)
    assert "up_proj (576 to 1520)" in warned and warned.endswith("served in 16 bits")


@pytest.mark.parametrize(
    ("lengths", "words", "lower"),
    [
        ((40, 30), "2 rows with 70 tokens", False),
        ((500,) * 7, "7 rows", False),
        ((5,) * 300, "0 rows", False),
        ((20,) * 20, "20 rows with 400 tokens", True),  # only tokens are lacking
    ],
)
def test_too_little_calibration(lengths: tuple[int, ...], words: str, lower: bool) -> None:
    """D01: fewer rows or tokens than the export will ask for."""
    [problem] = found(run(), data=DataShape(lengths))
    assert problem.startswith("quantize.methods: ") and words in problem
    assert found(run(quantize={"methods": ["none"]}), data=DataShape(lengths)) == []
    assert problem.endswith("or add none to quantize.methods")
    assert ("; add data, lower quantize.min_calibration_tokens, or" in problem) == lower
    laddered = run(quantize={"methods": ["gptq", "none"]})
    assert found(laddered, data=DataShape(lengths)) == []
    said = warnings(laddered, arch(), DataShape(lengths), gpu=True)
    assert any(words in text and text.endswith("served in 16 bits") for text in said)


def test_families_and_methods() -> None:
    """D07: what GPTQModel exports of a family, and by which method."""
    assert QUANTIZABLE <= gptqmodel_types()
    for family, reason in (
        ("mixtral", "experts"), ("gpt2", "transposed"), ("phi3", "fused"), ("gemma3", "nested"),
    ):  # fmt: skip
        [problem] = found(run(), arch(model_type=family))
        assert f"{family} cannot be exported by gptq: " in problem and reason in problem
        assert problem.endswith("or add none to quantize.methods")
    untried = arch(model_type="qwen3_moe")  # GPTQModel lists it, and no test exports it
    assert found(run(), untried) == [] and not exportable(untried)
    said = warnings(run(), untried, DATA, gpu=True)
    assert any("no 4-bit export of qwen3_moe was tested here" in text for text in said)
    gemma = arch(model_type="gemma3_text")
    assert found(run(quantize={"methods": ["gptq"]}), gemma) == []
    [problem] = found(run(quantize={"methods": ["awq"]}), gemma)
    assert "gemma3_text cannot be exported by awq" in problem
    assert problem.endswith("take gptq, or add none to quantize.methods")
    ladder = run(quantize={"methods": ["gptq", "awq"]})
    assert found(ladder, gemma) == []
    said = warnings(ladder, gemma, DATA, gpu=True)
    assert any("by awq: " in text and "the others are tried" in text for text in said)
    seeing = arch(model_type="gemma3_text", architectures=["Gemma3ForConditionalGeneration"])
    assert "Gemma3ForConditionalGeneration cannot be exported" in found(run(), seeing)[0]


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """An interpreter with a GPTQModel and a vLLM of its own, which know novel and little else."""
    for file, text in (
        ("gptqmodel/models/auto.py", "MODEL_MAP = {'novel': 1}\n"),
        ("vllm/model_executor/models/registry.py", "_TEXT_GENERATION_MODELS = {'Novel': 1}\n"),
    ):
        path = tmp_path / "site" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        (tmp_path / "site" / file.split("/")[0] / "__init__.py").write_text("raise SystemExit(1)")
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho asked >> {tmp_path}/asked\n"
        f'PYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_the_interpreters_that_export_and_serve_are_asked_what_they_know(
    other_python: str, tmp_path: Path
) -> None:
    novel = arch(model_type="novel", architectures=["Novel"])
    elsewhere = {"quantize": {"python": other_python}, "serve": {"python": other_python}}
    [problem] = found(run(), novel)  # by what is installed here
    assert "not one that GPTQModel quantizes" in problem and "not one that vLLM serves" in problem
    for _ in range(3):
        assert found(run(engines=elsewhere), novel) == []
    assert (tmp_path / "asked").read_text().count("asked") == 2, "once for each package"
    said = warnings(run(engines=elsewhere), novel, DATA, gpu=True)
    assert not any(text.startswith("engines.") for text in said)
    llama = arch(model_type="llama", architectures=["LlamaForCausalLM"])
    [problem] = found(run(engines=elsewhere), llama)
    assert f"'llama' is not one that GPTQModel of {other_python} quantizes" in problem
    assert f"LlamaForCausalLM is not one that vLLM of {other_python} serves" in problem
    assert known_to_fail(novel, "gptq") == ""  # the export asks


@pytest.mark.parametrize("how", ["missing", "fails", "has neither"])
def test_an_interpreter_that_does_not_tell_fails_no_plan(how: str, tmp_path: Path) -> None:
    program = tmp_path / "python"
    if how != "missing":
        code = "exit 3" if how == "fails" else f'exec {sys.executable} -S "$@"'
        program.write_text(f"#!/bin/sh\n{code}\n")
        program.chmod(0o755)
    engines = {"quantize": {"python": str(program)}, "serve": {"python": str(program)}}
    novel = arch(model_type="novel", architectures=["Novel"])
    assert found(run(engines=engines), novel) == []
    said = warnings(run(engines=engines), novel, DATA, gpu=True)
    assert f"engines.quantize.python: {program} does not say which families it quantizes" in str(
        said
    )


def test_tool_calls_need_a_parser() -> None:
    """E08."""
    tools = DataShape(DATA.lengths, has_tool_calls=True)
    [problem] = found(run(), data=tools)
    assert problem.startswith("serve.tool_parser")
    assert found(run(serve={"tool_parser": "hermes"}), data=tools) == []


def test_attention_kernel_that_is_not_there() -> None:
    [problem] = found(run(train={"attention": "flash_attention_2"}), gpu=False)
    assert "needs a GPU" in problem


def test_families_without_attention_by_sdpa_or_without_nf4() -> None:
    """They would be refused when the base is loaded; of Falcon nothing would be quantized."""
    sixteen = {"quantize": {"methods": ["none"]}}
    gptj = arch(model_type="gptj")
    [problem] = found(run(**sixteen), gptj)
    assert problem == "train.attention: gptj has no attention by sdpa; set it to eager"
    assert found(run(train={"attention": "eager"}, **sixteen), gptj) == []
    falcon = arch(model_type="falcon")
    [problem] = found(run(**sixteen), falcon)
    assert problem.startswith("train.method: qlora quantizes nothing of falcon")
    assert found(run(train={"method": "lora"}, **sixteen), falcon) == []


def test_what_chooses_among_experts_may_be_trained_whole() -> None:
    """It is no linear layer, so that it takes no adapter, but PEFT copies any module."""
    mixtral = arch(model_type="mixtral", num_local_experts=4)
    whole = run(train=lora("q_proj", modules_to_save=["gate"]), quantize={"methods": ["none"]})
    assert found(whole, mixtral) == []
    [problem] = found(whole)
    assert "gate is no module of this model" in problem
    [problem] = found(run(train=lora("gate"), quantize={"methods": ["none"]}), mixtral)
    assert "gate matches no linear layer" in problem


def test_names_in_a_family_that_is_not_known_are_left_to_the_training() -> None:
    """Its layers are a guess, and a right name would be refused."""
    sixteen = run(train=lora("in_proj", modules_to_save=["mixer"]), quantize={"methods": ["none"]})
    assert found(sixteen, arch(model_type="novel")) == []
    assert len(found(sixteen)) == 2


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"mlflow", "tensorboardX"}
    monkeypatch.setattr("tuneserve.train.trackers.find_spec", lambda name: name in there or None)
    train = {"report_to": ["tensorboard", "mlflow", "wandb"]}
    [problem] = found(run(train=train))
    assert problem.startswith("train.report_to: wandb is not installed")
    assert "pip install wandb" in problem
    assert found(run(train=train, engines={"train": {"python": "/opt/python"}})) == []


def test_all_problems_at_once() -> None:
    bad = run(train=lora("query"), data={"max_length": 9000}, quantize={"group_size": 128})
    assert len(found(bad, data=None)) == 3


def test_targets() -> None:
    assert len(target_linears(run(), arch())) == 7
    chosen = target_linears(run(train=lora("q_proj", "mlp.up_proj")), arch())
    assert [linear.name for linear in chosen] == ["q_proj", "up_proj"]


def test_few_rows_are_said() -> None:
    assert any("8 training rows" in text for text in warnings(run(), arch(), DATA, gpu=True))


def test_data_shape_of_an_artifact(tmp_path: Path) -> None:
    rows = pyarrow.table({"input_ids": [[1, 2], [1, 2, 3], [4]]})
    pyarrow.parquet.write_table(rows, tmp_path / "train.parquet")
    messages = tmp_path / "train_messages.jsonl"
    messages.write_text('{"messages": [{"role": "user", "content": "a \\"tool"}], "tools": null}\n')
    assert data_shape(tmp_path) == DataShape((3, 2, 1), False)
    messages.write_text('{"messages": [], "tools": [{"type": "function"}]}\n')
    assert data_shape(tmp_path).has_tool_calls
    messages.write_text(
        '{"messages": [{"role": "assistant", "tool_calls": [{}]}], "tools": null}\n'
    )
    assert data_shape(tmp_path).has_tool_calls


def test_data_shape_from_metrics() -> None:
    assert data_shape_from_metrics(None) is None
    assert data_shape_from_metrics({"rows_kept": 3}) is None
    shape = data_shape_from_metrics({"lengths": [2, 9], "has_tool_calls": True})
    assert shape == DataShape((9, 2), True)
