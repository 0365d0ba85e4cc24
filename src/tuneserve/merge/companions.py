"""The small files of a merged folder: config, tokenizer, chat template, generation config.

Weights decide nothing here. The config comes from the base, with what the merge changed; tokenizer,
template and generation config come from the training output as a set, because ids were rendered
with them; where the training output has none (an adapter from elsewhere) the base's are taken, and
it is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tuneserve.errors import AdapterError, ModelError
from tuneserve.merge.generation import generation_config
from tuneserve.merge.vocabulary import json_object, read_vocabulary

# Files that hold a tokenizer's tokens: without one of them the others are no tokenizer.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "bpe.codes",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "*.spm",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
_BESIDE_VOCABULARIES = (
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "encoder.json",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_TEMPLATE_FOLDER = "additional_chat_templates"

# Of the base, what a loader needs beside the weights, and what its licence asks to keep.
_BASE_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


@dataclass(frozen=True)
class Companions:
    """Files to write beside the weights.

    Attributes:
        files: Their bytes by relative name.
        tokenizer_from: adapter, base, or the folder that was asked for.
        notes: What had to be said about them.
        highest_id: The highest id that any file of the tokenizer knows; None: not known.
    """

    files: Mapping[str, bytes]
    tokenizer_from: str
    notes: tuple[str, ...]
    highest_id: int | None = None


def collect(
    base: Path,
    config: Mapping[str, Any],
    config_changes: Mapping[str, Any],
    adapter: Path,
    tokenizer_from: Path | None,
) -> Companions:
    """Read everything; nothing is written.

    Args:
        base: The base model's folder.
        config: Its config.json.
        config_changes: What the merge changes in it.
        adapter: The training output.
        tokenizer_from: A folder whose tokenizer is taken instead.

    Raises:
        ModelError: `tokenizer_from` holds no file of a tokenizer, or a file cannot be read.
        AdapterError: The tokenizer's added tokens are there without its vocabulary.
    """
    notes: list[str] = []
    files: dict[str, bytes] = {}
    for pattern in _BASE_FILES:
        files.update({p.name: p.read_bytes() for p in sorted(base.glob(pattern)) if p.is_file()})
    files["config.json"] = _config(base, config, config_changes)
    wanted = tokenizer_from or adapter
    own = tokenizer_files(wanted)
    if tokenizer_from and not own:
        raise ModelError(
            f"{tokenizer_from}: holds no tokenizer",
            expected="a folder with a tokenizer",
            hint="name a folder with one",
        )
    which = f"{tokenizer_from}" if tokenizer_from else "the adapter's folder"
    source, tokenizer = _whole_tokenizer(which, wanted, own, base, notes)
    files.update(tokenizer)
    vocabulary = read_vocabulary(tokenizer)
    settings = (tokenizer.get(_TOKENIZER_CONFIG), own.get(_TOKENIZER_CONFIG))
    ends = [end for each in settings for end in vocabulary.ends(each)]
    folders = (adapter, base) if source == base else (source, adapter, base)
    generation = generation_config(folders, base, config, ends, notes)
    if generation is not None:
        files["generation_config.json"] = generation
    origin = "base" if source == base else "adapter" if source == adapter else str(source)
    return Companions(files, origin, tuple(notes), vocabulary.highest)


def check_vocabulary(
    companions: Companions, rows: int | None, base: Path, adapter: Path
) -> tuple[str, ...]:
    """A tokenizer must not know ids for which the merged embedding has no row, unless the
    base's own knows them too: of images, say, in the text model of a family that sees.

    Returns:
        What has to be said about it.

    Raises:
        AdapterError: It does: new tokens were added in training, but their rows were not saved.
    """
    highest = companions.highest_id
    if rows is None or highest is None or highest < rows:
        return ()
    of_base = read_vocabulary(tokenizer_files(base)).highest
    if of_base is not None and highest <= of_base:
        return (
            f"the tokenizer knows ids up to {highest}, the embedding has {rows} rows, as in the "
            "base: text with those tokens fails",
        )
    raise AdapterError(
        f"{adapter}: its tokenizer knows ids up to {highest}, the merged embedding has {rows} rows",
        expected="a row for every token",
        hint="rows of new tokens were never saved: train with modules_to_save or "
        "trainable_token_indices for the embedding",
        details={"highest_id": highest, "rows": rows},
    )


def _config(base: Path, config: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """The base's config.json, byte for byte where nothing changed."""
    if not changes:
        return (base / "config.json").read_bytes()
    changed = dict(config)
    text = config.get("text_config")
    for name, value in changes.items():
        if isinstance(text, dict) and name in text:
            changed["text_config"] = text = {**text, name: value}
            if name in config:
                changed[name] = value
        else:
            changed[name] = value
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def _whole_tokenizer(
    which: str, folder: Path, own: dict[str, bytes], base: Path, notes: list[str]
) -> tuple[Path, dict[str, bytes]]:
    """Whose tokenizer is taken, and its files: the folder's if it has a vocabulary, else the base's
    with the folder's chat template.
    """
    if _has_vocabulary(own):
        return folder, own
    taken = tokenizer_files(base)
    if not _has_vocabulary(taken):
        if not (own or taken):
            notes.append("no tokenizer was found: the merged folder has none")
        return (folder, own) if own else (base, taken)
    _refuse_lost_tokens(which, own, taken)
    template = _template(own)
    if template:  # as a set: a template of the base left beside it might be read first
        taken = {n: d for n, d in taken.items() if not _is_template(n)}
    own_template = ", with the chat template there" if template else ""
    notes.append(f"{which} holds no tokenizer: the base's is taken{own_template}")
    return base, {**taken, **template}


