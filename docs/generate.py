"""Write what the code says of itself into docs/ and deploy/runs/: `python docs/generate.py`.

The run file's fields, the error classes, the measured tables of the 7B page, and what the plan
predicts in the headers of the shipped run files.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo

from tuneserve.config import RunFile, Size
from tuneserve.errors import TuneserveError, error_classes
from tuneserve.plan.build import Plan, plan_for
from tuneserve.plan.machine import Gpu, Machine
from tuneserve.runfile import load_run_file
from tuneserve.section import Section

HERE = Path(__file__).parent
HEAD = """\
# The run file

One YAML file says what varies from run to run. `tuneserve init DATA` writes one that fits your
data and your card; [deploy/runs/](../deploy/runs/) has one for each size of card. A field that is
not known, or a value that is not allowed, is refused before anything starts, all of them at once.
Relative paths are taken from the run file's own folder. Secrets are never in it: it names the
environment variables that hold them.

Only `name`, `model.base` and `data.train` are required.

<!-- Generated from src/tuneserve/config.py by docs/generate.py; do not edit by hand. -->
"""
_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_BOUNDS = {Ge: ("ge", ">= "), Gt: ("gt", "> "), Le: ("le", "<= "), Lt: ("lt", "< ")}


def reference() -> str:
    """The page."""
    parts = [HEAD]
    plain = [(n, f) for n, f in RunFile.model_fields.items() if _section(f.annotation) is None]
    parts.append("\n## Top\n\n" + _table(plain))
    for name, field in RunFile.model_fields.items():
        if (section := _section(field.annotation)) is not None:
            parts += _section_text(name, section, field)
    return "".join(parts)


def _section_text(path: str, section: type[Section], field: FieldInfo) -> Iterator[str]:
    """A section's heading, its purpose and its fields; sections inside it follow."""
    about = " ".join((section.__doc__ or field.description or "").split())
    inner = [(n, f) for n, f in section.model_fields.items() if _section(f.annotation)]
    same = {_section(f.annotation) for _, f in inner}
    yield f"\n## {path}\n\n{about}\n\n"
    rows = [(n, f) for n, f in section.model_fields.items() if not _section(f.annotation)]
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
        kind = _section(sub.annotation)
        assert kind is not None
        yield from _section_text(f"{path}.{name}", kind, sub)


def _table(fields: list[tuple[str, FieldInfo]]) -> str:
    lines = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for name, field in fields:
        cells = (f"`{name}`", _type(field), _default(field), _cell(field.description or ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _type(field: FieldInfo) -> str:
    bounds = []
    for item in field.metadata:
        for kind, (attribute, sign) in _BOUNDS.items():
            if isinstance(item, kind):
                bounds.append(f"{sign}{getattr(item, attribute):g}")
        if isinstance(item, MinLen) and item.min_length > 1:
            bounds.append(f"at least {item.min_length}")
        if isinstance(item, MaxLen):
            bounds.append(f"at most {item.max_length}")
    text = _words(field.annotation, field)
    return _cell(text + (f", {', '.join(bounds)}" if bounds else ""))


def _words(kind: Any, field: FieldInfo | None = None) -> str:
    metadata = field.metadata if field else []
    if any(type(item).__name__ == "BeforeValidator" for item in metadata):
        return "size, such as `700MiB` or bytes"
    if kind == Size or get_origin(kind) is Annotated:
        return _words(get_args(kind)[0])
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " \\| ".join(f"`{_yaml(value)}`" for value in inner).replace("\\|", "or")
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part) for part in inner if part is not type(None))
    if origin is list:
        return f"list of {_plural(_words(inner[0]))}"
    if origin is dict:
        return f"names and their {_plural(_words(inner[1]))}"
    if (section := _section(kind)) is not None:
        return "{" + ", ".join(f"`{name}`" for name in section.model_fields) + "}"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _plural(words: str) -> str:
    return {"text": "texts", "number": "numbers", "whole number": "whole numbers"}.get(words, words)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value in (None, "") else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _entry(kind: Any) -> type[Section] | None:
    """The section that a list holds, if it does."""
    return _section(get_args(kind)[0]) if get_origin(kind) is list else None


