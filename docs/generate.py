"""Write what the code says of itself into docs/ and deploy/runs/: `python docs/generate.py`.

The run file's fields, the error classes, the measured tables of the 7B page, and what the plan
predicts in the headers of the shipped run files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from tuneserve.allowed import allowed_values, section_of, yaml_value
from tuneserve.config import RunFile
from tuneserve.errors import TuneserveError, error_classes
from tuneserve.plan.plan import Plan
from tuneserve.plan.speed import step_seconds
from tuneserve.plan.times import about, stage_times
from tuneserve.runfile import load_run_file
from tuneserve.section import Section, entry_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the tests load this file by its path
from plan_tables import PLAN_BLOCKS  # noqa: E402
from walkthrough_tables import BLOCKS, RUNS, planned  # noqa: E402

HEAD = """\
# The run file

One YAML file says what varies from run to run. `tuneserve init DATA` writes one that fits your
data and your card; [deploy/runs/](../deploy/runs/) has one for each size of card. A field that is
not known, or a value that is not allowed, is refused before anything starts, all of them at once.
Relative paths are taken from the run file's own folder. Secrets are never in it: it names the
environment variables that hold them.

Plain values are read as YAML 1.2 has them: `no` and `22:22` are text, `012` is 12, `1e-4` a number.
Where text is taken, a number is the text that stands there: `revision: 1.10` needs no quotes.

Only `name`, `model.base` and `data.train` are required.

<!-- Generated from src/tuneserve/config.py by docs/generate.py; do not edit by hand. -->
"""


def reference() -> str:
    """The page."""
    parts = [HEAD]
    plain = [(n, f) for n, f in RunFile.model_fields.items() if section_of(f.annotation) is None]
    parts.append("\n## Top\n\n" + _table(plain))
    for name, field in RunFile.model_fields.items():
        if (section := section_of(field.annotation)) is not None:
            parts += _section_text(name, section, field)
    return "".join(parts)


def _section_text(path: str, section: type[Section], field: FieldInfo) -> Iterator[str]:
    """A section's heading, its purpose and its fields; sections inside it follow."""
    about = " ".join((section.__doc__ or field.description or "").split())
    inner = [(n, f) for n, f in section.model_fields.items() if section_of(f.annotation)]
    same = {section_of(f.annotation) for _, f in inner}
    yield f"\n## {path}\n\n{about}\n\n"
    rows = [(n, f) for n, f in section.model_fields.items() if not section_of(f.annotation)]
    if rows:
        yield _table(rows)
    if len(inner) > 1 and len(same) == 1:  # one table for all that are alike, such as `engines`
        names = ", ".join(f"`{path}.{n}` ({f.description})" for n, f in inner)
        yield f"{names}. Each has:\n\n".replace(".)", ")")
        only = same.pop()
        assert only is not None
        yield _table(list(only.model_fields.items()))
        return
    for name, field in section.model_fields.items():
        if (entry := _entry(field.annotation)) is not None:
            yield f"\nEach entry of `{path}.{name}`:\n\n" + _table(list(entry.model_fields.items()))
    for name, sub in inner:
        kind = section_of(sub.annotation)
        assert kind is not None
        yield from _section_text(f"{path}.{name}", kind, sub)


