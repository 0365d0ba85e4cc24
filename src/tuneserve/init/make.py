"""From data and machine to a run file on disk."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tuneserve.artifacts import fsync_directory
from tuneserve.checkpoint.basecheck import read_config
from tuneserve.data.codes import CODES
from tuneserve.errors import DataError, OutputExists, TuneserveError
from tuneserve.init import outliers
from tuneserve.init.bases import Base, candidates, open_base
from tuneserve.init.choose import Choice, choose
from tuneserve.init.example import EXAMPLE_NAME, example_text
from tuneserve.init.look import DataLook, look_at_data
from tuneserve.init.write import text_of
from tuneserve.places import store_root
from tuneserve.plan.arch import Arch, arch_from_config
from tuneserve.plan.asjson import as_json
from tuneserve.plan.machine import Machine, look
from tuneserve.plan.stage import card_left_idle, refuse
from tuneserve.progress import human_bytes
from tuneserve.runfile import load_run_file, parse_run

log = logging.getLogger(__name__)

_CODES_SHOWN = 5
# Files that a message names.
_NAMED = 8


@dataclass
class Made:
    """What was written, and what it rests on."""

    run_file: Path
    choice: Choice
    look: DataLook | None
    next_commands: list[str]
    example: Path | None = None
    found: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As `--json` carries it."""
        data = self.look
        return {
            "run_file": str(self.run_file),
            "example": str(self.example) if self.example else None,
            "base": self.choice.run.model.base,
            "device": self.choice.plan.machine.device,
            "data": None
            if data is None
            else {
                "formats": dict(zip(data.sources.names, data.sources.formats, strict=True)),
                "rows_read": data.rows_read,
                "rows_kept": len(data.lengths),
                "distinct": data.distinct,
                "reasons": dict(data.reasons),
                "warnings": dict(data.warnings),
                "longest_tokens": data.longest,
                "tokens_counted": data.counted,
                "tool_calls": data.tool_calls,
                "share_read": data.share,
            },
            "values": self.choice.values,
            "plan": {k: v for k, v in as_json(self.choice.plan).items() if k != "table"},
            "notes": self.choice.notes,
            "next": self.next_commands,
        }

    def text(self) -> str:
        """For a terminal, without the commands that come next."""
        lines = [*self.found, f"wrote {self.run_file}"]
        if self.example:
            lines.append(f"wrote {self.example}: replace its rows with your conversations")
        lines += [f"note: {note}" for note in self.choice.notes]
        return "\n".join(lines)


