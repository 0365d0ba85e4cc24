"""The small JSON files of a model folder and of an adapter's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tuneserve.errors import ModelError, TuneserveError


def read_json(
    path: Path, *, kind: type[TuneserveError] = ModelError, writer: str = "transformers"
) -> dict[str, Any]:
    """A JSON object, as `writer` saves it.

    Raises:
        ModelError: It cannot be read (or a `kind` of error that says more).
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise kind(
            f"{path}: cannot be read as JSON ({error})", expected=f"JSON, as {writer} saves it"
        ) from error
    if not isinstance(data, dict):
        raise kind(
            f"{path}: holds a JSON {type(data).__name__}, not an object",
            expected=f"an object, as {writer} saves it",
        )
    return data
