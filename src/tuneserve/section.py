"""What every part of the run file is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run file: frozen, and a field it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
