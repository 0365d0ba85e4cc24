"""The validate stage from files to artifact, with tiny bases and with the built-in one."""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_bases as bases
from tuneserve.data.stage import run
from tuneserve.errors import DataError, ModelError
from tuneserve.process import StageCall, run_stage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base for reading only."""
    folder: Path = bases.make_base(tmp_path_factory.mktemp("base") / "tiny")
    return folder


@pytest.fixture(autouse=True)
def fast_tokenizer_child(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Importing transformers takes seconds: most tests load the tokenizer right here."""
    if request.node.name.startswith("test_real"):
        return
    bases.load_tokenizer_here(monkeypatch)


def table(out: Path, side: str) -> list[dict[str, Any]]:
    """Rows of a side's Parquet file."""
    rows: list[dict[str, Any]] = pq.read_table(out / f"{side}.parquet").to_pylist()
    return rows


def lines(path: Path) -> list[Any]:
    """A JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_real_rejected_cases_and_the_artifact(tmp_path: Path) -> None:
    """The built-in base, a real child process, every rejected case of data_templates."""
    from tuneserve.checkpoint.base import resolve_base
    from tuneserve.config import ModelSection
    from tuneserve.runfile import parse_run

    expected = json.loads((ROOT / "data_templates" / "rejected.expected.json").read_text())
    folder = resolve_base(ModelSection(base="builtin:smollm2-135m"))
    spec = {
        "name": "gate",
        "model": {"base": str(folder)},
        "data": {
            "train": [str(ROOT / "data_templates" / "rejected.jsonl")],
            "max_rejected": 1.0,
            "eval_fraction": 0,
        },
        "store": {"root": str(tmp_path / "store")},
    }
    result = run_stage(StageCall("validate", parse_run(spec), folder))
    assert result.path is not None
    out = Path(result.path)
    found = {int(r["source"].split(":")[1]): r["code"] for r in lines(out / "quarantine.jsonl")}
    bad = {e["line"]: e["code"] for e in expected if e["code"] and e.get("severity") != "warning"}
    assert found == bad
    report = json.loads((out / "report.json").read_text())
    for entry in expected:
        if entry.get("severity") == "warning":
            assert f"rejected.jsonl:{entry['line']}" in report["warning_places"][entry["code"]]
    good = {e["line"] for e in expected} - set(found)
    assert {int(row["source"].split(":")[1]) for row in table(out, "train")} >= good
    metrics = result.metrics
    assert metrics["rows_read"] == metrics["rows_kept"] + metrics["rows_rejected"]
    assert metrics["tokenizer"] == "tokenizer" and metrics["eval_rows"] == 0
    assert len(metrics["report"].encode()) <= 4096 and metrics["peak_rss_bytes"] < 400 * 2**20
    assert {p.name for p in out.iterdir()} == {
        "train.parquet", "eval.parquet", "train_messages.jsonl", "eval_messages.jsonl",
        "quarantine.jsonl", "report.json", "report.md", "lengths.png", "tokenizer", "manifest.json",
    }  # fmt: skip
    assert (out / "lengths.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    _check_against_transformers(out)
    again = run_stage(StageCall("validate", parse_run(spec), folder))
    assert again.cached and again.artifact == result.artifact


def _check_against_transformers(out: Path) -> None:
    """The ids are AutoTokenizer's on the folder passed on, the labels the answers'."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    rows, messages = table(out, "train"), lines(out / "train_messages.jsonl")
    assert rows and len(rows) == len(messages)
    for row, sent in zip(rows, messages, strict=True):
        assert row["source"] == sent["source"]
        if sent["tools"]:  # the server parses the calls first; `test_data_tokens` renders them
            continue
        encoded = tokenizer.apply_chat_template(sent["messages"], return_dict=True)
        assert encoded["input_ids"] == row["input_ids"]
        answers = [m["content"] for m in sent["messages"] if m["role"] == "assistant"]
        on = [id for id in row["labels"] if id != -100]
        assert tokenizer.decode(on) == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert all(b in (-100, a) for a, b in zip(row["input_ids"], row["labels"], strict=True))


