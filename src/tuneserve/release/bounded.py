"""A gate on a number with bounds: passed, refused or undecided. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from tuneserve.release.bootstrap import Interval
from tuneserve.release.decisions import Gate, rounded_up
from tuneserve.thresholds import GatesSection

# Above so many times the conversations that there are, a number needed is no advice.
_FAR_MORE = 100


def bounded(
    config: GatesSection,
    name: str,
    interval: Interval,
    limit: float,
    *,
    found: str,
    wanted: str,
    setting: str = "",
    strict: bool = False,
    most: float | None = None,
) -> Gate:
    """A gate on a number that must not be above `limit`.

    Args:
        config: For `min_conversations` and `allow_undecided`.
        name: Of the gate.
        interval: The number and its bounds.
        limit: Largest value that passes.
        found: What was measured, in words.
        wanted: What passes, in words.
        setting: The run file's field that holds the limit.
        strict: The number must be below the limit, not at it.
        most: The value of `setting` that this candidate needs; unset: the interval's upper end.
    """
    count = interval.conversations
    inside: Callable[[float], bool] = (lambda x: x < limit) if strict else (lambda x: x <= limit)
    needs = interval.high if most is None else most
    would = f"{setting}: {rounded_up(needs)}" if setting and math.isfinite(needs) else ""
    if not inside(interval.mean):
        return Gate(name, False, found, wanted, "refused", would)
    if count >= config.min_conversations and inside(interval.high):
        return Gate(name, True, found, wanted)
    why = _too_few(config, interval, limit)
    if config.allow_undecided:
        said = f"{found}; undecided ({why}), and gates.allow_undecided is set"
        return Gate(name, True, said, wanted, "overridden")
    override = "gates.allow_undecided: true"
    if count < config.min_conversations:
        would = f"{override}, or {config.min_conversations} conversations"
    return Gate(name, False, f"{found}; undecided: {why}", wanted, "undecided", would or override)


def _too_few(config: GatesSection, interval: Interval, limit: float) -> str:
    count = interval.conversations
    held_out = f"{count} held-out conversation{'s' if count != 1 else ''}"
    if count < config.min_conversations:
        return f"{held_out}, and nothing is decided below {config.min_conversations}"
    room, spread = limit - interval.mean, interval.high - interval.mean
    # A bound narrows with the square root of the number of conversations.
    if room > 0 and math.isfinite(spread):
        if spread > room * math.sqrt(_FAR_MORE):
            return f"{held_out} are too few, far more would be needed"
        return f"{held_out} are too few, about {math.ceil(count * (spread / room) ** 2)} would do"
    return f"{held_out} are too few"
