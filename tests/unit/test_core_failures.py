"""What people read when something fails: found, expected, what to do, and the exit status."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tuneserve import __main__ as entry
from tuneserve.errors import TuneserveError, error_classes

ROOT = Path(__file__).parents[2]
CLASSES = sorted(name for name in error_classes() if name != "TuneserveError")
GROUPS = {
    "InputError": 2,
    "ResourceError": 3,
    "GateRefused": 4,
    "ServiceError": 5,
    "StageCrashed": 1,
}


def _status(name: str) -> int:
    """The exit status that README promises for the class's group."""
    names = [cls.__name__ for cls in error_classes()[name].__mro__]
    return next(GROUPS[group] for group in names if group in GROUPS)


STATUS = {name: _status(name) for name in CLASSES}

# What happened is all there is to say: a process or a server ended, a gate or a limit spoke,
# numbers went astray. Nobody needs to be told that it was expected to go well.
WITHOUT_EXPECTED = {
    "BudgetSpent", "GateRefused", "QuantizeError", "ServerError", "ServiceError", "StageCrashed",
    "StageKilled", "StageTimeout", "TrainingDiverged",
}  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tuneserve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """The program as a function: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(entry.signal, "signal", lambda *_: None)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tuneserve", *arguments])
        capsys.readouterr()
        try:
            entry.main()
        except SystemExit as end:
            out, err = capsys.readouterr()
            return int(end.code or 0), out, err
        raise AssertionError("main always exits")

    return run


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("hint", ["", "do this"])
def test_every_class_reads_well_at_the_command_line(
    tuneserve: Run, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    cls = error_classes()[name]

    def fail(*_: object, **__: object) -> None:
        raise cls("a.jsonl:3:4: found x", expected="y", hint=hint)

    monkeypatch.setattr("tuneserve.runfile.load_run_file", fail)
    status, out, err = tuneserve("plan", "run.yaml")
    assert status == STATUS[name] and not out
    said = err[err.index("error: ") :].rstrip().split("\n  ")
    assert said[:2] == ["error: a.jsonl:3:4: found x", "expected: y"]
    assert said[2].startswith("what to do: ") and len(said) == 3
    what = said[2].removeprefix("what to do: ")
    assert what == (hint or cls.usual_hint) and not what.endswith(".") and what[0].islower()
    status, out, err = tuneserve("plan", "run.yaml", "--json")
    error = json.loads(out)["error"]
    assert (status, error["kind"], error["hint"]) == (STATUS[name], name, what)


def test_a_hint_is_the_nearest_one() -> None:
    """No class falls back on the one that asks for a bug report, but the bug's own."""
    for name in CLASSES:
        asks = "report" in error_classes()[name].usual_hint.split(";")[-1]
        assert asks == (name == "StageCrashed"), name