def _refuse_lost_tokens(which: str, own: Mapping[str, bytes], taken: Mapping[str, bytes]) -> None:
    """Added tokens without the vocabulary that they were added to would be dropped with it."""
    added, known = read_vocabulary(own).highest, read_vocabulary(taken).highest
    if added is None or known is None or added <= known:
        return
    raise AdapterError(
        f"{which} adds tokens up to id {added} and holds no vocabulary; the base's tokenizer knows "
        f"ids up to {known}",
        expected="the whole tokenizer of training",
        hint="save it beside the adapter (tokenizer.save_pretrained), or name its folder: "
        "--tokenizer-from DIR",
        details={"highest_id": added, "base_highest_id": known},
    )


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """A folder's tokenizer and template files by relative name."""
    names = (*_VOCABULARIES, *_BESIDE_VOCABULARIES, *_TEMPLATE_FILES, f"{_TEMPLATE_FOLDER}/*.jinja")
    paths = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _has_vocabulary(files: Mapping[str, bytes]) -> bool:
    return any(fnmatch(name, pattern) for name in files for pattern in _VOCABULARIES)


def _is_template(name: str) -> bool:
    return name in _TEMPLATE_FILES or name.startswith(f"{_TEMPLATE_FOLDER}/")


def _template(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The chat templates among a tokenizer's files, as files that every loader reads first.

    Older ones are a field: of tokenizer_config.json (a text, or a list with names) or of
    chat_template.json.
    """
    found = {name: data for name, data in files.items() if _is_template(name)}
    for name in (_TOKENIZER_CONFIG, "chat_template.json"):
        field = json_object(files.get(name)).get("chat_template")
        named = [{"name": "default", "template": field}] if isinstance(field, str) else field
        for entry in named if isinstance(named, list) else ():
            label, text = str(entry.get("name")), entry.get("template")
            if not isinstance(text, str) or "/" in label:
                continue
            is_default = label == "default"
            place = "chat_template.jinja" if is_default else f"{_TEMPLATE_FOLDER}/{label}.jinja"
            found.setdefault(place, text.encode())
    return found
