"""What every part of the run file is."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from tuneserve.yamltext import Position, written_of

NOT_A_NUMBER = "true_or_false_for_a_number"


class Written:
    """Where fields stand in a file. It says nothing of what they are: all are equal."""

    def __init__(self, source: str = "", places: Mapping[str, Position] | None = None) -> None:
        self._source, self._places = source, dict(places or {})

    def where(self, path: str) -> str:
        """The path of a field, with file, line and column where they are known."""
        around = path
        while around and around not in self._places:
            around = around.rpartition(".")[0]
        if not around:
            return path
        line, column = self._places[around]
        return f"{self._source}:{line}:{column}: {path}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written)

    __hash__ = None  # type: ignore[assignment]


class Section(BaseModel):
    """A part of the run file: frozen, and a field it does not know is an error."""

    # A value that is refused may hold a secret, and who shows the error may keep it.
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1."""
        if isinstance(value, bool):
            taken = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
            if taken & {int, float} and bool not in taken:
                raise PydanticCustomError(NOT_A_NUMBER, "true and false are no numbers")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _text_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """A revision 1.10 is not 1.1, and one of 012 not 12."""
        return _as_written(cls.model_fields[str(info.field_name)].annotation, value)


def _as_written(annotation: Any, value: Any) -> Any:
    """The text of a number where text alone is taken, also of a list's entries."""
    if isinstance(value, list):
        entry = entry_of(annotation)
        return value if entry is None else [_as_written(entry, item) for item in value]
    taken = set(_kinds(annotation))
    written = written_of(value) if str in taken and not taken & {int, float} else None
    return value if written is None else written


def _kinds(annotation: Any) -> Iterator[Any]:
    """An annotation's types, without those inside lists."""
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation if isinstance(annotation, type) else None


def field_paths(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    """Dotted paths of a section's fields and of those of the sections in it."""
    for name, field in kind.model_fields.items():
        yield before + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from field_paths(field.annotation, f"{before}{name}.")


def entry_of(kind: Any) -> Any:
    """The annotation of a list's entries, also where the list is one of several ways; else None."""
    if get_origin(kind) is list:
        return get_args(kind)[0]
    if get_origin(kind) is Annotated:
        return entry_of(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return next(filter(None, map(entry_of, get_args(kind))), None)
    return None