def _section(kind: Any) -> type[Section] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


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
RUNS = HERE.parent / "deploy" / "runs"
SMALLEST_GIB = {
    "gpu-24gb.yaml": 22.4,
    "gpu-32gb.yaml": 31.8,
    "gpu-48gb.yaml": 39.4,
    "gpu-80gb.yaml": 79.6,
    "two-gpus.yaml": 22.4,
}


def run_file(name: str) -> str:
    """A shipped run file whose header says what the plan says of the smallest card of its size."""
    text = (RUNS / name).read_text(encoding="utf-8")
    plan = _planned(RUNS / name, SMALLEST_GIB[name])
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
    return re.sub(r"# Predicted: [^\n]*\n", line, text)


def _planned(path: Path, gib: float) -> Plan:
    run = load_run_file(path)
    shape = f"{run.model.base.rsplit('/', 1)[-1]}.json"
    size = int(gib * 2**30)
    card = Gpu(f"a {gib:.0f} GiB GPU", size, size)
    machine = Machine(card, 64 * 2**30, 60 * 2**30, 200 * 2**30, "store", supposed=True)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(HERE.parent / "tests" / "shapes" / shape, Path(folder) / "config.json")
        return plan_for(run, base_dir=Path(folder), machine=machine)


def walkthrough() -> str:
    """The 7B page with its tables filled from what was measured and what the plan says."""
    text = (HERE / "walkthrough-7b.md").read_text(encoding="utf-8")
    for name, make in _BLOCKS.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        after = rest.partition("<!-- end -->")[2]
        text = f"{before}<!-- {name} -->\n{make()}<!-- end -->{after}"
    return text


def _plan_table() -> str:
    table = _planned(RUNS / "gpu-24gb.yaml", 24).to_json()["table"]
    return f"```\n{table}\n```\n"


def _train_table() -> str:
    """Timed steps of the 7B shape, with the plan's figure for the same setting beside them."""
    results = HERE.parent / "bench" / "results"
    points = json.loads((results / "h200_plan_points.json").read_text(encoding="utf-8"))["points"]
    rows = json.loads((results / "plan.json").read_text(encoding="utf-8"))["rows"]
    predicted = {row["setting"]: row["predicted_gib"] for row in rows}
    lines = [
        "| base | adapter | recomputed | predicted | measured | a step | a million tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in points:
        if point["shape"] != "qwen2-7b" or "seconds_per_step" not in point:
            continue
        kept = {"true": "checkpointing", "false": "all kept", "offload": "checkpoints on the host"}
        bits = "16 bits" if point["method"] == "lora" else "NF4"
        targets = point["targets"].replace("_proj", "").replace(",", ", ")
        adapter = f"r={point['rank']} on {targets}"
        gib = point["peak_reserved_bytes"] / 2**30
        guess = _predicted(predicted, point, kept[point["checkpointing"]])
        lines.append(
            f"| {bits} | {adapter} | {kept[point['checkpointing']]} | {guess} | {gib:.1f} GiB | "
            f"{point['seconds_per_step']:.3f} s | {1e6 / point['tokens_per_second']:.0f} s |"
        )
    command = "`python tests/gpu/train_step.py`"
    where = "[bench/results/h200_plan_points.json](../bench/results/h200_plan_points.json)"
    note = f"Reserved by torch's allocator; {command}, {where}."
    return "\n".join([*lines, "", note]) + "\n"


def _predicted(known: dict[str, float], point: dict[str, Any], kept: str) -> str:
    bits = "bf16" if point["method"] == "lora" else "nf4"
    targets = point["targets"].replace("_proj", "").replace(",", " ")
    size = f"{point['micro_batch']} x {point['length']}"
    name = f"{point['shape']} {bits} r{point['rank']} {targets}, {size}, {kept}"
    return f"{known[name]:.1f} GiB" if name in known else "-"


def _merge() -> str:
    """The merge of a 7B shape beside the copy of its files."""
    path = HERE.parent / "bench" / "results" / "merge_h200_host.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    return (
        f"Measured on the H200's host, cold cache: {found['checkpoint_bytes'] / 1e9:.1f} GB merged "
        f"in {found['merge_seconds']:.0f} s, where `cp -r && sync` of the same files took "
        f"{found['copy_seconds']:.0f} s; {found['peak_rss_bytes'] / 2**20:.0f} MiB of memory at "
        f"most (`{found['command']}`,\n"
        "[bench/results/merge_h200_host.json](../bench/results/merge_h200_host.json)).\n"
        "That was before the merge went past the page cache, which was not measured on that host.\n"
    )