def test_all_formats_in_a_folder(tmp_path: Path, base: Path, caplog: Any) -> None:
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    bases.write_jsonl(data / "a.jsonl", [bases.chat(f"question {i}", "yes") for i in range(5)])
    rows = [{"instruction": f"do {i}", "input": "", "output": "007"} for i in range(5)]
    (data / "b.json").write_text(json.dumps(rows, indent=1))
    text = "prompt,completion\n" + "".join(f'"tell, {i}",done\n' for i in range(5))
    (data / "more" / "c.csv.gz").write_bytes(gzip.compress(text.encode()))
    share = [
        {"conversations": [{"from": "human", "value": f"s {i}"}, {"from": "gpt", "value": "ok"}]}
        for i in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(share), data / "more" / "d.parquet")
    packed = pa.compress("".join(json.dumps(r) + "\n" for r in share).replace("s ", "z ").encode(),
                         codec="zstd", asbytes=True)  # fmt: skip
    (data / "e.jsonl.zst").write_bytes(packed)
    (data / "README.md").write_text("not data")
    with caplog.at_level(logging.INFO):
        metrics = run(bases.make_context(tmp_path, base, [data]))
    assert metrics["formats"] == {
        "a.jsonl": "messages",
        "b.json": "alpaca",
        "e.jsonl.zst": "sharegpt",
        "more/c.csv.gz": "prompt_completion",
        "more/d.parquet": "sharegpt",
    }
    assert metrics["rows_kept"] == 25 and "README.md does not end like a data file" in caplog.text
    assert "validate: 25/25 rows" in caplog.text
    sides = [table(tmp_path / "out", side) for side in ("train", "eval")]
    assert len(sides[0]) == metrics["train_rows"] and len(sides[1]) == metrics["eval_rows"] > 0
    assert {row["source"] for side in sides for row in side} >= {"b.json:2", "more/d.parquet:5"}
    sent = lines(tmp_path / "out" / "train_messages.jsonl")
    assert any(m["content"] == "007" for row in sent for m in row["messages"])  # A10
    report = (tmp_path / "out" / "report.md").read_text()
    assert "[[007<|im_end|>]]" in report or "[[yes<|im_end|>]]" in report
    assert not list((tmp_path / "work").iterdir())  # nothing is left to resume from


def test_lone_wrong_files_are_named(tmp_path: Path, base: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    bases.write_jsonl(data / "good.jsonl", [bases.chat(f"q {i}", "a") for i in range(9)])
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    cases: list[tuple[str, Any, str]] = [
        ("pairs.jsonl", [pair] * 3, "preference pairs"),
        ("labels.jsonl", [{"text": "x", "label": 5}, {"text": "y", "label": "3"}], "class labels"),
        ("other.jsonl", [{"question": "q"}], "keys of its first row are question"),
        ("roles.jsonl", [{"messages": [{"role": "bot", "content": "x"}]}], "unknown_role 1"),  # A08
    ]
    for name, rows, what in cases:
        bases.write_jsonl(data / name, rows)
        with pytest.raises(DataError) as caught:
            run(bases.make_context(tmp_path, base, [data]))
        assert f"{data}/{name}" in caught.value.message and what in str(caught.value)
        assert not (tmp_path / "out" / "train.parquet").exists()
        (data / name).unlink()
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "work")
    bases.write_jsonl(data / "one.jsonl", [bases.chat("z", "b")] * 1 + [pair])
    metrics = run(bases.make_context(tmp_path, base, [data], max_rejected=0.5))
    assert metrics["reasons"] == {"preference_pair": 1}  # a lone one among good rows


def test_too_many_rejected_rows(tmp_path: Path, base: Path) -> None:
    rows = [bases.chat(f"q {i}", "a" if i % 4 else "") for i in range(60)]
    path = bases.write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError) as caught:
        run(bases.make_context(tmp_path, base, [path]))
    error = caught.value
    assert "15 of 60 rows are rejected (25.0%): empty_content 15" in error.message
    assert error.exit_status == 2 and len(error.details["findings"]) == 10
    assert error.message.count("rows.jsonl:") == 10 and "rows.jsonl:1:84" in error.message
    saved = lines(Path(error.details["quarantine"]))
    assert len(saved) == 15 and saved[0]["code"] == "empty_content"
    assert json.loads(saved[0]["row"]) == rows[0]
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work")
    assert run(bases.make_context(tmp_path, base, [path], max_rejected=0.25))["rows_kept"] == 45


def test_a01_a13_lengths(tmp_path: Path, base: Path) -> None:
    rows = [bases.chat(f"{i} " + "word " * 100, "red") for i in range(4)]
    path = bases.write_jsonl(tmp_path / "rows.jsonl", rows)
    for policy, code in (("drop", "too_long 4"), ("truncate", "no_supervised_token 4")):
        with pytest.raises(DataError) as caught:
            run(bases.make_context(tmp_path, base, [path], max_length=64, too_long=policy))
        assert code in caught.value.message and "data.max_length (now 64)" in caught.value.hint
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "work")
    with pytest.raises(DataError, match="max_length is 600, but the model's context is 512"):
        run(bases.make_context(tmp_path, base, [path], max_length=600))