def _table(fields: list[tuple[str, FieldInfo]]) -> str:
    lines = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for name, field in fields:
        cells = (
            f"`{name}`",
            _cell(allowed_values(field, mark="`")),
            _default(field),
            _cell(field.description or ""),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value in (None, "") else f"`{yaml_value(value)}`"


def _entry(kind: Any) -> type[Section] | None:
    """The section that a list holds, if it does."""
    return section_of(entry_of(kind))


ERRORS_HEAD = """\
# Errors and exit statuses

Every error says what was found and where, what was expected, and what to do. With `--json` the
same is one object on stdout: `{"error": {"kind", "message", "expected", "hint", "details"}}`.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | a bug of ours, or a process that was killed |
| 2 | your input: data, run file, model, adapter, or the words of the command |
| 3 | not enough memory, disk or GPU |
| 4 | a gate refused the candidate; what was serving goes on serving |
| 5 | an outside service failed: hub, server, port |
| 130, 143 | Ctrl-C or a request to end (128 and the signal's number); the same command goes on |

Prefect retries only what can pass by itself. What to do about a symptom:
[troubleshooting.md](troubleshooting.md).

<!-- Generated from src/tuneserve/errors.py by docs/generate.py; do not edit by hand. -->
"""


def errors() -> str:
    """The page of error classes, in the order of the tree."""
    parts = [ERRORS_HEAD]
    found = error_classes()
    todo = [TuneserveError]
    while todo:
        cls = todo.pop(0)
        below = [sub for sub in cls.__subclasses__() if sub is found.get(sub.__name__)]
        todo = below + todo
        if cls is TuneserveError:
            continue
        parent = cls.__bases__[0]
        kind = (
            ""
            if parent is TuneserveError
            else f" One kind of [`{parent.__name__}`](#{_anchor(parent)})."
        )
        again = "Retried." if cls.retryable else "Not retried."
        about = " ".join((cls.__doc__ or "").split())
        parts.append(
            f"\n## {cls.__name__}\n\n{about}{kind} Exit {cls.exit_status}. {again} "
            f"What to do, where the message does not say more: {cls.usual_hint}.\n"
        )
    return "".join(parts)


def _anchor(cls: type) -> str:
    return cls.__name__.lower()


# The smallest cards of each size, in GiB as their driver says: A10 and L4, RTX 5090, A100, H100.
SMALLEST_GIB = {
    "gpu-24gb.yaml": 22.4,
    "gpu-32gb.yaml": 31.8,
    "gpu-48gb.yaml": 39.4,
    "gpu-80gb.yaml": 79.6,
    "two-gpus.yaml": 22.4,
}
# Cards whose time is said, by the names that `plan/speed.py` knows.
TIMED = {
    "gpu-24gb.yaml": ("RTX 4090", "RTX 3090", "A10", "L4"),
    "gpu-32gb.yaml": ("RTX 5090",),
    "gpu-48gb.yaml": ("A100", "L40S", "A6000"),
    "gpu-80gb.yaml": ("H100", "H200", "A100"),
    "two-gpus.yaml": ("RTX 4090", "RTX 3090", "A10", "L4"),
}


def run_file(name: str) -> str:
    """A shipped run file whose header says what the plan says of the smallest card of its size,
    and how long it says that others take.
    """
    text = (RUNS / name).read_text(encoding="utf-8")
    plan = planned(RUNS / name, SMALLEST_GIB[name])
    train, evaluate, serve = (
        f"{plan.stages[stage].peak.needed_bytes / 2**30:.0f}"
        for stage in ("train", "evaluate", "serve")
    )
    disk, download = plan.disk_bytes / 2**30, plan.download_bytes / 2**30
    each = "each" if plan.step.gpus > 1 else "the"
    line = (
        f"# Predicted: train {train} GiB, evaluate {evaluate} GiB, serve {serve} GiB of {each} "
        f"card; disk {disk:.0f} GiB, {download:.0f} of it download.\n"
    )
    cards = ", ".join(
        f"{minutes_a_million(plan, card):.0f}{' min' if first else ''} on an {card}"
        for first, card in zip((True, *[False] * 9), TIMED[name], strict=False)
    )
    if plan.step.gpus > 1:
        cards = cards.replace(" on an ", f" on {plan.step.gpus} x ")
    time = f"# Time: by the plan a million training tokens take {cards}.\n"
    beside = ", ".join(f"{rest_of_the_run(name, plan, card)} on an {card}" for card in TIMED[name])
    merge = about(plan.times.stages["merge"] or 0)
    rest = f"# Beside training: {beside}; the merge is {merge} of it, whatever the card.\n"
    text = re.sub(r"# Predicted: [^\n]*\n", line, text)
    text = re.sub(r"# Beside training: [^\n]*\n", "", text)
    text = re.sub(r"# Time: [^\n]*\n", lambda _: time + rest, text)
    return re.sub(r"--gpu-memory \S+", f"--gpu-memory {SMALLEST_GIB[name]:g}GiB", text, count=1)


def minutes_a_million(plan: Plan, card: str) -> float:
    """Minutes of training for a million tokens on a card, or on the several that share a step."""
    step = plan.step
    seconds = step_seconds(plan.arch, step, card)
    assert seconds is not None, card
    return 1e6 * seconds / (step.tokens * step.accumulation * step.gpus) / 60


def rest_of_the_run(name: str, plan: Plan, card: str) -> str:
    """Merge, evaluate, quantize and the server's start on a card, with rows of the full length."""
    times = stage_times(
        load_run_file(RUNS / name),
        plan.arch,
        plan.step,
        card,
        steps_seconds=None,
        row_tokens=plan.step.length,
    )
    return about(sum(seconds or 0 for seconds in times.stages.values()))


def walkthrough() -> str:
    """The 7B page with its tables filled from what was measured and what the plan says."""
    return _filled("walkthrough-7b.md", BLOCKS)


def plan_page() -> str:
    """The plan's page with its table of the stages after training."""
    return _filled("plan.md", PLAN_BLOCKS)


def _filled(page: str, blocks: dict[str, Callable[[], str]]) -> str:
    text = (HERE / page).read_text(encoding="utf-8")
    for name, make in blocks.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        after = rest.partition("<!-- end -->")[2]
        text = f"{before}<!-- {name} -->\n{make()}<!-- end -->{after}"
    return text


PAGES = {
    "run-file.md": reference,
    "errors.md": errors,
    "walkthrough-7b.md": walkthrough,
    "plan.md": plan_page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
    for name in SMALLEST_GIB:
        (RUNS / name).write_text(run_file(name), encoding="utf-8")
