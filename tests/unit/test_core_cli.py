"""The command line: help, exit statuses, and JSON alone on stdout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tuneserve import __version__
from tuneserve.__main__ import app
from tuneserve.stagelog import kept_log

VERBS = sorted(
    command.name or command.callback.__name__
    for command in app.registered_commands
    if command.callback and not command.hidden
)


def tuneserve(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuneserve", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
    )


def test_version() -> None:
    done = tuneserve("--version")
    assert (done.returncode, done.stdout) == (0, f"tuneserve {__version__}\n")


def test_a_stage_s_empty_log_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))
    with kept_log("a", "validate", None):
        pass
    done = tuneserve("logs", "validate")
    assert (done.returncode, done.stdout) == (0, "")
    assert "a.validate.log is empty" in done.stderr and "re-used" in done.stderr
    assert "`tuneserve runs`" in done.stderr
    (tmp_path / "logs" / "a.validate.log.1").write_text("rows read 3\n")
    assert "before is in" in (again := tuneserve("logs", "validate")).stderr
    assert "a.validate.log.1" in again.stderr and again.returncode == 0
    done = tuneserve("logs", "gateway")
    assert done.returncode == 2 and "gateway.log is not there" in done.stderr


@pytest.mark.parametrize("days", ["-1", "nan"])
def test_gc_keeps_for_no_negative_time(
    days: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))
    (tmp_path / "store" / "merged-1").mkdir(parents=True)
    (tmp_path / "store" / "merged-1" / "manifest.json").write_text('{"inputs": {}}')
    done = tuneserve("gc", "--keep-days", days, "--yes")
    assert done.returncode == 2 and f"--keep-days is {days}" in done.stderr
    assert "0 days or more" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "store" / "merged-1" / "manifest.json").is_file()


def test_help_names_every_verb() -> None:
    done = tuneserve("--help")
    assert done.returncode == 0
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", done.stdout, re.MULTILINE)
    assert "stage" not in re.findall(r"^  (\w+)", done.stdout, re.MULTILINE)
    assert not re.findall(r"^  \w+ .*\.\.\.$", done.stdout, re.MULTILINE), "a line is cut off"
    alone = tuneserve()
    assert (alone.returncode, alone.stdout) == (0, done.stdout)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example(verb: str) -> None:
    group = typer.main.get_command(app)
    text = group.commands[verb].epilog or ""  # type: ignore[attr-defined]
    assert text.startswith(f"Example: tuneserve {verb}")


def test_no_help_loads_an_engine() -> None:
    """What makes a `--help` slow is what it imports; `bench/bench_cli.py` measures the time.

    pydantic is typer's own.
    """
    code = f"""
import sys
from tuneserve.__main__ import main
heavy = ("torch", "transformers", "prefect", "numpy", "pyarrow", "huggingface_hub",
         "matplotlib", "openai", "yaml")
for verb in {["", *VERBS]!r}:
    sys.argv = ["tuneserve", *filter(None, [verb]), "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, verb
    assert not [name for name in heavy if name in sys.modules], verb
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_wrong_run_file_is_exit_2_with_one_json_object(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\nmodel: {base: x}\ndata: {train: x, wrong: 1}\n")
    done = tuneserve("validate", str(path), "--json", cwd=tmp_path)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "RunFileError"
    assert "data.wrong: there is no such field" in error["message"]
    assert "error: " in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.yaml"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["merge"],
        ["plan", "run.yaml", "--gpu-memory", "24 gibi"],
        ["plan", "run.yaml", "--gpu-memory", "24"],
        ["init", "--gpu-memory", "24"],
        ["release", "m", "--name", "Support Bot"],
        ["quantize", "--model", "m", "--calibration", "/nowhere/d", "--out", "q"],
        ["lineage", "/nowhere/at-all"],
        ["ask", " "],
        ["ask", "hi", "--max-tokens", "0"],
        ["merge", "--base", "a", "--adapter", "b", "--out", "c", "--base-weights", "int8"],
    ],
)
def test_wrong_usage_is_exit_2(arguments: list[str], tmp_path: Path) -> None:
    done = tuneserve(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (
            ["promote"],
            "tuneserve promote: Missing argument 'RELEASE'.",
            "`tuneserve promote r0003`",
        ),
        (["nonsense"], "No such command 'nonsense'.", "`tuneserve --help`"),
        (["gc", "--keep-day", "3"], "No such option: --keep-day", "`tuneserve gc --keep-days 30`"),
        (["gc", "--keep-days", "x"], "'--keep-days': 'x' is no number", "tuneserve gc --help"),
        (["ask", "hi", "--max-tokens", "0"], "'0' is too small; expected >= 1", "tuneserve ask"),
        (["doctor", "--port", "99999"], "'99999' is too large; expected <= 65535", "doctor --help"),
        (["runs", "--last", "-1"], "'-1' is too small; expected >= 1", "tuneserve runs --help"),
        (["logs", "--lines", "0"], "'0' is too small; expected >= 1", "tuneserve logs --help"),
        (
            ["merge", "--base-weights", "int8"],
            "'int8' is not one of 'original', 'nf4'",
            "--adapter adapter/",
        ),
    ],
)
def test_a_wrong_command_line_is_an_error_like_all_others(
    arguments: list[str], said: str, hint: str, tmp_path: Path
) -> None:
    done = tuneserve(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == 2
    if arguments[0] not in ("nonsense", "logs"):  # which take no --json
        error = json.loads(done.stdout)["error"]
        assert error["kind"] == "InputError"
        assert said in error["message"] and hint in error["hint"]
        assert error["expected"].startswith(f"tuneserve {arguments[0]} [OPTIONS]")
    plain = tuneserve(*arguments, cwd=tmp_path)
    assert plain.returncode == 2 and plain.stdout == ""
    assert said in plain.stderr and hint in plain.stderr and plain.stderr.startswith("error: ")


@pytest.mark.parametrize("verb", ["validate", "plan", "train", "run"])
def test_without_a_run_file_it_is_the_one_that_init_writes(verb: str, tmp_path: Path) -> None:
    def said() -> str:
        done = tuneserve(verb, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        return done.stderr

    assert said() == (
        "error: no run file was named, and this folder has no run.yaml\n"
        f"  expected: tuneserve {verb} RUN.yaml\n"
        "  what to do: `tuneserve init DATA` looks at your data and writes one\n"
    )
    (tmp_path / "support.yaml").write_text("name: [")
    assert "no run.yaml but support.yaml" in said() and f"tuneserve {verb} support.yaml" in said()
    (tmp_path / "run.yaml").write_text("name: a\nwrong: 1\n")
    assert said().startswith("using run.yaml\nerror: run.yaml: 3 fields are wrong\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.yaml", "support.yaml"]


@pytest.mark.parametrize(
    ("called", "on_path", "shown"),
    [
        ("bin/tuneserve", True, "tuneserve"),
        ("bin/tuneserve", False, "bin/tuneserve"),
        ("src/tuneserve/__main__.py", False, "python -m tuneserve"),
    ],
)
def test_the_next_command_is_said_as_this_one_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str, on_path: bool, shown: str
) -> None:
    from tuneserve.cli import app as shared

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tuneserve").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [called])
    found = str(tmp_path / "bin" / "tuneserve") if on_path else None
    monkeypatch.setattr("shutil.which", lambda _: found)
    assert shared.what_next("tuneserve plan run.yaml") == f"next:\n  {shown} plan run.yaml"