def test_a14_a15_split(tmp_path: Path, base: Path) -> None:
    one = bases.write_jsonl(tmp_path / "one.jsonl", [bases.chat("q", "a")])
    with pytest.raises(DataError, match="needs at least 2 conversations"):
        run(bases.make_context(tmp_path, base, [one]))
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work")
    assert run(bases.make_context(tmp_path, base, [one], eval_fraction=0))["train_rows"] == 1
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work")
    rows = [bases.chat(f"q {i}", f"a {i}") for i in range(10)]
    many = bases.write_jsonl(tmp_path / "many.jsonl", [*rows, bases.chat("q 3 ", "a 3\r\n")])
    held = bases.write_jsonl(
        tmp_path / "held.jsonl", [bases.chat("new", "x"), bases.chat(" q 5", "a 5")]
    )
    with pytest.raises(DataError, match="eval_overlap: a held-out") as caught:
        run(bases.make_context(tmp_path, base, [many], eval=[str(held)]))
    assert "held.jsonl:2 is many.jsonl:6" in caught.value.message
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work")
    bases.write_jsonl(held, [bases.chat("new", "x")])
    metrics = run(bases.make_context(tmp_path, base, [many], eval=[str(held)]))
    assert (metrics["train_rows"], metrics["eval_rows"]) == (10, 1)
    assert metrics["reasons"] == {"duplicate": 1}
    (entry,) = lines(tmp_path / "out" / "quarantine.jsonl")
    assert entry["source"] == "many.jsonl:11:1" and entry["message"].endswith("many.jsonl:4")


def test_two_processes_give_the_same_bytes(tmp_path: Path, base: Path) -> None:
    rows = [bases.chat(f"q {i}", "word " * (i % 40 + 1)) for i in range(900)]
    path = bases.write_jsonl(tmp_path / "rows.jsonl", rows)
    files: list[dict[str, bytes]] = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        context = bases.make_context(folder, base, [path], hints={"processes": processes})
        run(context)
        found = {p.name: p.read_bytes() for p in context.out.iterdir() if p.is_file()}
        files.append(found)
    assert files[0] == files[1]


