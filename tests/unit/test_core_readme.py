"""README says only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert "://" in link or (ROOT / link).exists(), link


def test_the_deployment_that_readme_runs_is_there() -> None:
    (flow, name, run_file), *_ = re.findall(
        r"prefect deployment run (\S+)/(\S+) -p run_file=(\S+)", TEXT
    )
    deployments = yaml.safe_load((ROOT / "deploy" / "prefect.yaml").read_text())["deployments"]
    assert name in {d["name"] for d in deployments}
    assert (ROOT / run_file).exists()
    assert f'name="{flow}"' in (ROOT / "flows" / "finetune_to_serve.py").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links_of_the_docs_exist(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert "://" in link or (path.parent / link).exists(), link
