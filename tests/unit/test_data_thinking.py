"""Templates whose prompt opens the thinking, answers left out for their length, and BOS notes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

import data_bases as bases
from tuneserve.data.engine import Engine
from tuneserve.data.probe import examine
from tuneserve.data.readers import Block
from tuneserve.data.template import ChatTemplate
from tuneserve.data.worker import Result, Worker
from tuneserve.errors import ModelError

# As Qwen3-...-Thinking-2507 writes answers: thinking taken from its field or out of the content,
# shown in the last turn alone.
FIELDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"  # noqa: E501
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"  # noqa: E501
    "{% else %}{{ content }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# The content as it is, behind a prompt that opens the thinking.
PLAIN = bases.DEFAULT_SYSTEM.replace(
    "assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}"
)
PLAIN_LINE = PLAIN.replace("<think>'", "<think>\n'")
ALOUD = "<think>\nhm\n</think>\n\nfour"


def tokenizer() -> Tokenizer:
    """The tokens of thinking are whole, and no control tokens, as in Qwen3."""
    made = bases.byte_tokenizer()
    made.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")]
    )
    return made


def run(worker: Worker, *rows: Any) -> Result:
    """The result of a block of rows."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return worker(Block(0, "lines", 1, data, format="messages"))


def supervised(worker: Worker, result: Result) -> list[str]:
    """The supervised text of each row."""
    texts, begin = [], 0
    ids = [int.from_bytes(result.ids[at : at + 4], "little") for at in range(0, len(result.ids), 4)]
    for length in result.lengths:
        on = [ids[at] for at in range(begin, begin + length) if result.mask[at]]
        texts.append(worker.engine.tokenizer.decode(on, skip_special_tokens=False))
        begin += length
    return texts


def test_thinking_that_the_template_takes_from_its_field() -> None:
    worker = bases.make_worker(FIELDS, tokenizer=tokenizer())
    fields = bases.chat("two and two?", "four")
    fields["messages"][1]["reasoning_content"] = "hm"
    result = run(worker, fields, bases.chat("two and two?", ALOUD))
    assert not result.rejected, result.rejected
    # The prompt holds `<think>` and its line feed: the model begins behind them.
    assert supervised(worker, result) == ["hm\n</think>\n\nfour<|im_end|>"] * 2
    # One line feed ends the prompt, two that are one token would be in the row.
    result = run(worker, bases.chat("two and two?", "four"))
    assert [found["code"] for found in result.rejected] == ["prefix_mismatch"]


def test_thinking_over_several_turns_is_one_row_an_answer() -> None:
    worker = bases.make_worker(FIELDS, tokenizer=tokenizer())
    row = bases.chat("q1", "one", "q2", "two")
    for number, thought in ((1, "hm"), (3, "oh")):
        row["messages"][number]["reasoning_content"] = thought
    result = run(worker, row)
    assert supervised(worker, result) == [
        "hm\n</think>\n\none<|im_end|>",
        "oh\n</think>\n\ntwo<|im_end|>",
    ]


@pytest.mark.parametrize(("source", "cut"), [(PLAIN, "<think>"), (PLAIN_LINE, "<think>\n")])
def test_thinking_that_stands_in_the_content(source: str, cut: str) -> None:
    worker = bases.make_worker(source, tokenizer=tokenizer())
    assert worker.settings.opener == cut
    result = run(worker, bases.chat("two and two?", ALOUD))
    assert not result.rejected, result.rejected
    assert supervised(worker, result) == [ALOUD.removeprefix(cut) + "<|im_end|>"]
    # Other words than the content's are still no answer.
    frames = worker.supervisor.frames
    assert frames.fits("\nhm\n</think>\n\nfour<|im_end|>", ALOUD)
    assert not frames.fits("\nhm\n</think>\n\nfive<|im_end|>", ALOUD)
    assert not frames.fits("\nhm\n</think>\n\nfour<|im_end|>", "four")


def test_thinking_beside_a_call() -> None:
    worker = bases.make_worker(PLAIN, tokenizer=tokenizer())
    row = bases.chat("two and two?", ALOUD)
    row["messages"][1]["tool_calls"] = [{"function": {"name": "add", "arguments": "{}"}}]
    result = run(worker, row)
    assert not result.rejected, result.rejected
    assert supervised(worker, result)[0].startswith("\nhm\n</think>\n\nfour\n<tool_call>")


def test_templates_that_drop_all_thinking_are_still_refused() -> None:
    """QwQ's and DeepSeek R1's: the prompt opens what no answer goes on with."""
    source = PLAIN_LINE.replace("m['content'] +", "m['content'].split('</think>')[-1] +")
    with pytest.raises(ModelError, match="cannot be supervised: the prompt for an answer is not"):
        bases.make_worker(source, tokenizer=tokenizer())


def test_no_opener_where_the_prompt_has_none() -> None:
    for style in bases.STYLES:
        worker = bases.make_worker(style.source, stop=style.stop, bos=style.bos)
        assert worker.settings.opener == ""


def test_answers_that_are_left_out_are_counted() -> None:
    worker = bases.make_worker(bases.REWRITING, max_length=64)
    long = "word " * 100
    rows = [bases.chat("q1", "one", "q2", long), bases.chat("q1", "one", "q2", "two")]
    result = run(worker, *rows, bases.chat("q", "a", "q", long, "q", long))
    # Counted by hand: of 2, 2 and 3 answers, 1, 0 and 2 are too long.
    assert result.pieces == [1, 2, 1]
    assert result.warnings == [("answer_left_out", 1)] + [("answer_left_out", 3)] * 2


def test_a04_a_template_without_bos_is_said_where_the_tokenizer_adds_one() -> None:
    made = bases.byte_tokenizer()
    bos = made.token_to_id("<s>")
    template = ChatTemplate({"default": bases.CHATML}, {})

    def notes(template: ChatTemplate, bos_id: int | None = bos) -> str:
        engine = Engine(made.to_str(), stop_ids={4}, vocab_rows=10**6, bos_id=bos_id)
        return " ".join(examine(template, engine).notes)

    assert "BOS" not in notes(template)  # it has one, and never adds it
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)]),
        ]
    )
    assert "the template writes no BOS, although the tokenizer puts <s>" in notes(template)
    assert "BOS" not in notes(template, None)
    assert "no BOS" not in notes(ChatTemplate({"default": "{{ '<s>' }}" + bases.CHATML}, {}))
