"""Tiny tokenizers, chat templates of six styles, and base folders made without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tuneserve.data.engine import Engine
from tuneserve.data.probe import add_tools, examine
from tuneserve.data.template import ChatTemplate
from tuneserve.data.worker import Settings, Worker
from tuneserve.runfile import parse_run
from tuneserve.stages import StageContext

SPECIALS = [
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip
# Line feeds close a word, as in the tokenizers of Llama 3 and Qwen.
WORDS = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = [
    "The quick brown fox jumps over the lazy dog and the red lamp.",
    "What colour is the lamp? The lamp is red, the kettle is blue.",
    "user assistant system model tool [INST] [/INST] <think> </think>\n\n",
    '<tool_call> {"name": "arguments"} </tool_call>',
] * 10

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"  # noqa: E501
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"  # noqa: E501
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"  # noqa: E501
    " if '</think>' in m.content else '' %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' + answer }}{% else %}{{ answer }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """A template style, with what a reader of the template expects around an answer."""

    name: str
    source: str
    stop: str
    before: str = ""
    system: bool = True
    trims: bool = False
    rewrites: bool = False
    bos: str | None = None


STYLES = [
    Style("chatml", CHATML, "<|im_end|>"),
    Style("llama3", LLAMA3, "<|eot_id|>", trims=True, bos="<s>"),
    Style("mistral", MISTRAL, "</s>", before=" ", system=False, bos="<s>"),
    Style("gemma", GEMMA, "<end_of_turn>", system=False, trims=True, bos="<s>"),
    Style("default_system", DEFAULT_SYSTEM, "<|im_end|>"),
    Style("rewriting", REWRITING, "<|im_end|>", before="<think>\n\n</think>\n\n", rewrites=True),
]


def byte_tokenizer(*, nfc: bool = False, gpt2: bool = False) -> Tokenizer:
    """A byte-level BPE with 10 control tokens, whose words end at line feeds unless `gpt2`."""
    made = Tokenizer(models.BPE())
    if nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if gpt2
        else pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def spaced_tokenizer() -> Tokenizer:
    """A BPE that writes spaces as a letter, like SentencePiece; unknown letters are <unk>."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    made.train_from_iterator([*TEXT, "abcdefghijklmnopqrstuvwxyz\nABCDEFGHIJKLMNOPQRSTUVWXYZ.,?0123456789"] * 3, trainer)  # fmt: skip  # noqa: E501
    return made


def make_worker(
    source: str,
    *,
    stop: str = "<|im_end|>",
    bos: str | None = None,
    tokenizer: Tokenizer | None = None,
    vocab_rows: int | None = None,
    **settings: Any,
) -> Worker:
    """A worker as the stage makes it, from a template and a tokenizer."""
    tokenizer = tokenizer or byte_tokenizer()
    size = tokenizer.get_vocab_size()
    bos_id = tokenizer.token_to_id(bos) if bos else None
    stops = frozenset({tokenizer.token_to_id(stop)})
    template = ChatTemplate({"default": source}, {"eos_token": stop})
    engine = Engine(
        tokenizer.to_str(), stop_ids=set(stops), vocab_rows=vocab_rows or size, bos_id=bos_id
    )
    facts = examine(template, engine)
    options: dict[str, Any] = {
        "max_length": 1024,
        "too_long": "drop",
        "control_tokens": "reject",
        "system": None,
        "files": ("rows.jsonl",),
        **settings,
    }
    return Worker(
        Settings(
            sources=template.sources,
            tool_sources=(add_tools(template) or template).sources,
            variables=template.variables,
            vocab_rows=engine.vocab_rows,
            frames=frozenset(facts.frames.around),
            opener=facts.frames.opener,
            **options,
        ),
        engine,
    )


def make_base(
    folder: Path,
    *,
    source: str | None = DEFAULT_SYSTEM,
    stop: str = "<|im_end|>",
    bos: str | None = None,
    context: int = 512,
    vocab_rows: int | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """A folder with a tokenizer, a config and an embedding: all that the gate reads."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = vocab_rows or tokenizer.get_vocab_size()
    config = {"model_type": "llama", "vocab_size": rows, "max_position_embeddings": context}
    config["tie_word_embeddings"] = True  # there is no head
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"eos_token": stop, "pad_token": stop, **({"bos_token": bos} if bos else {})}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    )
    if source is not None:
        (folder / "chat_template.jinja").write_text(source)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    weights = {"model.embed_tokens.weight": np.zeros((rows, 4), dtype=np.float16)}
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def make_context(
    tmp_path: Path,
    base: Path,
    train: list[Path] | list[str],
    *,
    hints: dict[str, Any] | None = None,
    chat_template: Path | None = None,
    **data: Any,
) -> StageContext:
    """A context with empty `out` and `work` folders."""
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    run = parse_run(
        {
            "name": "gate",
            "model": {
                "base": str(base),
                "chat_template": str(chat_template) if chat_template else None,
            },
            "data": {"train": [str(path) for path in train], "max_length": 512, **data},
        }
    )
    return StageContext(run, base, {}, out, work, hints=hints or {})


def chat(*texts: str, system: str | None = None) -> dict[str, Any]:
    """A row whose turns alternate user and assistant."""
    turns = [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(texts)
    ]
    if system:
        turns.insert(0, {"role": "system", "content": system})
    return {"messages": turns}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load_tokenizer_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's child does its work in this process: importing transformers takes seconds."""
    from tuneserve.data import prepare, tokenizer_child

    class Here:
        """Stands for the child process."""

        returncode = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            self.command = command

        def communicate(self, timeout: float | None = None) -> tuple[str, str]:
            """Do the child's work here."""
            asked = json.loads(Path(self.command[-2]).read_text())
            Path(self.command[-1]).write_text(json.dumps(tokenizer_child.prepare(asked)))
            return "", ""

        def kill(self) -> None:
            """Nothing runs."""

    monkeypatch.setattr(prepare.subprocess, "Popen", Here)
