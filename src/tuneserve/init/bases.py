"""Which base model, and what is known of it here: its folder, or at least its shape."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneserve.checkpoint.base import BUILTIN, peek_base
from tuneserve.config import ModelSection
from tuneserve.errors import HubError, HubRefused

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Suggestion:
    """A base for people who have none in mind: an instruct model with a free licence.

    Attributes:
        config: What its public `config.json` says of its shape; enough to plan with, offline.
    """

    name: str
    licence: str
    config: dict[str, Any]


def _qwen25(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }


# Best first; the first that fits is taken. The 3B model of the family is left out: its licence
# forbids commercial use.
SUGGESTED = (
    Suggestion(
        "Qwen/Qwen2.5-7B-Instruct",
        "Apache-2.0",
        _qwen25(3584, 28, 28, 4, 18944, 152064, tied=False),
    ),
    Suggestion(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Apache-2.0",
        _qwen25(1536, 28, 12, 2, 8960, 151936, tied=True),
    ),
    Suggestion(
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Apache-2.0",
        _qwen25(896, 24, 14, 2, 4864, 151936, tied=True),
    ),
)


@dataclass(frozen=True)
class Base:
    """A base with a folder that holds at least its `config.json`.

    Attributes:
        name: What the run file calls it.
        folder: Where to plan from.
        local: Whether its tokenizer may be there too.
    """

    name: str
    folder: Path
    local: bool = True


def open_base(name: str, scratch: Path, *, search_from: Path) -> Base:
    """The base's small files, from here or from the hub; its known shape where the hub is silent.

    Args:
        name: As the run file will say it.
        scratch: A folder for the shape's `config.json`.
        search_from: Folder that a relative path is taken from.

    Raises:
        ModelError: There is no such folder, or it holds no model.
        HubError: The hub said no, or cannot be reached and nothing is known of this base.
    """
    place = search_from / name
    if not name.startswith("builtin:") and place.is_dir():
        return Base(name, peek_base(ModelSection(base=str(place.absolute()))))
    try:
        return Base(name, peek_base(ModelSection(base=name)))
    except HubRefused:
        raise
    except HubError as error:
        known = next((s for s in SUGGESTED if s.name == name), None)
        if known is None:
            raise HubError(
                error.message,
                expected=error.expected,
                hint="check the network, or give --base a folder with the model",
            ) from error
        log.warning("%s: the hub does not answer; planning with its published shape", name)
        return Base(name, _shape_folder(known, scratch), local=False)


def candidates(base: str | None, *, gpu: bool) -> list[str]:
    """Names to try, best first: the one asked for, or those that suit the machine."""
    if base is not None:
        return [base]
    return [suggestion.name for suggestion in SUGGESTED] if gpu else [BUILTIN]


def _shape_folder(known: Suggestion, scratch: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    (folder / "config.json").write_text(json.dumps(known.config), encoding="utf-8")
    return folder
