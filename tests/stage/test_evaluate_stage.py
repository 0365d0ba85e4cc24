"""Held-out losses of base, adapter and merged model, against numbers worked out another way."""

from __future__ import annotations

import itertools
import json
import logging
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from train_rows import IGNORED, make_context, pico_dataset, write_rows
from tuneserve.artifacts import Artifact
from tuneserve.evaluate import answers
from tuneserve.evaluate.stage import run
from tuneserve.lm.rows import read_rows as read_token_rows
from tuneserve.release.heldout import read_rows
from tuneserve.release.judging import rows_to_score
from tuneserve.stages import StageContext
from tuneserve.train.stage import run as train

pytestmark = pytest.mark.usefixtures("one_thread", "float32")

TRAIN = {"effective_batch": 4, "max_steps": 8, "learning_rate": 4e-3}


@pytest.fixture(scope="module")
def evaluated(
    tmp_path_factory: pytest.TempPathFactory, pico_model: Path, float32: None
) -> tuple[StageContext, dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluate")
    dataset = pico_dataset(folder / "dataset", pico_model)
    trained = make_context(folder / "train", pico_model, {"dataset": dataset}, TRAIN)
    metrics = train(trained)
    merged = merged_by_peft(pico_model, trained.out, folder / "merged")
    inputs = {"dataset": dataset, "adapter": Artifact("a", trained.out, {}), "merged": merged}
    context = make_context(folder / "evaluate", pico_model, inputs, TRAIN, gates={"eval_rows": 6})
    return context, run(context), metrics


def merged_by_peft(base: Path, adapter: Path, folder: Path) -> Artifact:
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
    return Artifact("m", folder, {})


def full_logits_losses(folder: Path, dataset: Path, rows: int) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sums = []
    for row in pq.read_table(dataset / "eval.parquet").to_pylist()[:rows]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        sums.append(
            float(
                torch.nn.functional.cross_entropy(
                    logits, labels, ignore_index=IGNORED, reduction="sum"
                )
            )
        )
    return sums


def test_losses_equal_those_of_full_logits(
    evaluated: tuple[StageContext, dict[str, Any], dict[str, Any]],
) -> None:
    context, metrics, _ = evaluated
    dataset = context.inputs["dataset"].path
    losses = json.loads((context.out / "losses.json").read_text())
    assert context.base is not None
    folders = {"base": context.base, "merged": context.inputs["merged"].path}
    for name, folder in folders.items():
        expected = full_logits_losses(folder, dataset, 6)
        assert losses["per_row"][name] == pytest.approx(expected, rel=1e-4)
        mean = sum(expected) / losses["supervised_tokens"]
        assert losses[name] == metrics[f"{name}_loss"] == pytest.approx(mean, rel=1e-4)
    assert losses["rows"] == metrics["rows"] == 6
    assert (context.out / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert sum(losses["per_row"]["supervised_tokens"]) == losses["supervised_tokens"]
    assert losses["per_row"]["source"] == [f"eval.jsonl:{i}" for i in range(1, 7)]


def test_answers_are_tried_behind_other_questions(
    evaluated: tuple[StageContext, dict[str, Any], dict[str, Any]],
) -> None:
    from transformers import AutoModelForCausalLM

    context = evaluated[0]
    tried = json.loads((context.out / "losses.json").read_text())["per_row"]["questions"]
    table = pq.read_table(context.inputs["dataset"].path / "eval.parquet").to_pylist()[:6]
    rows = {row["source"]: row for row in table}
    longest = max(len(row["input_ids"]) for row in table)

    def split(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """What comes before the longest answer, and that answer with its end token."""
        answers, begin = [], 0
        for marked, run_of in itertools.groupby(row["labels"], lambda label: label != IGNORED):
            end = begin + len(list(run_of))
            answers += [(begin, end)] if marked else []
            begin = end
        begin, end = max(answers, key=lambda answer: answer[1] - answer[0])
        return row["input_ids"][:begin], row["input_ids"][begin:end]

    def nats(model: Any, before: list[int], answer: list[int]) -> Any:
        before = before[max(0, len(before) + len(answer) - longest) :]
        with torch.no_grad():
            scores = model(torch.tensor([before + answer])).logits[0].log_softmax(-1)
        found = -sum(float(scores[len(before) + at - 1, t]) for at, t in enumerate(answer))
        return pytest.approx(found, rel=1e-3, abs=1e-3)

    assert context.base is not None
    assert tried["source"] == list(rows)
    for name, folder in (("base", context.base), ("merged", context.inputs["merged"].path)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = zip(tried["source"], tried[name]["own"], tried[name]["other"], strict=True)
        for source, own, other in found:
            before, answer = split(rows[source])
            assert own == nats(model, before, answer)
            others = [split(row) for at, row in rows.items() if at != source]
            assert any(other == nats(model, b, answer) for b, a in others if a != answer)


def test_the_adapter_is_measured_on_the_base_it_was_trained_on(
    evaluated: tuple[StageContext, dict[str, Any], dict[str, Any]],
) -> None:
    context, metrics, _ = evaluated
    assert metrics["adapter_loss"] < 0.8 * metrics["base_loss"]
    assert metrics["adapter_loss"] != metrics["merged_loss"]  # NF4 against 16 bits
    whole = replace(context, run=context.run.model_copy(update={"gates": _all_rows(context)}))
    assert run(whole)["adapter_loss"] == pytest.approx(evaluated[2]["eval_loss"], rel=1e-5)


def _all_rows(context: StageContext) -> Any:
    return context.run.gates.model_copy(update={"eval_rows": 64})


def test_the_base_answers_the_first_questions(
    evaluated: tuple[StageContext, dict[str, Any], dict[str, Any]],
) -> None:
    context = evaluated[0]
    lines = (context.out / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    chats = [
        json.loads(line)
        for line in (context.inputs["dataset"].path / "eval_messages.jsonl").read_text().split("\n")
        if line
    ]
    assert [s["source"] for s in samples] == [c["source"] for c in chats[:4]]
    for sample, chat in zip(samples, chats, strict=False):
        assert sample["messages"] == chat["messages"][:1]
        assert sample["reference"] == chat["messages"][1]["content"]
        # The pico model knows its world; what it lacks is the habit.
        assert f"Aye! {sample['base']}" == sample["reference"]


def test_rows_are_of_as_many_conversations_as_there_are(
    tmp_path: Path,
    evaluated: tuple[StageContext, dict[str, Any], dict[str, Any]],
    pico_model: Path,
) -> None:
    """The first is five rows, one for each of its answers; six rows are measured of three."""
    dataset = pico_dataset(tmp_path / "dataset", pico_model)
    table = pq.read_table(dataset.path / "eval.parquet").to_pylist()
    sources = ["a", "a", "a", "a", "a", "b", "c", "c"]
    write_rows(
        dataset.path / "eval.parquet", [(r["input_ids"], r["labels"]) for r in table], "eval"
    )
    named = pq.read_table(dataset.path / "eval.parquet").drop_columns("source")
    pq.write_table(named.append_column("source", [sources]), dataset.path / "eval.parquet")
    lines = (dataset.path / "eval_messages.jsonl").read_text().splitlines()
    chats = [{**json.loads(line), "source": s} for line, s in zip(lines, sources, strict=True)]
    text = "".join(f"{json.dumps(chat)}\n" for chat in chats)
    (dataset.path / "eval_messages.jsonl").write_text(text)
    inputs = {**evaluated[0].inputs, "dataset": dataset}
    for count, expected in ((3, ["a", "b", "c"]), (6, ["a", "a", "a", "b", "c", "c"])):
        folder = tmp_path / f"evaluate-{count}"
        context = make_context(folder, pico_model, inputs, TRAIN, gates={"eval_rows": count})
        run(context)
        losses = json.loads((context.out / "losses.json").read_text())
        assert losses["per_row"]["source"] == expected
        rows, _ = read_rows(dataset.path)
        measured = rows_to_score(rows, True, context.out, context.run.gates)
        assert [row.source for row in measured] == expected
        counts = losses["per_row"]["supervised_tokens"]
        assert [len(row.supervised) for row in measured] == counts


def test_every_tool_call_is_asked_wherever_it_stands(pico_model: Path, tmp_path: Path) -> None:
    """Six of the seven example chats call tools; all of them end in prose, one calls twice."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pico_model)
    chats = tool_chats()
    encoded = [_with_tools(tokenizer, chat["messages"], chat["tools"]) for chat in chats]
    dataset = pico_dataset(tmp_path / "dataset", pico_model, rows=1)
    write_rows(dataset.path / "eval.parquet", encoded, "eval")
    rows = read_token_rows(dataset.path / "eval.parquet")
    calls = [
        (at, number)
        for at, chat in enumerate(chats)
        for number, message in enumerate(chat["messages"])
        if message.get("tool_calls")
    ]
    assert len(calls) == 7 and len({at for at, _ in calls}) == 6
    found = answers.structured_rows(rows, dataset.path, 16)
    assert [entry["kind"] for entry in found] == ["tool_call"] * 7
    assert [entry["row"] for entry in found] == [at for at, _ in calls]
    for entry, (at, number) in zip(found, calls, strict=True):
        before = chats[at]["messages"][:number]
        assert entry["prompt"] == tokenizer.apply_chat_template(
            before, tools=chats[at]["tools"], add_generation_prompt=True, return_dict=False
        )
        assert entry["start"] == len(entry["prompt"])
    few = answers.structured_rows(rows, dataset.path, 6)
    assert len({entry["source"] for entry in few}) == 6  # each chat before one a second time


def test_calls_are_recognized_by_special_tokens_and_by_the_chats_tools(
    pico_model: Path, tmp_path: Path
) -> None:
    """Llama 4 marks Python calls by tokens that a client never sees; Llama 3.2 by nothing."""
    from transformers import AutoTokenizer

    dataset = pico_dataset(tmp_path / "dataset", pico_model, rows=1)
    tokenizer = AutoTokenizer.from_pretrained(pico_model)
    marks = ["<|python_start|>", "<|python_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(dataset.path / "tokenizer")
    prompt, call = tokenizer.encode("look "), '[look(at="x")]'
    said = [f"{marks[0]}{call}{marks[1]}<|im_end|>", f"{call}<|im_end|>", f"{call}<|im_end|>"]
    rows = []
    for text in said:
        ids = tokenizer.encode(text)
        rows.append(([*prompt, *ids], [IGNORED] * len(prompt) + ids))
    write_rows(dataset.path / "eval.parquet", rows, "eval")
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    lines = [
        {"source": f"eval.jsonl:{at + 1}", "messages": [], "tools": known}
        for at, known in enumerate([None, tools, None])
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (dataset.path / "eval_messages.jsonl").write_text(text)
    found = answers.structured_rows(read_token_rows(dataset.path / "eval.parquet"), dataset.path, 9)
    assert [(entry["row"], entry["kind"], entry["tools"]) for entry in found] == [
        (0, "python_call", None),
        (1, "python_call", {"look": {"at": "string"}}),
    ]  # the third might be a list of anything


def test_prompts_that_are_not_asked_take_no_memory(pico_model: Path, tmp_path: Path) -> None:
    """Those of every answer grow with the square of a conversation's length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pico_model)
    dataset = pico_dataset(tmp_path / "dataset", pico_model, rows=1)
    asked, said = tokenizer.encode("what is it? "), tokenizer.encode('{"it": 1}')
    ids, labels = (asked + said) * 500, ([IGNORED] * len(asked) + said) * 500
    write_rows(dataset.path / "eval.parquet", [(ids, labels)], "eval")
    rows = read_token_rows(dataset.path / "eval.parquet")
    answers.structured_rows(rows, dataset.path, 1)  # imports
    tracemalloc.start()
    found = answers.structured_rows(rows, dataset.path, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [entry["prompt"] for entry in found] == [asked, [*asked, *said, *asked]]
    all_of_them = 500 * len(ids) // 2 * 8  # pointers alone
    assert peak < all_of_them / 4


def tool_chats() -> list[dict[str, Any]]:
    """The shipped example of tool calls, with arguments as a template reads them."""
    path = Path(__file__).parents[2] / "data_templates" / "tools_messages.jsonl"
    chats = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for message in (m for chat in chats for m in chat["messages"]):
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return chats


def _with_tools(tokenizer: Any, messages: list[Any], tools: Any) -> tuple[list[int], list[int]]:
    ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    labels = [IGNORED] * len(ids)
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            begin, end = (
                len(
                    tokenizer.apply_chat_template(
                        messages[:upto], tools=tools, add_generation_prompt=ask, return_dict=False
                    )
                )
                for upto, ask in ((at, True), (at + 1, False))
            )
            labels[begin : end - 1] = ids[begin : end - 1]  # without the template's line break
    return ids, labels


def test_without_held_out_rows_nothing_is_measured(
    tmp_path: Path,
    evaluated: tuple[StageContext, dict[str, Any], dict[str, Any]],
    pico_model: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    empty = pico_dataset(tmp_path / "dataset", pico_model, rows=1)
    write_rows(empty.path / "eval.parquet", [], "eval")
    inputs = {**evaluated[0].inputs, "dataset": empty}
    context = make_context(tmp_path / "evaluate", pico_model, inputs, TRAIN)
    with caplog.at_level(logging.WARNING):
        metrics = run(context)
    assert metrics == {
        "rows": 0,
        "supervised_tokens": 0,
        "base_loss": None,
        "adapter_loss": None,
        "merged_loss": None,
    }
    assert "no held-out rows" in caplog.text
    assert json.loads((context.out / "losses.json").read_text())["merged"] is None
    assert (context.out / "samples.jsonl").read_text() == ""