def test_templates(tmp_path: Path) -> None:
    rows = [bases.chat(f"q {i}", "a") for i in range(9)]
    path = bases.write_jsonl(tmp_path / "rows.jsonl", rows)
    # The template ends answers with a token that the base does not stop at: the server is told.
    base = bases.make_base(
        tmp_path / "llama", source=bases.DEFAULT_SYSTEM, stop="</s>", generation={"eos_token_id": 1}
    )
    template = tmp_path / "own.jinja"
    template.write_text(bases.LLAMA3)
    run(bases.make_context(tmp_path, base, [path], chat_template=template))
    saved = tmp_path / "out" / "tokenizer"
    stops = json.loads((saved / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [1, bases.SPECIALS.index("<|eot_id|>")]
    assert (saved / "chat_template.jinja").read_text() == bases.LLAMA3
    assert "was added to generation_config.json" in (tmp_path / "out" / "report.md").read_text()
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work")
    template.write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    with pytest.raises(ModelError, match="never stop"):
        run(bases.make_context(tmp_path, base, [path], chat_template=template))
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work")
    template.write_text("{% for m in messages %}")
    with pytest.raises(ModelError, match="not valid Jinja"):
        run(bases.make_context(tmp_path, base, [path], chat_template=template))


def test_real_data_sets(tmp_path: Path) -> None:
    """Whole public files, where they are at hand; the counts were taken from the files by hand."""
    folder = ROOT.parent / "shared" / "data"
    rows = {
        "alpaca_en_demo.json": 999,
        "alpaca_zh_demo.json": 1000,
        "glaive_toolcall_en_demo.json": 300,
        "v1_sft_demo.jsonl": 500,
    }
    paths = [folder / name for name in rows]
    if not all(path.is_file() for path in paths):
        pytest.skip("the data sets are not here")
    from transformers import AutoTokenizer

    from tuneserve.checkpoint.base import resolve_base
    from tuneserve.config import ModelSection
    from tuneserve.data.template import server_form

    base = resolve_base(ModelSection(base="builtin:smollm2-135m"))
    metrics = run(bases.make_context(tmp_path, base, paths, max_length=8192))
    assert metrics["rows_read"] == sum(rows.values())
    assert set(metrics["reasons"]) == {"duplicate", "too_long"}
    assert metrics["reasons"]["too_long"] == 1  # one answer of 11,632 tokens
    assert list(metrics["formats"].values()) == ["alpaca", "alpaca", "sharegpt", "messages"]
    assert metrics["warnings"]["placeholder"] == 50
    out = tmp_path / "out"
    # SmolLM2's template knows no tools: the one that is passed on does, and transformers agrees on
    # the ids.
    assert "<tool_call>" in (out / "tokenizer" / "chat_template.jinja").read_text()
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    pairs = list(zip(table(out, "eval"), lines(out / "eval_messages.jsonl"), strict=True))
    with_tools = [pair for pair in pairs if pair[1]["tools"]]
    assert with_tools
    for row, sent in pairs[:20] + with_tools[:20]:
        ids = tokenizer.apply_chat_template(
            server_form(sent["messages"]), tools=sent["tools"], return_dict=True
        )["input_ids"]
        assert ids == row["input_ids"]
    shutil.rmtree(out)
    shutil.rmtree(tmp_path / "work")
    with pytest.raises(DataError, match="preference pairs .a chosen and a rejected answer"):
        run(bases.make_context(tmp_path, base, [folder]))


def test_the_broken_csv_is_named_by_line(tmp_path: Path, base: Path) -> None:
    path = ROOT / "data_templates" / "rejected.csv"
    context = bases.make_context(tmp_path, base, [path], max_rejected=1.0, eval_fraction=0)
    metrics = run(context)
    assert (metrics["rows_kept"], metrics["reasons"]) == (2, {"bad_csv": 2})
    found = [row["source"] for row in lines(context.out / "quarantine.jsonl")]
    assert found == ["rejected.csv:3:1", "rejected.csv:4:1"]


@pytest.mark.parametrize(
    "name",
    [
        p.name
        for p in sorted((ROOT / "data_templates").iterdir())
        if "rejected" not in p.name and p.suffix in (".json", ".jsonl", ".csv")
    ],
)
def test_shipped_template_files_have_only_good_rows(tmp_path: Path, name: str) -> None:
    base = bases.make_base(tmp_path / "base", context=100_000)
    path = ROOT / "data_templates" / name
    metrics = run(bases.make_context(tmp_path, base, [path], max_length=100_000, eval_fraction=0))
    assert metrics["rows_kept"] == metrics["rows_read"] > 0 and not metrics["reasons"]
    wanted = {"alpaca.json": "alpaca", "prompt_completion.jsonl": "prompt_completion"}
    wanted["prompt_completion.csv"] = "prompt_completion"
    kind = wanted.get(name, "sharegpt" if "sharegpt" in name else "messages")
    assert metrics["formats"] == {name: kind}
    assert (metrics["tool_rows"] > 0) == ("tools" in name)


def test_real_command_prints_one_object_or_the_first_findings(tmp_path: Path, base: Path) -> None:
    """`tuneserve validate` alone: what scripts read, and what a person reads at exit 2."""
    good = [bases.chat(f"Question {n}?", f"Answer {n}.") for n in range(30)]
    bases.write_jsonl(tmp_path / "good.jsonl", good)
    bad = [{"messages": [{"role": "user", "content": f"Unanswered {n}"}]} for n in range(15)]
    bases.write_jsonl(tmp_path / "bad.jsonl", [*good, *bad])
    environment = {**os.environ, "TUNESERVE_HOME": str(tmp_path / "home")}

    def validate(name: str) -> subprocess.CompletedProcess[str]:
        run_file = tmp_path / "run.yaml"
        spec = {
            "name": "r",
            "model": {"base": str(base)},
            "data": {"train": f"{name}.jsonl", "max_length": 256},
        }
        run_file.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "tuneserve", "validate", str(run_file), "--json"]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
        )

    done = validate("good")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rows_read"], found["rows_kept"], found["rows_rejected"]) == (30, 30, 0)
    assert found["rows_neutralized"] == 0 and found["reasons"] == {}
    assert Path(found["tokenizer"]).parent == Path(found["path"])
    assert (Path(found["tokenizer"]) / "tokenizer.json").is_file()
    assert Path(found["path"]).name == found["artifact"]
    held_out = found["eval_conversations"]  # a tenth of 30: fewer than the gates need
    assert held_out < 8 and f"the run would be refused: {held_out} conversation" in done.stderr
    stored = sorted(p.name for p in Path(found["path"]).parent.iterdir())

    done = validate("bad")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert "15 of 45 rows are rejected" in error["message"]
    shown = [line for line in done.stderr.splitlines() if "no_assistant" in line and ":1" in line]
    assert sum("bad.jsonl:" in line and ": no_assistant: " in line for line in shown) == 10
    assert len(error["details"]["findings"]) == 10
    assert error["details"]["findings"][0]["source"].endswith("bad.jsonl:31:1")
    assert Path(error["details"]["quarantine"]).read_text().count("\n") == 15
    assert sorted(p.name for p in Path(found["path"]).parent.iterdir()) == stored
