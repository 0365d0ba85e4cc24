"""What every part of the run file is."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

NOT_A_NUMBER = "true_or_false_for_a_number"


class Written:
    """Where fields stand in a file. It says nothing of what they are: all are equal."""

    def __init__(self, source: str = "", lines: Mapping[str, int] | None = None) -> None:
        self._source, self._lines = source, dict(lines or {})

    def where(self, path: str) -> str:
        """The path of a field, with file and line where they are known."""
        around = path
        while around and around not in self._lines:
            around = around.rpartition(".")[0]
        return f"{self._source}:{self._lines[around]}: {path}" if around else path

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
        """pydantic takes true for 1, and YAML reads `yes` and `on` as true."""
        if isinstance(value, bool):
            taken = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
            if taken & {int, float} and bool not in taken:
                raise PydanticCustomError(NOT_A_NUMBER, "true and false are no numbers")
        return value


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
