"""Rows through six template styles: what is supervised, judged by readers of the templates."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_bases as bases
from tuneserve.data.class_labels import check_class_labels
from tuneserve.data.codes import CODES, RowError
from tuneserve.data.engine import Engine
from tuneserve.data.probe import examine
from tuneserve.data.readers import Block
from tuneserve.data.supervise import check_labels, check_range
from tuneserve.data.template import ChatTemplate
from tuneserve.data.worker import Result, Worker
from tuneserve.errors import DataError, ModelError

WORKERS: dict[str, Worker] = {}


def worker_of(style: Any, kind: str = "byte") -> Worker:
    """A worker per style and tokenizer, made once."""
    key = f"{style.name} {kind}"
    if key not in WORKERS:
        made = {"byte": bases.byte_tokenizer, "spaced": bases.spaced_tokenizer}
        tokenizer = bases.byte_tokenizer(nfc=True) if kind == "nfc" else made[kind]()
        WORKERS[key] = bases.make_worker(
            style.source, stop=style.stop, bos=style.bos, tokenizer=tokenizer
        )
    return WORKERS[key]


def run(worker: Worker, *rows: dict[str, Any]) -> Result:
    """Rows as one block."""
    raw = "\n".join(json.dumps(row) for row in rows).encode()
    return worker(Block(0, "lines", 1, raw, format="messages"))


def rows_of(result: Result) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask) per row."""
    ids = np.frombuffer(result.ids, dtype=np.int32)
    mask = np.frombuffer(result.mask, dtype=bool)
    edges = np.cumsum([0, *result.lengths])
    return [(ids[a:b].tolist(), mask[a:b].tolist()) for a, b in zip(edges, edges[1:], strict=False)]


def runs_of(worker: Worker, ids: list[int], mask: list[bool]) -> list[tuple[list[int], str]]:
    """(ids before, text) of each stretch of supervised tokens; a stretch ends with a stop token."""
    found, begin = [], None
    for at, on in enumerate(mask):
        if on and begin is None:
            begin = at
        if on and worker.engine.is_stop[ids[at]]:
            assert begin is not None
            text = worker.engine.tokenizer.decode(ids[begin : at + 1], skip_special_tokens=False)
            found.append((ids[:begin], text))
            begin = None
    assert begin is None, "a supervised stretch without its end token"
    return found


def rejected(worker: Worker, row: dict[str, Any]) -> str:
    """The code a lone row is rejected with; empty when it is kept."""
    result = run(worker, row)
    return str(result.rejected[0]["code"]) if result.rejected else ""


words = st.text(alphabet="abc xyz.,?\n\u00e9\u4e2d\U0001f600{}<|", min_size=1, max_size=24)


@pytest.mark.parametrize("kind", ["byte", "nfc"])
@pytest.mark.parametrize("style", bases.STYLES, ids=lambda style: style.name)
@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(words, min_size=1, max_size=3),
    weights=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_supervised_tokens_are_the_answers(
    style: Any, kind: str, texts: list[str], weights: list[bool]
) -> None:
    worker = worker_of(style, kind)
    turns: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        turns.append({"role": "user", "content": f"{number}? {text}"})
        # An answer that begins with white space may merge with the prompt: such rows are rejected
        # below.
        answer = f"A{number} {text}"
        turns.append({"role": "assistant", "content": answer, "weight": int(weights[number])})
    result = run(worker, {"messages": turns})
    answers = [i for i, turn in enumerate(turns) if turn.get("weight") == 1]
    if not answers:
        assert result.rejected[0]["code"] == "no_supervised_token"
        return
    assert not result.rejected, result.rejected
    plain = [{"role": t["role"], "content": t["content"]} for t in turns]
    template = ChatTemplate({"default": style.source}, {})
    found = [run for ids, mask in rows_of(result) for run in runs_of(worker, ids, mask)]
    # A conversation whose history is not rewritten is one row; else one row per answer.
    rewritten = style.rewrites and len(texts) > 1
    assert len(result.lengths) == (len(answers) if rewritten else 1)
    assert len(found) == len(answers)
    encode = worker.engine.tokenizer.encode
    for (before, text), number in zip(found, answers, strict=True):
        content = turns[number]["content"]
        wanted = style.before + (content.strip() if style.trims else content) + style.stop
        if kind == "nfc":
            import unicodedata

            wanted = unicodedata.normalize("NFC", wanted)
        assert text == wanted
        prompt = template.render(plain[:number], None, prompt=True)
        assert before == encode(prompt, add_special_tokens=False).ids
    for (ids, mask), line in zip(rows_of(result), result.messages, strict=True):
        # The messages beside the row render to its ids: what the server would be sent.
        sent = [{"role": m["role"], "content": m["content"]} for m in json.loads(line)["messages"]]
        full = template.render(sent, None, prompt=False)
        assert ids == encode(full, add_special_tokens=False).ids
        assert mask[0] is False and sum(mask) > 0


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="abc xyz.,?", min_size=1, max_size=20), min_size=1, max_size=3)
)
def test_tokenizers_that_are_not_byte_level(texts: list[str]) -> None:
    style = bases.STYLES[0]
    worker = worker_of(style, "spaced")
    rows = bases.chat(*[f"q{text}q" for pair in zip(texts, texts, strict=True) for text in pair])
    result = run(worker, rows)
    assert not result.rejected, result.rejected
    ((ids, mask),) = rows_of(result)
    found = [text for _, text in runs_of(worker, ids, mask)]
    assert [" ".join(text.split()) for text in found] == [
        " ".join(f"q{text}q<|im_end|>".split()) for text in texts
    ]
    assert rejected(worker, bases.chat("hello", "snow \u2603")) == "unknown_token"


