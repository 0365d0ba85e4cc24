"""Input embedding and output head: which tensors they are, and whether they stay one tensor.

A tied model stores one tensor for both. PEFT unties them when only one was trained, or both apart;
then the merged checkpoint needs a head of its own and `tie_word_embeddings: false`. A LoRA update
on one of a tied pair changes, in PEFT's merge, the other as well (peft issue 2018), and one on both
is added twice (`ensure_weight_tying`); here the pair is untied instead, so that the merged model
computes what the trained one did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneserve.checkpoint.headers import Checkpoint, TensorInfo
from tuneserve.checkpoint.ties import is_tied
from tuneserve.merge.adapter import Adapter

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class Ties:
    """The pair.

    Attributes:
        embedding: Tensor of the input embedding; empty where none was recognized.
        head: Name of the output head's weight, stored or not; empty where none was recognized.
        new_head: Name of a head that the base does not store and the merged checkpoint must; else
            empty.
        follower: Name of the one of an untied pair that starts from what was saved of the other,
            because both grew, not from the base's; empty where each starts on its own.
        tied: The pair is one tensor, before the merge and after; a head stored as well is a copy.
        skipped: Parameters that are the same tensor as another one.
        aliases: Adapter tensors that must hold the same bytes.
    """

    embedding: str = ""
    head: str = ""
    new_head: str = ""
    follower: str = ""
    tied: bool = False
    skipped: frozenset[str] = frozenset()
    aliases: tuple[tuple[TensorInfo, TensorInfo], ...] = ()


def find_ties(
    base: Checkpoint,
    config: Mapping[str, Any],
    adapter: Adapter,
    locate: Callable[[str], str],
) -> Ties:
    """Recognize the pair and decide whether it stays tied."""
    # Heads that predict further tokens (mtp) may keep copies of both; the model does not load them.
    names = [n for n in base.tensors if n.endswith(".weight") and not n.startswith("mtp")]
    embeddings = [n for n in names if _module(n) in _EMBEDDINGS]
    embedding = min(embeddings, key=lambda n: (n.count("."), len(n)), default="")
    stored = [n for n in names if _module(n) in _HEADS]
    if not embedding or not is_tied(config, bool(stored)):
        return Ties(embedding, stored[0] if stored else "")
    head = stored[0] if stored else _head_name(adapter)
    head_module = head.removesuffix(".weight")
    embedding_saved = _saved_as(adapter, embedding, locate)
    embedding_module = embedding_saved.removesuffix(".weight")
    head_saved = head in adapter.saved
    ensured = bool(adapter.config.get("ensure_weight_tying"))
    lora_on_pair = head_module in adapter.loras or any(
        locate(f"{m}.weight") == embedding for m in adapter.loras
    )
    trained_whole = [m for m in (embedding_module, head_module) if m and adapter.saves_module(m)]
    tokens = {locate(f"{m}.weight"): t for m, t in adapter.tokens.items()}
    rows_apart = head in tokens and tokens[head][1] != tokens.get(embedding, (None, ()))[1]
    if lora_on_pair or rows_apart or (trained_whole and not ensured):
        follower = ""
        if embedding_saved and embedding_module not in trained_whole and not head_saved:
            follower = head
        elif head_saved and head_module not in trained_whole and not embedding_saved:
            grown = adapter.saved[head][0].shape != base.tensors[embedding].shape
            follower = embedding if grown else ""
        return Ties(embedding, head, head, follower)
    aliases: list[tuple[TensorInfo, TensorInfo]] = []
    if embedding_saved and head_saved:
        aliases += [(adapter.saved[embedding_saved][0], info) for info in adapter.saved[head]]
    if embedding in tokens and head in tokens:
        aliases.append((tokens[embedding][0], tokens[head][0]))
    skipped = frozenset({head} if aliases else ())
    return Ties(embedding, head, tied=True, skipped=skipped, aliases=tuple(aliases))


def _module(name: str) -> str:
    """The last part of the path of the module that holds a parameter."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _head_name(adapter: Adapter) -> str:
    """What the head is called in the running model; `lm_head` where the adapter does not mention
    it.
    """
    names = [*(f"{m}.weight" for m in (*adapter.loras, *adapter.tokens)), *adapter.saved]
    return next((n for n in names if _module(n) in _HEADS), "lm_head.weight")


def _saved_as(adapter: Adapter, embedding: str, locate: Callable[[str], str]) -> str:
    return next((n for n in adapter.saved if locate(n) == embedding), "")
