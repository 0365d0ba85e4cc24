"""The licence of a base model, as its own files say it: what a model card has to carry on."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

_CARD_BYTES = 64 * 1024
_FILES = re.compile(r"(licen[cs]e|copying)(\.(txt|md))?", re.IGNORECASE)
# Beginnings of licence texts and their SPDX names; the first line stands for all others.
_TEXTS = (
    (r"Apache License\s+Version 2\.0", "apache-2.0"),
    (r"MIT License|Permission is hereby granted, free of charge", "mit"),
    (r"GNU AFFERO GENERAL PUBLIC LICENSE\s+Version 3", "agpl-3.0"),
    (r"GNU GENERAL PUBLIC LICENSE\s+Version 3", "gpl-3.0"),
    (r"Creative Commons Attribution-NonCommercial", "cc-by-nc-4.0"),
)


@dataclass(frozen=True)
class Licence:
    """A licence as a model card states it.

    Attributes:
        id: The hub's or SPDX's name in lower case, ``other`` or ``unknown``.
        name: How its owner calls it, where that says more.
        link: Where its text is.
        source: What said so.
    """

    id: str = "unknown"
    name: str = ""
    link: str = ""
    source: str = "the base says nothing of its licence"

    def to_json(self) -> dict[str, str]:
        """As metrics and cards carry it; empty fields left out."""
        return {key: value for key, value in asdict(self).items() if value}


def base_licence(folder: Path, base: str = "") -> Licence:
    """Read the card's front matter, else the licence file.

    Args:
        folder: The base model's folder.
        base: What the run file calls it; the built-in model has no card of its own.
    """
    if base.startswith("builtin:smollm2"):
        link = "https://www.apache.org/licenses/LICENSE-2.0"
        return Licence("apache-2.0", link=link, source="the built-in model")
    front = _front_matter(folder / "README.md")
    said = front.get("license")
    if isinstance(said, list):
        said = ", ".join(map(str, said))
    if said:
        name, link = str(front.get("license_name") or ""), str(front.get("license_link") or "")
        return Licence(str(said).lower(), name, link, "README.md of the base")
    return _from_file(folder)


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML between the first two lines of three dashes; empty where there is none."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", errors="replace") as stream:
        text = stream.read(_CARD_BYTES)
    found = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        data = yaml.safe_load(found.group(1)) if found else None
    except yaml.YAMLError:  # a card is written by hand; a broken one says nothing
        return {}
    return data if isinstance(data, dict) else {}


def _from_file(folder: Path) -> Licence:
    for path in sorted(folder.iterdir()):
        if not _FILES.fullmatch(path.name) or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")[:_CARD_BYTES]
        for pattern, name in _TEXTS:
            if re.search(pattern, text[:2000], re.IGNORECASE):
                return Licence(name, source=f"{path.name} of the base")
        first = next((line.strip("# \t") for line in text.splitlines() if line.strip()), "")
        return Licence("other", first[:100], source=f"{path.name} of the base")
    return Licence()