@pytest.mark.parametrize("style", bases.STYLES, ids=lambda style: style.name)
def test_weight_zero_system_and_refusals(style: Any) -> None:
    worker = worker_of(style)
    with_system = bases.chat("hi there", "Yes, it is.", system="Be brief.")
    assert rejected(worker, with_system) == ("" if style.system else "bad_role_order")  # A07
    assert rejected(worker, bases.chat("hi", "ok", "more")) == "bad_role_order"
    two = {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "user")]}
    result = run(worker, two)
    assert result.rejected[0]["code"] == "bad_role_order"
    assert "user, assistant, user, user" in result.rejected[0]["message"]
    stolen = bases.chat(f"end{style.stop}now", "no")
    assert rejected(worker, stolen) == "control_token"
    result = run(worker, bases.chat("fine", "yes"), stolen, bases.chat("too", "yes"))
    assert result.lines == [1, 3]  # one bad row costs no other


def test_neutralized_rows_have_no_control_token_of_their_own() -> None:
    worker = bases.make_worker(bases.DEFAULT_SYSTEM, control_tokens="neutralize")
    result = run(worker, bases.chat("a<|im_end|>b", "c<|im_start|>d"), bases.chat("a", "c"))
    assert not result.rejected and result.rows_neutralized == 1
    (dirty, _), (clean, _) = rows_of(result)
    for token in ("<|im_start|>", "<|im_end|>"):
        id = worker.engine.tokenizer.token_to_id(token)
        assert dirty.count(id) == clean.count(id) == 3  # system, user, assistant
    assert "a< |im_end|>b" in result.messages[0]


def test_a01_nothing_supervised_after_truncation() -> None:
    row = bases.chat("word " * 200, "red")
    for policy, code in (("truncate", "no_supervised_token"), ("drop", "too_long")):
        worker = bases.make_worker(bases.DEFAULT_SYSTEM, max_length=64, too_long=policy)
        assert rejected(worker, row) == code
        assert CODES[code].level == "policy"
    worker = bases.make_worker(bases.DEFAULT_SYSTEM, max_length=64, too_long="truncate")
    result = run(worker, bases.chat("short", "word " * 200))
    assert result.lengths == [64] and result.warnings == [("truncated", 1)]  # A13: it does cut
    assert json.loads(result.messages[0])["truncated"] is True
    worker = bases.make_worker(bases.DEFAULT_SYSTEM, max_length=64, too_long="error")
    with pytest.raises(DataError, match=r"rows.jsonl:1: too_long: \d+ tokens"):
        run(worker, row)


def test_a02_ids_and_labels_in_range() -> None:
    for ids, at in (([3, 96, 97], 2), ([-1, 5], 0)):
        with pytest.raises(RowError, match=f"token {at} is {ids[at]}.* 0 to 96"):
            check_range(np.array(ids, dtype=np.int32), 97)
    for label in (97, -1, -101):
        with pytest.raises(RowError, match=f"label 1 is {label}.* 0 to 96"):
            check_labels(np.array([-100, label], dtype=np.int32), 97)
    check_range(np.array([0, 96], dtype=np.int32), 97)
    # Position 0 is never a target after the shift (A01's variant).
    assert check_labels(np.array([5, -100, -100], dtype=np.int32), 97) == 0
    assert check_labels(np.array([5, 96, -100, 0], dtype=np.int32), 97) == 2
    size = bases.byte_tokenizer().get_vocab_size()
    worker = bases.make_worker(bases.DEFAULT_SYSTEM, vocab_rows=size - 1)
    last = worker.engine.tokenizer.decode([size - 1])
    result = run(worker, bases.chat("x", f"the{last}"), bases.chat("7", "8"))
    assert [r["code"] for r in result.rejected] == ["id_out_of_range"] and result.lines == [2]


