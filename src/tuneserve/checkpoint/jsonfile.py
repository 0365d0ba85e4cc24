"""The small JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tuneserve.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder.

    Raises:
        ModelError: It cannot be read.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: cannot be read as JSON ({error})", expected="JSON, as transformers saves it"
        ) from error
    if not isinstance(data, dict):
        raise ModelError(
            f"{path}: holds a JSON {type(data).__name__}, not an object",
            expected="an object, as transformers saves it",
        )
    return data
