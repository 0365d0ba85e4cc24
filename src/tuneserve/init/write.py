"""The run file as text: what was chosen, with its reasons as comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tuneserve.init.choose import Choice

_COLUMN = 34
# Said beside a field that was set, where nothing else is.
_ALWAYS = {
    "train.lora": "rank of the adapter, and its scale (alpha / r)",
    "train.effective_batch": "rows a step, however many fit into one pass",
    "quantize.methods": "4 bits; add none at the end to fall back to 16 bits",
    "serve.port": "clients ask http://127.0.0.1:PORT/v1",
}
# Shown commented out: what people look for next, and what it would be.
_ALSO = {
    "model": ["revision: COMMIT                # pin a hub model to a commit or tag"],
    "data": [
        "eval: held-out.jsonl            # a held-out file of your own, instead of eval_fraction",
        "max_rejected: 0.02              # more broken rows than this share stop the run",
    ],
    "train": ["max_steps: 20                   # a short try before the whole"],
    "serve": [
        "host: 0.0.0.0                   # other machines may ask; then a key is needed:",
        "api_key_env: TUNESERVE_KEY      # the variable that holds it",
    ],
}
_PLAIN = re.compile(r"[A-Za-z_./](?:[A-Za-z0-9_./ -]|:(?=[a-z0-9/]))*")


def text_of(choice: Choice, header: list[str]) -> str:
    """The file; `header` are its first comment lines."""
    lines = [f"# {line}".rstrip() for line in header]
    lines += [f"name: {_scalar(choice.values['name'])}"]
    for section, fields in choice.values.items():
        if section == "name":
            continue
        lines.append(f"{section}:")
        for key, value in fields.items():
            dotted = f"{section}.{key}"
            comment = choice.why.get(dotted) or _ALWAYS.get(dotted, "")
            lines += _field(key, value, comment)
        lines += [f"  # {text}" for text in _also(section, choice)]
    return "\n".join(lines) + "\n"


def _also(section: str, choice: Choice) -> Iterator[str]:
    base = str(choice.values["model"]["base"])
    for text in _ALSO.get(section, []):
        if text.startswith("revision:") and (base.startswith("builtin:") or base[:1] in "./"):
            continue
        if text.split(":")[0] in choice.values[section]:  # a key may stand there once only
            continue
        yield text


def _field(key: str, value: Any, comment: str) -> Iterator[str]:
    if isinstance(value, list) and key == "train":
        yield f"  {key}:"
        yield from (f"    - {_scalar(item)}" for item in value)
        return
    text = f"  {key}: {_scalar(value)}"
    yield f"{text:<{_COLUMN}}  # {comment}" if comment else text


def _scalar(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_scalar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value < 0.01:
        digits, power = f"{value:e}".split("e")
        return f"{float(digits):.1f}e{int(power)}"  # YAML 1.1 wants the dot: 2.0e-4
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and yaml.safe_load(value) == value  # not on, null, 1.0
        return value if plain else json.dumps(value, ensure_ascii=False)
    return str(value)