def test_a03_the_end_token_is_supervised_although_it_pads_too() -> None:
    worker = worker_of(bases.STYLES[4])
    ((ids, mask),) = rows_of(run(worker, bases.chat("q", "a1", "q", "a2")))
    end = worker.engine.tokenizer.token_to_id("<|im_end|>")
    ends = [at for at, id in enumerate(ids) if id == end]
    assert [mask[at] for at in ends] == [False, False, True, False, True]


def test_a04_bos() -> None:
    worker = worker_of(bases.STYLES[1])
    ((ids, _),) = rows_of(run(worker, bases.chat("q", "a")))
    bos = worker.engine.bos_id
    assert ids[0] == bos and ids.count(bos) == 1
    with pytest.raises(ModelError, match="two BOS"):
        bases.make_worker("{{ '<s>' }}" + bases.LLAMA3, stop="<|eot_id|>", bos="<s>")


def test_a06_a_boundary_inside_a_token_is_reported() -> None:
    # The tokenizer knows two line feeds as one token, so an answer that begins with one swallows
    # the prompt's.
    worker = worker_of(bases.STYLES[4])
    assert worker.engine.encode("\n\n").ids == [worker.engine.tokenizer.token_to_id("\u010a\u010a")]
    result = run(worker, bases.chat("q", "\nanswer"))
    assert result.rejected[0]["code"] == "prefix_mismatch"
    full = worker.engine.encode(
        worker.template.render(bases.chat("q", "\nanswer")["messages"], None, prompt=False)
    ).ids
    prompt = worker.engine.encode(
        worker.template.render(bases.chat("q")["messages"], None, prompt=True)
    ).ids
    first = next(i for i, (a, b) in enumerate(zip(full, prompt, strict=False)) if a != b)
    assert f"first index that differs is {first}" in result.rejected[0]["message"]


def test_a05_templates_that_cannot_be_supervised_are_refused() -> None:
    engine = Engine(bases.byte_tokenizer().to_str(), stop_ids={4}, vocab_rows=10**6, bos_id=None)
    for source, why in (
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "never stop"),
        ("{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}", "not show the answer"),
        ("{{ messages | length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
         "differ at character 0"),
        ("{{ raise_exception('no') }}", "it refuses"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=why):
            examine(ChatTemplate({"default": source}, {}), engine)
    # GPT-2's words: two line feeds are one token at the end of the prompt and two before a letter.
    with pytest.raises(ModelError, match="first index that differs is"):
        bases.make_worker(
            bases.LLAMA3, stop="<|eot_id|>", tokenizer=bases.byte_tokenizer(gpt2=True)
        )
    facts = examine(ChatTemplate({"default": bases.LLAMA3}, {}), engine)
    assert facts.extra_stop and facts.end_text == "<|eot_id|>"


def test_thinking_is_kept_in_the_last_answer_and_dropped_from_history() -> None:
    worker = worker_of(bases.STYLES[5])
    first, second = "<think>\nhm\n</think>\n\none", "<think>\noh\n</think>\n\ntwo"
    result = run(worker, bases.chat("q1", first, "q2", second))
    rows = rows_of(result)
    assert [runs_of(worker, *row)[0][1] for row in rows] == [
        first + "<|im_end|>",
        second + "<|im_end|>",
    ]
    text = worker.engine.tokenizer.decode(rows[1][0], skip_special_tokens=False)
    assert "hm" not in text and "one" in text
    assert result.pieces == [2] and len(json.loads(result.messages[0])["messages"]) == 2


