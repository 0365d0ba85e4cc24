"""Whatever stands in a field of the run file: the answer is in the run file's words."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.runfile import load_run_file, parse_run
from tuneserve.section import field_paths
from tuneserve.wrongfields import SENTENCES

GOOD: dict[str, Any] = {
    "name": "demo",
    "model": {"base": "org/name"},
    "data": {"train": "train.jsonl"},
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, -2.5, 3, 10**30, float("nan"), float("inf"), "", "x", "12x",
    "1e400", "9" * 5000, "a" * 100, "\ud800", b"ab", [], ["x"], [1], [[1]], [None], [{}],
    [{"prompt": ""}], [{"prompt": "a", "contains": 3}], [{"prompt": "a", "matches": "("}], {},
    {"a": 1}, {1: 2}, {"a", "b"}, "https://a:b@c/d", "sk-0123456789abcdef",
]  # fmt: skip
# What pydantic's own sentences are made of.
RAW = re.compile(
    r"Input|should be|should have|Extra inputs|permitted|Field required|Value error|unable to"
    r"|\bvalid\b|validation|\[type=|instance of|Unable|NoneType|match pattern|literal\["
)


def with_value(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    node = data
    *parents, last = path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return data


def wrong_values() -> Iterator[tuple[str, Any]]:
    for path in field_paths(RunFile):
        for value in VALUES:
            yield path, value


def problems_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(RunFileError) as caught:
        parse_run(data)
    return caught.value.message.split("\n  ")[1:]


def test_no_field_and_no_wrong_value_is_answered_in_the_validators_words() -> None:
    types: set[str] = set()
    refused: dict[str, int] = {}
    for path, value in wrong_values():
        data = with_value(path, value)
        try:
            RunFile.model_validate(data)
        except ValidationError as error:
            types |= {item["type"] for item in error.errors()}
        else:
            continue
        refused[path] = refused.get(path, 0) + 1
        problems = problems_of(data)
        assert len(set(problems)) == len(problems)
        for problem in problems:
            where, _, said = problem.partition(": ")
            assert said and len(problem) < 400, problem
            assert not RAW.search(said.replace(repr(value), "")), problem
            assert where.startswith((path, path.rpartition(".")[0])), problem
    assert set(refused) == set(field_paths(RunFile)), "every field refuses something"
    own = {"value_error", "address_with_a_secret", "no_name_of_a_variable"}
    assert types - own <= set(SENTENCES), "each type has its sentence"
    assert len(types) >= 24


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("train.lora.r", 0, "0 is too small; expected a whole number, >= 1"),
        ("train.lora.r", 2.5, "2.5 is not whole; expected a whole number, >= 1"),
        ("data.eval_fraction", 1, "1 is too large; expected a number, >= 0, < 1"),
        (
            "data.max_rejected",
            "2%",
            "'2%' is no number; expected a number, >= 0, <= 1; write 0.02",
        ),
        (
            "train.learning_rate",
            "0,01",
            "'0,01' is no number; expected a number, > 0; write 0.01, or the digits alone",
        ),
        (
            "train.method",
            "qlorra",
            "'qlorra' is none of them; expected qlora or lora; did you mean qlora?",
        ),
        (
            "train.micro_batch",
            "all",
            "'all' is no number; expected a whole number, >= 1, or auto",
        ),
        (
            "train.micro_batch",
            0,
            "0 is too small; expected a whole number, >= 1, or auto",
        ),
        ("data.system", 7, "found 7; expected text; put it in quotes"),
        (
            "train.epochs",
            True,
            "found true; expected a number, > 0; true and false are no words in YAML: put a word "
            "in quotes",
        ),
        (
            "train.epochs",
            float("inf"),
            "inf is not finite; expected a number, > 0",
        ),
        (
            "quantize.methods",
            "awq",
            "found 'awq'; expected a list of gptq or awq or none, not empty; write ['awq']",
        ),
        (
            "name",
            "My Bot!",
            "'My Bot!' is no such name; expected text of lower-case letters, digits and dashes, "
            "the first no dash, at most 63 characters; for example my-bot",
        ),
        (
            "model",
            None,
            "found nothing; expected fields below it: base, revision, chat_template, "
            "trust_remote_code; write it, or take the line out",
        ),
        (
            "merge.max_memory",
            "9" * 400,
            f"'{'9' * 40}' is more bytes than any machine has",
        ),
        ("train.seed", 2**40, "1099511627776 is too large; expected a whole number, >= 0, < "),
    ],
)
def test_what_was_found_what_is_taken_and_what_was_meant(path: str, value: Any, said: str) -> None:
    (problem,) = problems_of(with_value(path, value))
    assert problem.startswith(f"{path}: {said}")


def test_a_field_of_several_kinds_is_one_problem_and_its_entries_are_named_alone() -> None:
    assert problems_of(with_value("train.lora.target_modules", ["q_proj", 3])) == [
        "train.lora.target_modules.1: found 3; expected text; put it in quotes"
    ]
    assert problems_of(with_value("train.lora.target_modules", [])) == [
        "train.lora.target_modules: is empty; expected a list of texts, not empty, or all-linear"
    ]


def test_fields_of_entries_and_names_with_dots_are_told_what_was_meant() -> None:
    data = with_value("gates.canaries", [{"prompt": "a", "contains": "b", "max_token": 3}])
    (problem,) = problems_of(data)
    assert problem.endswith("did you mean gates.canaries.0.max_tokens?")
    assert problems_of({**GOOD, "train.lora.r": 8}) == [
        "train.lora.r: there is no such field of one name with dots; write r below train.lora"
    ]


@pytest.mark.parametrize(
    "secret", ["https://hooks.example.org/T0/s3cret", "sk-s3cret", "s3cret x", 83736, ["s3cret"]]
)
def test_a_secret_in_the_place_of_its_variable_is_refused_unrepeated(secret: Any) -> None:
    for path in ("serve.api_key_env", "notify.url_env"):
        (problem,) = problems_of(with_value(path, secret))
        assert problem.startswith(f"{path}: holds {len(str(secret))} characters")
        assert "s3cret" not in problem and "83736" not in problem
        assert "write the name of the variable" in problem


def test_what_an_alias_repeats_a_million_times_is_not_written_out(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    levels = "".join(f"k{n}: &k{n} [*k{n - 1}, *k{n - 1}]\n" for n in range(1, 31))
    path.write_text(f"k0: &k0 [1, 1]\n{levels}name: *k30\ndata: {{train: *k30}}\n")
    with pytest.raises(RunFileError) as caught:
        load_run_file(path)
    assert "name: found a list" in caught.value.message and len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    ("text", "where", "hint"),
    [
        ("name: a\nx: " + "9" * 5000, ":2:4: '9999", "mend the line"),
        ("name: !!int x\n", ":1:7: 'x' is no int", "mend the line"),
        ("name: !!timestamp x\n", ":1:7: 'x' is no timestamp", "mend the line"),
        ("name: !!bool x\n", ":1:7: 'x' is no bool", "mend the line"),
        ("? [a, b]\n: c\n", ":1:3: a sequence cannot name a field", "docs/run-file.md"),
        (
            "name: a\ntrue: 2\n",
            ":2:1: the key 'true' is no text in YAML but bool",
            "docs/run-file.md",
        ),
        ("name: a\0\n", ":1: the character U+0000", "remove it"),
        ("name: a\n\tmodel: x\n", ":2:1: ", "spaces, not tabs"),
        ("name: a: b\n", ":1:8: ", "in quotes"),
        ("data:\n  a: 1\n   b: 2\n", ":3:5: ", "as many spaces as those beside it"),
        ("data:\n   a: 1\n  b: 2\n", ":3:3: ", "as many spaces as the fields beside it"),
        (
            "t:\n  lora: {r: 16, alpha: 32\nq:\n  a: 1\n",
            ":3:2: expected ',' or '}', but got ':', in the bracket of line 2",
            "close the bracket",
        ),
        ("name: a\n---\nname: b\n", ":2:1: ", "one file holds one run"),
        ("name: " + "[" * 3000 + "]" * 3000, ": holds more levels", "count the brackets"),
        ('name: a\nx: "C:\\models"\n', ":2:8: ", "single quotes"),
    ],
)
def test_what_is_no_yaml_says_where_and_what_to_do(
    text: str, where: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(RunFileError) as caught:
        load_run_file(path)
    assert caught.value.message.startswith(f"{path}{where}") and hint in caught.value.hint
    assert len(str(caught.value)) < 500


RUN = "name: a\nmodel: {base: org/x%s}\ndata: {train: %s}\n%s"


@pytest.mark.parametrize(
    "text",
    "1.10 1.0 012 0123456 12e4567 1e400 0x1F 22:22 1:30 190:20:30.15 no NO on off yes y 1_000 = "
    "2024-01-31 .5 5. +5 .inf".split(),
)
def test_where_text_is_taken_it_is_what_stands_there(text: str, tmp_path: Path) -> None:
    """YAML 1.1 makes other values of most of these."""
    path = tmp_path / "run.yaml"
    more = (
        f"gates: {{canaries: [{{prompt: {text}, contains: {text}, lacks: [{text}, b]}}]}}\n"
        f"train: {{lora: {{target_modules: [{text}]}}}}\n"
    )
    path.write_text(RUN % (f", revision: {text}", f"[{text}]", more))
    run = load_run_file(path)
    canary = run.gates.canaries[0]
    assert run.model.revision == canary.prompt == text
    assert (canary.contains, canary.lacks) == ([text], [text, "b"])
    assert run.train.lora.target_modules == [text]
    assert run.data.train == [str(tmp_path / text)]
    path.write_text(RUN % ("", text, ""))
    assert load_run_file(path).data.train == [str(tmp_path / text)]


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("train.seed", "012", 12),
        ("train.seed", "0o14", 12),
        ("train.seed", "0x10", 16),
        ("train.seed", "1_000", 1000),
        ("train.learning_rate", "1e-4", 0.0001),
        ("train.max_steps", "1e3", 1000),
        ("train.learning_rate", "2.0e-4", 0.0002),
        ("train.lora.use_dora", "yes", True),
        ("train.lora.use_dora", "off", False),
        ("train.gradient_checkpointing", "no", False),
        ("train.gradient_checkpointing", "offload", "offload"),
        ("train.zero", "0", 0),
        ("train.micro_batch", "4", 4),
    ],
)
def test_numbers_and_switches_are_what_they_look_like(
    field: str, text: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    around, _, name = field.rpartition(".")
    outer = "".join("{" + f"{part}: " for part in around.split(".")[1:])
    path.write_text(RUN % ("", "t", f"train: {outer}{{{name}: {text}}}{'}' * outer.count('{')}\n"))
    found: Any = load_run_file(path)
    for part in field.split("."):
        found = getattr(found, part)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        (
            "port",
            "22:22",
            "4:9: serve.port: '22:22' is no number; expected a whole number, >= 1, <= 65535; write "
            "one number, without colons; times are in seconds",
        ),
        ("port", "0b11", "4:9: serve.port: '0b11' is no number"),
        ("port", "0xFFFFF", "4:9: serve.port: 0xFFFFF is too large"),
        ("port", "no", "4:9: serve.port: 'no' is no number"),
        ("top_p", "1.10", "4:9: serve.top_p: 1.10 is too large; expected a number, > 0, <= 1"),
        ("temperature", "1e400", "4:9: serve.temperature: 1e400 is not finite"),
        ("rollout", "1.0", "4:9: serve.rollout: 1.0 is none of them"),
        ("keep_warm", "2", "4:9: serve.keep_warm: 2 is neither; expected true or false"),
        ("name", "true", "4:9: serve.name: found true; expected text"),
        ("name", "1.10", "4:9: serve.name: '1.10' is no such name; expected text of"),
    ],
)
def test_a_wrong_value_is_repeated_as_it_stands(
    field: str, text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN % ("", "t", f"serve: {{{field}: {text}}}\n"))
    with pytest.raises(RunFileError) as caught:
        load_run_file(path)
    assert caught.value.message.split("\n  ")[1].startswith(f"{path}:{said}")


def test_a_date_is_the_text_it_is_written_as(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\nmodel: {base: org/x, revision: 2024-01-31}\ndata: {train: t}\n")
    assert load_run_file(path).model.revision == "2024-01-31"