def _raised() -> list[tuple[str, ast.Call]]:
    """Every construction of an error class in the sources."""
    found = []
    for folder in ("src", "flows", "tasks", "deploy"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    if node.func.id in STATUS:
                        place = f"{path.relative_to(ROOT)}:{node.lineno}"
                        found.append((f"{place} {node.func.id}", node))
    return found


def test_every_raise_says_what_was_found() -> None:
    """With a value in it: a message without one leaves the reader to search."""
    found = _raised()
    assert len(found) > 200
    plain = [
        place
        for place, call in found
        if call.args and isinstance(call.args[0], ast.Constant) and len(call.args[0].value) < 10
    ]
    assert not plain
    for place, call in found:
        for keyword in call.keywords:
            if keyword.arg == "hint" and isinstance(keyword.value, ast.Constant):
                text = keyword.value.value
                assert text and not text.endswith("."), f"{place}: {text}"


def test_every_other_raise_says_what_was_expected() -> None:
    """A file, a field, a value or memory that is not as it has to be: one is told how."""
    missing = [
        place
        for place, call in _raised()
        if place.split()[1] not in WITHOUT_EXPECTED
        and not {"expected", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert not missing


DOCUMENTED: list[tuple[list[str], int, str, str]] = [
    (["plan", "nowhere.yaml"], 2, "nowhere.yaml: cannot be read", "check the path"),
    (["plan", "broken.yaml"], 2, "broken.yaml:3:1", "mend the line"),
    (["plan", "twice.yaml"], 2, "the key 'name' occurs twice", "keep one of the two"),
    (["plan", "wrong.yaml"], 2, "2 fields are wrong", "mend the fields"),
    (["plan", "no-base.yaml"], 2, "there is no such folder", "mend model.base"),
    (["plan", "long.yaml"], 2, "over the model's context", "mend the fields"),
    (["init", "nowhere.jsonl"], 2, "there is no such file", "check the path; a relative one"),
    (["init", "dpo.jsonl"], 2, "preference pairs", "remove the file"),
    (["init", "dpo.jsonl", "--out", "wrong.yaml"], 2, "is there already", "--force"),
    (["merge", "--base", "nowhere", "--adapter", "a", "--out", "m"], 2, "nowhere", ""),
    (["merge", "--base", "shape", "--adapter", "nowhere", "--out", "m"], 2, "", ""),
    (["quantize", "--model", "m", "--calibration", "dataset-0", "--out", "q"], 2, "dataset-0", ""),
    (["lineage", "adapter-0"], 2, "adapter-0", ""),
    (["release", "shape"], 2, "no *.safetensors", "export the model"),
    (["release", "shape", "--host", "0.0.0.0"], 2, "", ""),
    (["ask", "Hello?"], 2, "nothing is serving", "tuneserve run RUN.yaml"),
    (["promote", "support-9"], 2, "support-9", ""),
    (["rollback"], 2, "", ""),
    (["keys", "revoke", "nobody"], 2, "nobody", ""),
    (["logs", "nothing"], 2, "nothing", ""),
]


@pytest.mark.parametrize(
    ("arguments", "status", "found", "hint"),
    DOCUMENTED,
    ids=[" ".join(case[0]) for case in DOCUMENTED],
)
def test_documented_failures(
    tuneserve: Run, tmp_path: Path, arguments: list[str], status: int, found: str, hint: str
) -> None:
    (tmp_path / "broken.yaml").write_text("name: a\nmodel: [\n")
    (tmp_path / "twice.yaml").write_text("name: a\nname: b\n")
    data = "data: {train: a.jsonl}"
    (tmp_path / "wrong.yaml").write_text(f"name: a\nmodel: {{bse: x}}\n{data}\n")
    (tmp_path / "no-base.yaml").write_text(f"name: a\nmodel: {{base: ./nowhere}}\n{data}\n")
    long = "data: {train: a.jsonl, max_length: 99999}"
    (tmp_path / "long.yaml").write_text(f"name: a\nmodel: {{base: ./shape}}\n{long}\n")
    (tmp_path / "dpo.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "shape").mkdir()
    shape = (ROOT / "tests" / "shapes" / "Qwen2.5-7B-Instruct.json").read_bytes()
    (tmp_path / "shape" / "config.json").write_bytes(shape)
    before = {p.name for p in tmp_path.iterdir()}
    got, out, err = tuneserve(*arguments)
    assert got == status, err
    assert not out and "Traceback" not in err
    message = err[err.index("error: ") :]
    parts = re.fullmatch(r"error: (.+)\n  expected: (.+)\n  what to do: (.+)\n", message, re.DOTALL)
    assert parts, message
    assert found in parts[1] and hint in parts[3]
    assert {p.name for p in tmp_path.iterdir()} - {"home"} == before


def test_too_small_a_card_is_3(tuneserve: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(
        (ROOT / "tests" / "shapes" / "Qwen2.5-7B-Instruct.json").read_bytes()
    )
    (tmp_path / "run.yaml").write_text("name: a\nmodel: {base: ./}\ndata: {train: a.jsonl}\n")
    status, out, _ = tuneserve("plan", "run.yaml", "--gpu-memory", "6GiB")
    assert status == 3 and "train does not fit" in out
    status, out, _ = tuneserve("plan", "run.yaml", "--gpu-memory", "6GiB", "--json")
    assert status == 3 and json.loads(out)["fits"] is False


def test_a_taken_port_is_5(tuneserve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuneserve.release import address

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]

        def take(*_: object, **__: object) -> None:
            address.check_port(address.Listen("127.0.0.1", port))

        monkeypatch.setattr("tuneserve.release.control.release_model_dir", take)
        status, _, err = tuneserve("release", "m")
    assert status == 5 and "serve.port" in err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_no_bug(tmp_path: Path, options: list[str]) -> None:
    """`tuneserve runs | head -0`: the status of a program that SIGPIPE ended, and no traceback."""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "tuneserve", "runs", *options],
        env={**os.environ, "TUNESERVE_HOME": str(tmp_path)},
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writes)
    assert done.returncode == 128 + 13 and done.stderr == ""


def test_the_tree_in_the_docstring_is_whole() -> None:
    text = sys.modules[TuneserveError.__module__].__doc__ or ""
    for name in CLASSES:
        assert f"+-- {name} " in text or f"+-- {name}\n" in text, name
