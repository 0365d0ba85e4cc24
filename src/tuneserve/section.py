"""What every part of the run file is."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run file: frozen, and a field it does not know is an error."""

    # A value that is refused may hold a secret, and who shows the error may keep it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def field_paths(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    """Dotted paths of a section's fields and of those of the sections in it."""
    for name, field in kind.model_fields.items():
        yield before + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from field_paths(field.annotation, f"{before}{name}.")
