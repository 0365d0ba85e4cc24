"""What a run file names on this machine and is not there: found first, with the line it is in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tuneserve.cli import app as cli
from tuneserve.config import RunFile
from tuneserve.errors import DataError, InputError, ModelError, RunFileError, TuneserveError
from tuneserve.named import check_named, check_tools
from tuneserve.plan import plan_run
from tuneserve.retrain import retrain
from tuneserve.runfile import load_run_file, parse_run
from tuneserve.runs import Runs


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "chats.jsonl").write_text("{}\n")
    return tmp_path


def load(
    place: Path, model: str, data: str = "chats.jsonl", rest: str = ""
) -> tuple[RunFile, Path]:
    path = place / "run.yaml"
    path.write_text(f"name: a\ndata:\n  train:\n    - {data}\nmodel:\n{model}{rest}")
    return load_run_file(path), path


def refused(run: RunFile) -> TuneserveError:
    with pytest.raises(TuneserveError) as caught:
        check_named(run)
    return caught.value


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("./nowhere", "there is no such folder"),
        ("/nowhere/at/all", "there is no such folder"),
        ("~/nowhere-at-all", "there is no such folder"),
        ("empty", "has no config.json"),
        ("chats.jsonl", "is a file"),
        ("./chats.jsonl", "there is no such folder"),
        ("models/of/mine", "is neither a folder here nor a hub id"),
        ("my model", "is neither a folder here nor a hub id"),
        ("builtin:smollm3", "there is no builtin:smollm3"),
    ],
)
def test_a_base_that_is_nowhere_is_named_with_its_line(
    place: Path, base: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "empty").mkdir()
    run, path = load(place, f"  revision: main\n  base: {base}\n")
    error = refused(run)
    assert isinstance(error, ModelError)
    assert error.message.startswith(f"{path}:7:3: model.base: ") and said in error.message
    assert error.expected and "model.base" in error.hint


@pytest.mark.parametrize("base", ["org/name", "gpt2", "builtin:smollm2-135m"])
def test_what_a_hub_may_have_is_left_to_the_stage_that_asks_it(place: Path, base: str) -> None:
    check_named(load(place, f"  base: {base}\n")[0])


def test_a_template_is_read(place: Path) -> None:
    run, path = load(place, "  base: org/name\n  chat_template: own.jinja\n")
    template = place / "own.jinja"
    where = f"{path}:7:3: model.chat_template: {template}: "
    assert refused(run).message == f"{where}there is no such file"
    template.write_bytes(b"{{ caf\xe9 }}")
    assert refused(run).message == f"{where}cannot be read (it is not UTF-8)"
    template.unlink()
    template.mkdir()
    assert refused(run).message == f"{where}cannot be read (Is a directory)"
    template.rmdir()
    template.write_text("{{ messages }}")
    check_named(run)


def test_all_that_is_lost_is_said_at_once(place: Path) -> None:
    run, path = load(
        place,
        "  base: ./nowhere\n  chat_template: own.jinja\n",
        data="gone/*.jsonl",
        rest="engines:\n  train: {python: /no/python}\n  merge: {python: .venv/bin/python}\n",
    )
    error = refused(run)
    assert isinstance(error, RunFileError)
    for line in (
        f"{path}:6:3: model.base: {place}/nowhere: there is no such folder",
        f"{path}:7:3: model.chat_template: {place}/own.jinja: there is no such file",
        f"{path}:9:11: engines.train.python: /no/python: there is no such program",
        f"{path}:10:11: engines.merge.python: {place}/.venv/bin/python: there is no such program",
        f"{path}:4:7: data.train.0: {place}/gone/*.jsonl: the glob matches no file",
    ):
        assert line in error.message
    for field in ("model.base", "model.chat_template", "engines", "data.train"):
        assert field in error.hint


def test_a_run_without_a_file_has_the_field_alone(place: Path) -> None:
    run = parse_run(
        {"name": "a", "model": {"base": "/nowhere"}, "data": {"train": str(place / "chats.jsonl")}}
    )
    assert refused(run).message == "model.base: /nowhere: there is no such folder"


def test_where_a_run_was_written_is_no_part_of_it(place: Path) -> None:
    run, path = load(place, "  base: org/name\n")
    assert run.where("model.base") == f"{path}:6:3: model.base"
    assert run.where("train.epochs") == "train.epochs"
    again = parse_run(run.model_dump(mode="json"))
    assert again == run and again.where("model.base") == "model.base"
    assert "_written" not in run.model_dump(mode="json")
    assert RunFile.model_json_schema()["properties"].keys() == RunFile.model_fields.keys()


def test_a_run_is_refused_before_others_are_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("somebody is waited for, or something begins")

    monkeypatch.setattr("tuneserve.retrain.hold", never)
    run, path = load(place, "  base: ./nowhere\n")
    with pytest.raises(ModelError) as caught:
        retrain(run, never)
    assert caught.value.message.startswith(f"{path}:6:3: model.base: ")
    (record,) = Runs().all()
    assert record.state == "failed" and record.artifacts == {} and record.error == str(caught.value)
    assert sorted(os.listdir(place / "home")) == ["runs"]


def test_validate_and_plan_say_it_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "execute", lambda call: pytest.fail("a stage begins"))
    run, path = load(place, "  base: ./nowhere\n")
    with pytest.raises(ModelError, match=f"{path}:6:3: model.base"):
        cli.validated(run)
    with pytest.raises(ModelError, match=f"{path}:6:3: model.base"):
        plan_run(run)
    run, path = load(place, "  base: org/name\n", data="gone.jsonl")
    with pytest.raises(DataError, match=f"{path}:4:7: data.train.0: .*gone.jsonl"):
        cli.validated(run)
    assert not (place / "home").exists()


def test_an_interpreter_without_what_its_stage_runs_is_refused_first(place: Path) -> None:
    """Without its packages (-S) Python has no vLLM and no GPTQModel; nothing was begun."""
    bare = place / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (place / "base").mkdir()
    (place / "base" / "config.json").write_text('{"model_type": "llama"}')
    engines = f"engines:\n  serve:\n    python: {bare}\n  quantize:\n    python: {bare}\n"
    run, path = load(place, "  base: ./base\n", rest=engines)
    with pytest.raises(InputError) as caught:
        retrain(run, lambda *_: pytest.fail("a stage begins"))
    lines = caught.value.message.splitlines()
    assert lines[0] == f"{path}:9:5: engines.serve.python: {bare} has no vLLM, which serve needs"
    assert lines[1].strip() == (
        f"{path}:11:5: engines.quantize.python: {bare} has no GPTQModel, which quantize needs"
    )
    (record,) = Runs().all()
    assert record.state == "failed" and sorted(os.listdir(place / "home")) == ["runs"]


def test_only_what_a_run_needs_is_looked_for(place: Path) -> None:
    bare = place / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    rest = f"engines:\n  quantize:\n    python: {bare}\nquantize:\n  methods: [none]\n"
    check_tools(load(place, "  base: org/name\n", rest=rest)[0])


def test_what_this_process_must_not_import_is_found_all_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gptqmodel", None)
    check_tools(load(place, "  base: org/name\n")[0])


def test_what_is_installed_for_development_is_found(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such packages come from a finder of their own, which a .pth file sets up, and lie in no
    folder of the path under their name."""
    finder = """
import importlib.machinery, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("vllm", "gptqmodel"):
            return importlib.machinery.ModuleSpec(name, None)
sys.meta_path.append(Finder)
"""
    (place / "found_by.py").write_text(finder)
    python = place / "development-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -c "import found_by; $2"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(place))
    engines = f"engines:\n  serve:\n    python: {python}\n  quantize:\n    python: {python}\n"
    check_tools(load(place, "  base: org/name\n", rest=engines)[0])
