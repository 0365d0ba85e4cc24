"""Prepare the tokenizer with transformers in a short-lived process of its own.

The tokenizer that counts is the one the server will load: `AutoTokenizer` on the folder that is
passed on. This process loads it, and hands the ids' engine (the `tokenizers` JSON), the template
and a few renderings to the stage, which then needs neither transformers nor torch: 0.5 s and 100 MB
a worker instead of 10 s and 480 MB.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Fill the tokenizer folder and describe it.

    Args:
        request: ``base``, ``out`` (folders), ``backend`` (file for the engine's JSON),
            ``chat_template`` (file or None), ``trust_remote_code``, ``probes`` (lists of messages
            in server form).
    """
    from transformers import AutoTokenizer

    base, out = Path(request["base"]), Path(request["out"])
    out.mkdir(parents=True, exist_ok=True)
    load = {"trust_remote_code": request["trust_remote_code"], "local_files_only": True}
    if (base / "tokenizer.json").is_file():
        # Copied, not saved again: a rewritten tokenizer is a new one that somebody would have to
        # prove.
        for name in _COPIED:
            if (base / name).is_file():
                shutil.copyfile(base / name, out / name)
    else:
        AutoTokenizer.from_pretrained(base, **load).save_pretrained(out)
    if request["chat_template"]:
        replace_template(out, Path(request["chat_template"]).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(out, **load)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"error": f"{type(tokenizer).__name__} has no fast tokenizer"}
    Path(request["backend"]).write_text(backend.to_str(), encoding="utf-8")
    template = tokenizer.chat_template
    sources = template if isinstance(template, dict) else {"default": template}
    if not sources.get("default"):
        return {"error": "the tokenizer has no chat template"}
    return {
        "sources": sources,
        "variables": {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "pad_id": tokenizer.pad_token_id,
        "length": len(tokenizer),
        "model_max_length": min(int(tokenizer.model_max_length), 2**62),
        "renderings": [_render(tokenizer, probe) for probe in request["probes"]],
    }


def _render(tokenizer: Any, probe: dict[str, Any]) -> dict[str, Any] | None:
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            probe["messages"],
            tools=probe.get("tools"),
            add_generation_prompt=probe["prompt"],
            tokenize=False,
        )
    except (jinja2.TemplateError, TypeError, ValueError):
        return None  # the template refuses the probe; the stage sees the same
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {"text": text, "ids": ids}


def replace_template(folder: Path, template: str) -> None:
    """Make `template` the only chat template of a tokenizer folder."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        config = json.loads(config_path.read_text(encoding="utf-8"))
        if config.pop("chat_template", None) is not None:
            config_path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _hide_torch() -> None:
    """A tokenizer needs no torch, and transformers does without: saves 10 s and 340 MB."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else find(name, package)

    importlib.util.find_spec = find_spec


def main() -> None:
    """Read the request file named first, write the answer to the one named second."""
    _hide_torch()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(prepare(request)), encoding="utf-8")


if __name__ == "__main__":
    main()
