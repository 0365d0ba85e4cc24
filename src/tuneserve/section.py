"""What every part of the run file is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run file: frozen, and a field it does not know is an error."""

    # A value that is refused may hold a secret, and who shows the error may keep it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
