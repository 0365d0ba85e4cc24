"""Commands that errors, notes and pages tell people to type are commands that we take."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tuneserve.__main__ import app

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "tuneserve").rglob("*.py"))
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# A value that is known only when the text is made.
UNKNOWN = "X"
UsageError = typer.BadParameter.__mro__[1]  # typer carries its own click


def problem_of(command: str) -> str:
    """Why the command line does not take what follows `tuneserve`; empty: it does. What is missing
    is no problem: texts name verbs alone.
    """
    words = shlex.split(re.sub(r"[\[\]]", "", command), comments=True)
    if words[:1] in ([UNKNOWN], ["VERB"], []) or words[0].startswith("-"):
        return ""
    if words[0] not in VERBS:
        return f"no verb {words[0]!r}"
    verb = VERBS[words[0]]
    parser = verb.make_parser(typer.Context(verb, info_name=words[0]))
    try:
        extra = parser.parse_args(args=[w for w in words[1:] if w != "--help"])[1]
    except UsageError as error:
        return str(error)
    return f"{extra} is more than it takes" if extra else ""


def text_of(node: ast.AST) -> str:
    """A string literal, of which an f-string's values are `UNKNOWN`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or UNKNOWN for part in node.values)
    return ""


def said_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        yield from re.findall(r"`tuneserve ([^`]+)`", text_of(node))
        yield from re.findall(r"^Example: tuneserve (.+)", text_of(node))


def shown_in(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r"`tuneserve ([^`\n]+)`", text)
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from re.findall(r"^(?:\.venv/bin/)?tuneserve (.+)", block, re.MULTILINE)
    for line in re.findall(r"^    tuneserve (.+)", text, re.MULTILINE):
        yield re.split(r"  +", line)[0]  # what it does follows in a column


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_what_we_say_to_type_is_taken(path: Path) -> None:
    assert [(c, why) for c in said_in(path) if (why := problem_of(c))] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_what_pages_show_is_taken(path: Path) -> None:
    assert [(c, why) for c in shown_in(path) if (why := problem_of(c))] == []


def test_many_are_found_and_wrong_ones_are_seen() -> None:
    assert sum(len(list(said_in(path))) for path in SOURCES) > 50
    assert sum(len(list(shown_in(path))) for path in PAGES) > 30
    for wrong in ("down support", "down [NAME]", "logs a b", "gc --keep-day 3", "serve"):
        assert problem_of(wrong), wrong
    for right in ("down --name X", "logs", "logs X --follow", "gc --keep-days 3 --yes", "plan"):
        assert not problem_of(right), right
