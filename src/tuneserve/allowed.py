"""What a field of the run file takes, in words: of the reference page and of errors alike."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from tuneserve.section import Section
from tuneserve.sizes import parse_size

_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_PLURALS = {"text": "texts", "number": "numbers", "whole number": "whole numbers"}
# Names of runs and of what is served: the only patterns that fields have.
_NAME_PATTERN = re.compile(r"\^\[a-z0-9\]\[a-z0-9-\]\{0,(\d+)\}\$")


def allowed_values(field: FieldInfo, *, mark: str = "") -> str:
    """Values that a field takes: ``whole number, >= 1``.

    Args:
        field: Of a section.
        mark: Put around each word that is written as it stands.
    """
    return allowed_of(field.annotation, field.metadata, mark=mark)


def allowed_of(kind: Any, metadata: Sequence[Any] = (), *, mark: str = "") -> str:
    """Values that an annotation takes.

    Args:
        kind: The annotation.
        metadata: Bounds and validators beside it.
        mark: See `allowed_values`.
    """
    if get_origin(kind) is Annotated:
        kind, *inside = get_args(kind)
        return allowed_of(kind, [*inside, *metadata], mark=mark)
    words = _words(kind, mark) + _pattern(metadata)
    if any(isinstance(item, BeforeValidator) and item.func is parse_size for item in metadata):
        words = f"size, such as {mark}700MiB{mark} or bytes"
    return ", ".join([words, *_bounds(metadata)])


def _words(kind: Any, mark: str) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f"{mark}{yaml_value(value)}{mark}" for value in inner)
    if origin in (Union, types.UnionType):
        ways = [allowed_of(part, mark=mark) for part in inner if part is not type(None)]
        return (", or " if "," in "".join(ways) else " or ").join(ways)
    if origin is list:
        words = allowed_of(inner[0], mark=mark)
        return f"list of {_PLURALS.get(words, words)}"
    if (section := section_of(kind)) is not None:
        return "{" + ", ".join(f"{mark}{name}{mark}" for name in section.model_fields) + "}"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for item in metadata:
        match item:
            case FieldInfo():
                yield from _bounds(item.metadata)
            case Ge(ge=bound):
                yield f">= {bound:.10g}"
            case Gt(gt=bound):
                yield f"> {bound:.10g}"
            case Le(le=bound):
                yield f"<= {bound:.10g}"
            case Lt(lt=bound):
                yield f"< {bound:.10g}"
            case MinLen(min_length=1):
                yield "not empty"
            case MinLen(min_length=least):
                yield f"at least {least}"
            case MaxLen(max_length=most):
                yield f"at most {most}"


def _pattern(metadata: Sequence[Any]) -> str:
    for pattern in filter(None, (getattr(item, "pattern", None) for item in metadata)):
        found = _NAME_PATTERN.fullmatch(pattern)
        assert found, f"say in words what {pattern} takes"
        return (
            " of lower-case letters, digits and dashes, the first no dash, at most "
            f"{int(found.group(1)) + 1} characters"
        )
    return ""


def yaml_value(value: Any) -> str:
    """A value as a run file has it, sizes in MiB."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def section_of(kind: Any) -> type[Section] | None:
    """The section that an annotation is, if it is one."""
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None
