"""What became of each attempt at one training: for its manifest, for the error at the bottom of the
memory ladder, and for whoever decides whether another attempt makes sense.

The attempt under way is in `rung.json`, those that ended are lines of `attempts.jsonl`, both in the
training's work folder. The process that trains adds a line for what it sees, the one that waits for
it for a child that was killed. Nothing heavy is imported.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.errors import OutOfMemory
from tuneserve.stops import this_attempt
from tuneserve.train import oom
from tuneserve.train.checkpoints import newest_sealed

MOST_FRUITLESS = 2
"""As many attempts in a row may be killed that came no further than those before. One may have been
another's doing, who took the memory and is gone; what happens twice the same will happen again."""

_UNDER_WAY, _ENDED = "rung.json", "attempts.jsonl"
_BOTTOM = {"bottom": True}
_WHEN = {"load": "while the base was loaded", "smoke": "in its first step"}


@dataclass(frozen=True)
class Ended:
    """An attempt that ended.

    Attributes:
        attempt: Its name (`tuneserve.stops`).
        rung: Of the memory ladder, in words; empty where it ended before it was at one.
        from_step: The step of the newest checkpoint when it began; 0 without one.
        to_step: The same when it ended.
        end: How, in words.
        fits: Whether it ended for another reason than too little memory.
        killed: Whether by SIGKILL.
    """

    attempt: str
    rung: str
    from_step: int
    to_step: int
    end: str
    fits: bool = True
    killed: bool = False

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.rung, self.end]))


def begin(work: Path, rung: str, phase: str, **facts: Any) -> None:
    """Note the attempt under way: its rung in words and in `facts`, and how far it is.

    Args:
        work: The work folder.
        rung: In words.
        phase: ``load`` first; then ``smoke``, ``train``, ``ended``.
        facts: What the next attempt needs to know of the rung.
    """
    before = under_way(work)
    known = before and phase != "load" and before.get("attempt") == this_attempt()
    step = before.get("from_step", 0) if before and known else reached(work)
    state = {"rung": rung, "from_step": step, "phase": phase, "attempt": this_attempt()}
    write_json_atomic(work / _UNDER_WAY, {**facts, **state})


def under_way(work: Path) -> dict[str, Any] | None:
    """What `begin` noted last; None where there is nothing to conclude from."""
    try:
        found = json.loads((work / _UNDER_WAY).read_text(encoding="utf-8"))
        numbers = int(found["micro_batch"]) > 0 <= int(found.get("from_step", 0))
        if not numbers or not isinstance(found["phase"], str):
            return None
    except (OSError, ValueError, KeyError, TypeError):  # a file that the disk left half written
        return None
    return dict(found)


def forget(work: Path) -> None:
    """The attempt under way ended by itself: the next one has nothing to conclude from it."""
    (work / _UNDER_WAY).unlink(missing_ok=True)


def reached(work: Path) -> int:
    """The step that the next attempt goes on from; 0: from the beginning."""
    return newest_sealed(work) or 0


def when(phase: str) -> str:
    """When it was that an attempt was killed in this phase, in words."""
    return _WHEN.get(phase, "later on")


def end(
    work: Path,
    rung: str,
    from_step: int,
    how: str,
    *,
    fits: bool = True,
    killed: bool = False,
    attempt: str | None = None,
) -> None:
    """Note how an attempt ended, this process's own by default; what was noted of it before goes.

    Never fails: a full disk, which most likely ended the attempt, must not hide why.
    """
    name = this_attempt() if attempt is None else attempt
    with contextlib.suppress(OSError):
        one = Ended(name, rung, from_step, reached(work), how, fits, killed)
        _add(work, asdict(one))