def _result(name: str) -> dict[str, Any]:
    path = HERE.parent / "bench" / "results" / name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _quantize() -> str:
    """Steps of a GPTQ export of some layers of the 7B shape, beside bare GPTQModel's."""
    found = _result("quantize_h200_gptq.json")
    sides = {name: _laps(found["peaks"][name]["laps"]) for name in ("ours", "bare")}
    shared = list(sides["bare"])
    around = {name: sum(t for n, t in laps.items() if n not in shared)
              for name, laps in sides.items()}  # fmt: skip
    lines = [f"| GPTQ of {found['layers']} of the 28 layers | tuneserve | bare |", "|---|---|---|"]
    for name in shared:
        lines.append(f"| {name} | {sides['ours'][name]:.1f} s | {sides['bare'][name]:.1f} s |")
    lines.append(f"| checks, comparison of losses, records | {around['ours']:.1f} s | - |")
    ours, bare = (f"{found['peaks'][n]['peak_gpu_bytes'] / 2**30:.1f} GiB" for n in sides)
    lines.append(f"| GPU memory, peak | {ours} | {bare} |")
    return "\n".join(lines) + "\n"


def _laps(text: str) -> dict[str, float]:
    """Seconds by step of ``loading 0.2 s, quantizing 1 min 04 s``."""
    found = {}
    for part in text.split(", "):
        match = re.fullmatch(r"(.*?) (?:(\d+) min )?([\d.]+) s", part)
        assert match is not None, part
        found[match[1]] = 60 * int(match[2] or 0) + float(match[3])
    return found


def _serve() -> str:
    """Speed of the 16-bit and of the 4-bit 7B shape, served with a release's own command."""
    found = _result("serve_h200.json")
    counts = [key.removeprefix("at_") for key in found["models"][0] if key.startswith("at_")]
    head = " | ".join(f"tokens/s, {n} at once" for n in counts)
    lines = [
        f"| model | weights | first answer after | first token, alone | {head} |",
        "|---|---|---|---|" + "---|" * len(counts),
    ]
    for model in found["models"]:
        bits = "4 bits" if model["quantization"] else "16 bits"
        speeds = " | ".join(f"{model[f'at_{n}']['tokens_per_second']:,.0f}" for n in counts)
        first = model[f"at_{counts[0]}"]["first_token_seconds"]
        lines.append(
            f"| {bits} | {model['weights_bytes'] / 2**30:.1f} GiB | "
            f"{model['seconds_to_first_answer']:.0f} s | {1000 * first:.0f} ms | {speeds} |"
        )
    return "\n".join(lines) + "\n"


_BLOCKS = {
    "plan": _plan_table,
    "train": _train_table,
    "merge": _merge,
    "quantize": _quantize,
    "serve": _serve,
}
PAGES = {"run-file.md": reference, "errors.md": errors, "walkthrough-7b.md": walkthrough}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
    for name in SMALLEST_GIB:
        (RUNS / name).write_text(run_file(name), encoding="utf-8")