def make(
    data: list[str], out: Path, *, base: str | None, gpu_memory_bytes: int | None, force: bool
) -> Made:
    """See `tuneserve.init.init_run`."""
    if out.exists() and not force:
        raise OutputExists(
            f"{out} is there already",
            expected="a name that is free",
            hint="choose another name with --out, or replace it with --force",
        )
    folder = out.resolve().parent
    machine = look(store_root(), gpu_memory_bytes=gpu_memory_bytes)
    example = None if data else folder / EXAMPLE_NAME
    paths = [_path_from(folder, path) for path in data] or [EXAMPLE_NAME]
    name = _slug(data[0]) if data else "my-model"
    with tempfile.TemporaryDirectory(prefix="tuneserve-init-") as scratch:
        choice, found = _first_that_fits(
            candidates(base, gpu=machine.gpu is not None),
            name=name, paths=paths, data=data, machine=machine, folder=folder,
            scratch=Path(scratch), chosen=base is not None,
        )  # fmt: skip
    if idle := card_left_idle(choice.run, machine):
        choice.notes.insert(0, f"{idle.message}; {idle.hint}")
    lines = list(_found_lines(choice, found))
    commands = _next(out, gpu_memory_bytes)
    header = [
        f"Made by `{_command(data, base, gpu_memory_bytes, out)}`.",
        *lines,
        f"Next: {commands[0]}",
        "Every field, with its meaning and unit: docs/run-file.md",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _write(out, text_of(choice, header))
    assert load_run_file(out) == choice.run, "the text says what was planned"
    if example and not example.exists():
        _write(example, example_text())
    else:
        example = None
    return Made(out, choice, found, commands, example, lines)


def _first_that_fits(
    names: list[str], *, name: str, paths: list[str], data: list[str], machine: Machine,
    folder: Path, scratch: Path, chosen: bool,
) -> tuple[Choice, DataLook | None]:  # fmt: skip
    """The first base with settings that fit.

    Raises:
        OutOfMemory: None has; the message is the last one's plan, the hint names smaller bases.
    """
    choice: Choice | None = None
    shorter: Choice | None = None
    for candidate in names:
        opened = open_base(candidate, scratch, search_from=Path.cwd())
        arch = arch_from_config(read_config(opened.folder))
        said = candidate if candidate.startswith("builtin:") else _base_from(folder, candidate)
        found = _look(data, opened, arch) if data else None
        chosen_with = partial(
            choose, name=name, base=said, base_dir=opened.folder, arch=arch, data=paths,
            machine=machine, folder=folder,
        )  # fmt: skip
        choice = chosen_with(look=found)
        if found and not shorter and (limit := outliers.usual_limit(found)):
            shorter = chosen_with(look=outliers.without(found, limit))
            shorter = shorter if shorter.plan.fits else None
        if choice.plan.fits:
            if found and shorter and (text := outliers.note(choice, shorter, found)):
                choice.notes.append(text)
            _note_data(choice, found)
            return choice, found
        log.info("%s does not fit on %s", candidate, machine.device)
    assert choice is not None
    try:
        refuse(choice.plan)
    except TuneserveError as error:
        if chosen:
            error.hint += "\n    or choose a smaller model with --base"
        raise
    raise AssertionError("a plan that does not fit is refused")


def _look(data: list[str], opened: Base, arch: Arch) -> DataLook:
    draft = parse_run(
        {
            "name": "init",
            "model": {"base": str(opened.folder)},
            "data": {"train": [_absolute(path) for path in data], "max_length": arch.context},
        },
        source="init",
    )
    try:
        return look_at_data(draft, opened.folder if opened.local else None)
    except DataError as error:
        if "unmatched" in error.details:  # there is no run file yet that could be mended
            error.hint = "check the path; a relative one is taken from the folder you are in"
        if usable := error.details.get("usable"):
            names = [shlex.quote(_path_from(Path.cwd(), path)) for path in usable]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            error.hint += f"; or name those alone that would do: {' '.join(names[:_NAMED])}{more}"
        raise


def _note_data(choice: Choice, found: DataLook | None) -> None:
    if found is None:
        return
    share, limit = found.rejected_share, choice.run.data.max_rejected
    if share > limit:
        worst = "\n  ".join(found.samples[code] for code, _ in found.reasons.most_common(3))
        choice.notes.insert(
            0,
            f"{share:.1%} of the rows are broken, more than data.max_rejected ({limit:.0%}) "
            f"allows; mend them first, `validate` lists every one:\n  {worst}",
        )
    choice.notes += [
        f"{count} rows, {code}: {CODES[code].meaning} What to do: {CODES[code].hint}"
        for code, count in found.warnings.most_common()
    ]
    if not found.counted:
        choice.notes.append(
            "tokens were estimated from the texts' lengths; `validate` fetches the tokenizer, "
            "counts them, and says how many rows are too long"
        )
    choice.notes += [f"template: {note}" for note in found.notes]


def _found_lines(choice: Choice, found: DataLook | None) -> Iterator[str]:
    plan = choice.plan
    if found is not None:
        formats = ", ".join(sorted(set(found.sources.formats)))
        count = f"{found.distinct:,}" if found.share == 1 else f"about {found.rows:,}"
        of = ""
        if found.share == 1 and found.distinct != found.rows_read:
            of = f" of {found.rows_read:,} rows"
        lengths = sorted(found.lengths)
        guess = "" if found.counted else "about "
        yield (
            f"Data: {count} different conversations{of} ({formats}), {guess}{lengths[0]} to "
            f"{lengths[-1]} tokens, half of them up to {lengths[len(lengths) // 2]}"
            + (", with tools" if found.tool_calls else "")
        )
        if found.reasons:
            most = found.reasons.most_common(_CODES_SHOWN)
            yield "Not usable: " + ", ".join(f"{code} {n}" for code, n in most)
    train, serve = plan.stages["train"], plan.stages["serve"]
    where = "GPU memory" if train.device == "GPU" else "memory"
    yield (
        f"Machine: {plan.machine.device}, {human_bytes(train.available_bytes or 0)} of {where} may "
        f"be used to train; training is predicted to take {human_bytes(train.peak.needed_bytes)}, "
        f"serving {human_bytes(serve.peak.needed_bytes)}"
    )
    if (found is None or found.share == 1) and (time := plan.times.line()):
        yield f"Time: {time}, once the data are validated; more in the plan"
    how = "converted, once" if choice.run.model.base.startswith("builtin:") else "downloaded"
    disk = f"Disk needed: {human_bytes(plan.disk_bytes)}"
    yield disk + (
        f", {human_bytes(plan.download_bytes)} of it {how}" if plan.download_bytes else ""
    )


def _next(out: Path, gpu_memory_bytes: int | None) -> list[str]:
    shown = shlex.quote(str(out))
    plan = f"tuneserve plan {shown}"
    if gpu_memory_bytes:
        plan += f" --gpu-memory {gpu_memory_bytes / 2**30:g}GiB"
    return [f"tuneserve validate {shown}", plan, f"tuneserve run {shown}"]


def _command(data: list[str], base: str | None, gpu: int | None, out: Path) -> str:
    """The call that made the file, without paths that are this machine's own."""
    words = ["tuneserve", "init", *(Path(path).name for path in data)]
    words += ["--base", base] if base and not Path(base).is_absolute() else []
    words += ["--gpu-memory", f"{gpu / 2**30:g}GiB"] if gpu else []
    return " ".join(map(shlex.quote, [*words, "--out", out.name]))


def _slug(path: str) -> str:
    """A run's name from a file's."""
    stem = path.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0].lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:32].rstrip("-") or "my-model"


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _path_from(folder: Path, path: str) -> str:
    """A data path as the run file says it: relative where it lies beside or below."""
    if "://" in path:
        return path
    place = Path(_absolute(path))
    return str(place.relative_to(folder)) if place.is_relative_to(folder) else str(place)


def _base_from(folder: Path, base: str) -> str:
    """A base as the run file says it: a folder as a path, a hub id as it is."""
    if not Path(base).is_dir():
        return base
    relative = _path_from(folder, base)
    return relative if relative.startswith("/") else f"./{relative}"


def _write(path: Path, text: str) -> None:
    provisional = path.with_name(f".{path.name}.partial")
    with provisional.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    provisional.rename(path)
    fsync_directory(path.parent)
    log.debug("wrote %s", json.dumps(str(path)))
