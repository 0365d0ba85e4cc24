"""A few rows far longer than the others, which decide what fits on a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tuneserve.init.choose import LENGTH_STEP, SHORTEST, Choice
from tuneserve.init.look import DataLook
from tuneserve.progress import many

# Of fewer rows no one is unusual.
_LEAST_ROWS = 20
_FAR = 2


def usual_limit(look: DataLook) -> int | None:
    """A `data.max_length` for all but the longest hundredth of the rows, in tokens.

    None where the longest row is not more than twice as long, and nothing is gained.
    """
    lengths = sorted(look.lengths)
    if len(lengths) < _LEAST_ROWS:
        return None
    usual = lengths[int(0.99 * (len(lengths) - 1))]
    limit = max(SHORTEST, -(-usual // LENGTH_STEP) * LENGTH_STEP)
    return limit if look.longest > _FAR * limit else None


def without(look: DataLook, limit: int) -> DataLook:
    """The same data without the rows that are longer."""
    return replace(look, lengths=look.within(limit))


def note(choice: Choice, shorter: Choice, look: DataLook) -> str | None:
    """What leaving the long rows out would change; None when it changes nothing."""
    limit = shorter.run.data.max_length
    given = list(_given(choice, shorter))
    if not given or choice.run.data.max_length <= limit:
        return None
    count, of = len(look.lengths) - len(look.within(limit)), len(look.lengths)
    rows, them = ("row of {} is", "it") if count == 1 else ("rows of {} are", "them")
    return (
        f"{count} {rows.format(of)} longer than {limit} tokens; `data.max_length: {limit}` would "
        f"leave {them} out and give {', '.join(given)}"
    )


def _given(choice: Choice, shorter: Choice) -> Iterator[str]:
    old, new = choice.run, shorter.run
    if old.model.base != new.model.base:
        yield f"{new.model.base} instead of {old.model.base}"
    if (old.train.method, new.train.method) == ("qlora", "lora"):
        yield "a base in 16 bits instead of 4"
    before, now = choice.plan.step, shorter.plan.step
    if now.micro_batch > before.micro_batch:
        yield f"{many(now.micro_batch, 'row')} a pass instead of {before.micro_batch}"
    if before.checkpointing and not now.checkpointing:
        yield "nothing recomputed"
    if new.serve.max_concurrent_chats > old.serve.max_concurrent_chats:
        yield (
            f"{new.serve.max_concurrent_chats} chats at once instead of "
            f"{old.serve.max_concurrent_chats}"
        )
    if (old.serve.while_training, new.serve.while_training) == ("stop", "share"):
        yield "no downtime in the next run"
