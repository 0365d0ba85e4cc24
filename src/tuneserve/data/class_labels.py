"""Class labels: integers from 0 to n-1 and nothing that merely looks like one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tuneserve.data.codes import RowError


def check_class_labels(values: Iterable[Any], classes: int) -> Counter[int]:
    """Count labels that are all integers in 0..classes-1.

    Raises:
        RowError: The first value that is not an integer (booleans, floats, strings and NaN are
            not), or lies outside; the message holds a histogram of the integers seen.
    """
    histogram: Counter[int] = Counter()
    wrong: tuple[int, int] | None = None
    for row, value in enumerate(values):
        if type(value) is not int:  # bool is a subclass of int
            raise RowError(
                "class_label_type",
                f"label {row} is {value!r} ({type(value).__name__}), not an integer",
                path=("label",),
            )
        histogram[value] += 1
        if wrong is None and not 0 <= value < classes:
            wrong = (row, value)
    if wrong:
        counts = ", ".join(f"{value}: {count}" for value, count in sorted(histogram.items())[:20])
        raise RowError(
            "class_label_range",
            f"label {wrong[0]} is {wrong[1]}, outside 0 to {classes - 1}; labels seen: {counts}",
            path=("label",),
        )
    return histogram


def describe_labels(rows: list[dict[str, Any]]) -> str:
    """A histogram of some rows' labels, and what a classifier would find wrong with them."""
    values = [row.get("label") for row in rows]
    counts = Counter(repr(value) for value in values)
    shown = ", ".join(f"{value}: {count}" for value, count in counts.most_common(10))
    try:
        check_class_labels(values, len(counts))
    except RowError as error:
        return f"labels seen: {shown}; {error.code}: {error.message}"
    return f"labels seen: {shown}"