def note_kill(work: Path, attempt: str, number: int, *, for_memory: bool) -> int:
    """Note that a signal ended an attempt's process.

    Args:
        work: The work folder.
        attempt: The attempt's name.
        number: The signal.
        for_memory: Whether the kernel counted a kill for want of memory meanwhile.

    Returns:
        How many attempts in a row were killed without coming further, for want of memory if this
        one was, else by whomever; `MOST_FRUITLESS` where that cannot be kept.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
        step = reached(work)
        state = under_way(work) or {}
        began = state.get("attempt") == attempt
        how = f"killed {when(state['phase']) if began else 'before it began'}"
        how += ", for want of memory" if for_memory else f", by signal {number}"
        rung = str(state.get("rung", "")) if began else ""
        since = int(state.get("from_step", step)) if began else step
        killed = number == signal.SIGKILL
        _add(work, asdict(Ended(attempt, rung, since, step, how, not for_memory, killed)))
        return _fruitless(work, for_memory=for_memory)
    except OSError:
        return MOST_FRUITLESS


def is_known(work: Path, attempt: str) -> bool:
    """Whether it is noted how this attempt ended."""
    return any(one.attempt == attempt for one in _ended(work))


def died_again(work: Path) -> bool:
    """Whether the last attempt was killed, most likely for want of memory, at the rung and step of
    the one before, which was as well.
    """
    ended = [
        (one.killed, one.fits, one.rung, one.to_step) for one in _ended(work, since_bottom=True)
    ]
    return len(ended) > 1 and ended[-1] == ended[-2] and ended[-1][:2] == (True, False)


def to_json(work: Path) -> list[dict[str, Any]]:
    """Every attempt at this training, of earlier calls as well, as the manifest has it."""
    kept = ("rung", "from_step", "to_step", "end", "fits")
    return [{name: getattr(one, name) for name in kept} for one in _ended(work)]


def did_not_fit(work: Path) -> list[str]:
    """What did not fit, and how that showed, since the bottom of the ladder was last reached."""
    return [str(one) for one in _ended(work, since_bottom=True) if not one.fits]


def give_up(work: Path, hints: Mapping[str, Any]) -> OutOfMemory:
    """The error where nothing smaller is left; the next call begins at the top: more may be free.

    Args:
        work: The work folder.
        hints: The plan's, whose `advice` names what else would take less.
    """
    tried, first = did_not_fit(work), oom.read_report(work)
    with contextlib.suppress(OSError):  # what the error says is worth more
        forget(work)
        _add(work, _BOTTOM)
    planned = [f"{number}. {text}" for number, text in enumerate(hints.get("advice", []), 1)]
    ways = [
        "one of these, mildest first:",
        *(planned or ["lower data.max_length or train.lora.r"]),
        "or a smaller model.base; `tuneserve plan` shows what takes how much",
    ]
    return OutOfMemory(
        "training does not fit:\n    "
        + "\n    ".join([*tried, *([f"the first time, {first['what']}"] if first else [])]),
        expected="one row a forward pass, with gradient checkpointing, to fit",
        hint="\n    ".join(ways),
        details={"tried": tried, "first_oom": first},
    )


def _fruitless(work: Path, *, for_memory: bool) -> int:
    """Attempts in a row that were killed before a rung that was new, or a step; with `for_memory`,
    those alone that were so for want of it: who kills by hand says nothing about memory.
    """
    count, seen = 0, {""}
    for one in _ended(work, since_bottom=True):
        if one.to_step > one.from_step or one.rung not in seen:
            count = 0
        elif one.killed and not (for_memory and one.fits):
            count += 1
        seen.add(one.rung)
    return count


def _add(work: Path, line: Mapping[str, Any]) -> None:
    path = work / _ENDED
    half = path.exists() and not path.read_bytes().endswith(b"\n")  # of a disk that was full
    with path.open("a", encoding="utf-8") as stream:
        stream.write("\n" * half + json.dumps(line) + "\n")


def _ended(work: Path, *, since_bottom: bool = False) -> list[Ended]:
    """The attempts in their order; of two lines about the same one the later counts."""
    found: dict[tuple[Any, ...], Ended] = {}
    bottoms = 0
    try:
        lines = (work / _ENDED).read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            told = json.loads(line)
            if told == _BOTTOM:
                bottoms += 1
                if since_bottom:
                    found.clear()
                continue
            one = Ended(**told)
        except (ValueError, TypeError):  # half a line, or one that the disk lost
            continue
        found[bottoms, one.attempt, one.rung, one.from_step] = one
    return list(found.values())
