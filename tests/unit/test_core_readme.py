"""README says only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import typer
import yaml

from tuneserve.__main__ import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)) + "\n".join(
    re.findall(r"`([^`\n]+)`", TEXT)
)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", COMMANDS))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_verbs_and_options_exist() -> None:
    group = typer.main.get_command(app)
    lines = re.findall(r"\btuneserve ([a-z]+)([^\n#|]*)", COMMANDS)
    assert len(lines) >= 8
    for verb, rest in lines:
        command = group.commands[verb]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, verb


def test_the_deployment_that_readme_runs_is_there() -> None:
    (flow, name, run_file), *_ = re.findall(
        r"prefect deployment run (\S+)/(\S+) -p run_file=(\S+)", TEXT
    )
    deployments = yaml.safe_load((ROOT / "deploy" / "prefect.yaml").read_text())["deployments"]
    assert name in {d["name"] for d in deployments}
    assert (ROOT / run_file).exists()
    assert f'name="{flow}"' in (ROOT / "flows" / "finetune_to_serve.py").read_text()


CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def _commands(text: str) -> list[str]:
    """Lines of the shell blocks, without their comments."""
    lines = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines]


def _inline(text: str) -> set[str]:
    return set(re.findall(r"`((?:tuneserve|make|builtin:|HF_|serve\.|train\.)[^`\n]*)`", text))


def test_both_languages_say_the_same_commands() -> None:
    assert _commands(TEXT) == _commands(CHINESE)
    assert _inline(TEXT) == _inline(CHINESE)
    links = [set(re.findall(r"\]\(([^)#]+)\)", text)) for text in (TEXT, CHINESE)]
    results = {link for link in links[0] if link.startswith("bench/")}  # under "Measured" only
    assert links[0] - results - {"README.zh-CN.md"} == links[1] - {"README.md"}
    assert len(re.findall(r"^## ", TEXT, re.MULTILINE)) == len(
        re.findall(r"^## ", CHINESE, re.MULTILINE)
    )
    assert TEXT.split("```")[1] == CHINESE.split("```")[1]  # the diagram


def test_both_say_how_the_server_and_the_worker_end() -> None:
    for text in (TEXT, CHINESE):
        [block] = [b for b in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "prefect" in b]
        jobs = re.findall(r"prefect (server|worker) start.*&$", block, re.MULTILINE)
        assert jobs == ["server", "worker"]  # %1 and %2
        assert "`kill %2 %1`" in text and "`database is locked`" in text


def test_every_exit_status_is_in_both() -> None:
    for text in (TEXT, CHINESE):
        [sentence] = [p for p in text.split("\n\n") if re.search(r"0 done|0 \u6210\u529f", p)]
        assert set(re.findall(r"\b[0-5](?= )", sentence)) == set("012345")


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 120 and len(CHINESE.splitlines()) < 120