def test_tools_are_rendered_as_the_server_renders_them() -> None:
    tool = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}
    turns = [
        {"role": "user", "content": "Is it on?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "lamp", "arguments": '{"n": 7, "id": "007"}'},
                }
            ],
        },
        {"role": "tool", "content": "on"},
        {"role": "assistant", "content": "It is on."},
    ]
    native = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.n }})"
        "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    worker = bases.make_worker(native)
    result = run(worker, {"messages": turns, "tools": [tool]})
    ((ids, mask),) = rows_of(result)
    # Arguments arrived as a string and were an object in the template, as vLLM has it.
    assert [text for _, text in runs_of(worker, ids, mask)] == [
        'lamp(7){"n": 7, "id": "007"}<|im_end|>',
        "It is on.<|im_end|>",
    ]
    sent = json.loads(result.messages[0])
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"n": 7, "id": "007"}'
    assert sent["messages"][2]["tool_call_id"] == sent["messages"][1]["tool_calls"][0]["id"]
    assert sent["tools"][0]["function"]["name"] == "lamp"
    # A template that knows no tools gets a prelude; conversations without tools render as before.
    plain = worker_of(bases.STYLES[4])
    result = run(plain, {"messages": turns, "tools": [tool]}, bases.chat("q", "a"))
    rows = rows_of(result)
    assert [text for _, text in runs_of(plain, *rows[0])] == [
        '<tool_call>\n{"name": "lamp", "arguments": {"n": 7, "id": "007"}}\n</tool_call><|im_end|>',
        "It is on.<|im_end|>",
    ]
    assert result.tool_rows == 1
    bare, both = plain.template, plain.tool_template
    for style_row in (bases.chat("q", "a"), bases.chat("q", "a", "b", "c", system="s")):
        messages = style_row["messages"]
        assert bare.render(messages, None, prompt=True) == both.render(messages, None, prompt=True)
    # Some templates print a call's id, and some write control tokens for each field of a tool.
    shows_ids = bases.make_worker(
        native.replace("{{ c.function.name", "{{ c.id }}{{ c.function.name")
    )
    assert not run(shows_ids, {"messages": turns, "tools": [tool]}).rejected
    forged = json.loads(json.dumps(turns))
    forged[1]["tool_calls"][0]["id"] = "c<|im_start|>"
    assert rejected(shows_ids, {"messages": forged, "tools": [tool]}) == "control_token"
    forged = json.loads(json.dumps(turns))
    forged[2]["tool_call_id"] = "<|im_end|>"
    assert rejected(shows_ids, {"messages": forged, "tools": [tool]}) == "control_token"
    fields = "{% for name in t.function.parameters.properties %}<|im_start|>{{ name }}{% endfor %}"
    many = bases.make_worker(
        native.replace("{{ tools | tojson }}", "{% for t in tools %}" + fields + "{% endfor %}")
    )
    parameters = {"type": "object", "properties": {"on": {}, "where": {}}}
    rich = {"type": "function", "function": {"name": "lamp", "parameters": parameters}}
    assert not run(many, {"messages": turns, "tools": [rich]}).rejected
    broken = json.loads(json.dumps(turns))
    broken[1]["tool_calls"][0]["function"]["arguments"] = "{n: 7}"
    assert rejected(plain, {"messages": broken, "tools": [tool]}) == "bad_tool_call"


def test_a16_class_labels() -> None:
    assert check_class_labels([0, 4, 4, 2], 5) == {0: 1, 4: 2, 2: 1}
    for values, code, what in (
        ([1, 2, 3, 4, 5], "class_label_range", "label 4 is 5, outside 0 to 4; labels seen: 1: 1"),
        ([0, -1], "class_label_range", "label 1 is -1"),
        (["3"], "class_label_type", "'3'"),
        ([3.0], "class_label_type", "3.0"),
        ([True], "class_label_type", "True"),
        ([float("nan")], "class_label_type", "nan"),
    ):
        with pytest.raises(RowError) as caught:
            check_class_labels(values, 5)
        assert caught.value.code == code and what in caught.value.message


def test_ids_spell_their_bytes_and_nothing_else() -> None:
    """Against the join of the tokens' bytes: short, long and multi-byte tokens, any change."""
    tokenizer = bases.byte_tokenizer()
    tokenizer.add_tokens(["a" * 9, "b" * 16, "c" * 17, "<a-very-long-added-token>"])
    engine = Engine(
        tokenizer.to_str(), stop_ids=set(), vocab_rows=tokenizer.get_vocab_size(), bos_id=None
    )
    assert engine.bytes_of is not None
    rng = random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(len(engine.bytes_of)) for _ in range(rng.randrange(8))]
        data = b"".join(engine.bytes_of[id] for id in ids)
        array = np.array(ids, np.int32)
        assert engine.spells(array, data)
        assert not engine.spells(array, data + b"a")
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            assert not engine.spells(array, bytes(changed))


def test_an_engine_in_a_worker_is_the_same_engine() -> None:
    tokenizer = bases.byte_tokenizer()
    engine = Engine(tokenizer.to_str(), stop_ids={3}, vocab_rows=300, bos_id=1)
    copy = pickle.loads(pickle.dumps(engine))
    assert copy.encode_batch(["one <|im_end|> two"]) == engine.encode_batch(["one <|im_end|> two"])
    assert copy.bytes_of == engine.bytes_of and copy.bos_id == 1
    assert copy.is_stop.tolist() == engine.is_stop.tolist()
