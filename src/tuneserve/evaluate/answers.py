"""Greedy answers of a loaded model, for the report and as the yardstick of structured answers.

Engine file: imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from tuneserve.lm.callforms import Tools, tools_of
from tuneserve.lm.conversations import round_robin
from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.lm.structured import parses, recognize

_SAMPLES = 4
_ANSWER_TOKENS = 64
_LONGEST_ANSWER = 512


def samples(model: Any, dataset: Path) -> list[dict[str, Any]]:
    """The model's greedy answers to the first user turns of some held-out chats."""
    tokenizer = AutoTokenizer.from_pretrained(dataset / "tokenizer")
    found: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    for chat in _chats(dataset):
        roles = [message["role"] for message in chat["messages"]]
        turn = roles.index("user") + 1 if "user" in roles else len(roles)
        if roles[turn : turn + 1] != ["assistant"]:
            continue
        prompt, answer = chat["messages"][:turn], chat["messages"][turn]
        found.append(
            {
                "source": chat["source"],
                "messages": prompt,
                "reference": answer.get("content") or "",
            }
        )
        prompts.append(
            tokenizer.apply_chat_template(
                prompt, tools=chat["tools"], add_generation_prompt=True, return_dict=False
            )
        )
        if len(found) == _SAMPLES:
            break
    for sample, ids in zip(found, greedy(model, prompts, _ANSWER_TOKENS), strict=True):
        sample["base"] = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return found


def structured_rows(rows: Rows, dataset: Path, most: int) -> list[dict[str, Any]]:
    """Held-out answers that are JSON or a tool call, of as many conversations as there are.

    Any supervised answer of a row counts: a tool call is seldom a conversation's last one.

    Returns:
        row, source, start (where the answer begins in the row), kind, tools (what calls are held
        against), prompt (ids), max_tokens.
    """
    if not most:
        return []
    tokenizer = AutoTokenizer.from_pretrained(dataset / "tokenizer")
    special = set(tokenizer.all_special_ids)
    found: list[dict[str, Any]] = []
    for index, tools in enumerate(_tools(rows, dataset)):
        ids, labels = rows.row(index)
        for start, end in answers_in(labels):
            said = [int(i) for i in ids[start:end]]
            plain = [i for i in said if i not in special]
            # Some forms are marked by special tokens, others end before one.
            texts = (tokenizer.decode(part) for part in (said, plain))
            kinds = (recognize(text, tools) for text in texts)
            if start and (known := next(filter(None, kinds), None)):
                found.append(
                    {
                        "row": index,
                        "source": rows.sources[index],
                        "start": start,
                        "kind": known[0],
                        "tools": known[1],
                        "max_tokens": min(2 * (end - start) + 16, _LONGEST_ANSWER),
                    }
                )
    chosen = [found[place] for place in round_robin([row["source"] for row in found], most)]
    for answer in chosen:  # of these alone: the prompts of all may be many times the rows
        answer["prompt"] = rows.row(answer["row"])[0][: answer["start"]].tolist()
    return chosen


def answer_structured(model: Any, chosen: Sequence[dict[str, Any]], dataset: Path) -> None:
    """Add to each of `structured_rows` what the merged model answers, and whether it parses."""
    if not chosen:
        return
    tokenizer = AutoTokenizer.from_pretrained(dataset / "tokenizer")
    longest = max(row["max_tokens"] for row in chosen)
    for row, ids in zip(
        chosen, greedy(model, [row["prompt"] for row in chosen], longest), strict=True
    ):
        own = ids[: row["max_tokens"]]
        row["merged"] = tokenizer.decode(own, skip_special_tokens=False)
        row["merged_tokens"] = len(own)
        row["parses"] = parses(row["merged"], row["kind"], row["tools"])
        del row["prompt"]


def greedy(model: Any, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Greedy answers of at most `most` tokens, end tokens left out."""
    if not prompts:
        return []
    from transformers import GenerationConfig

    place = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, prompt in enumerate(prompts):  # on the left, so that all answers begin together
        ids[at, width - len(prompt) :] = torch.tensor(prompt)
        mask[at, width - len(prompt) :] = 1
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    config = GenerationConfig(
        max_new_tokens=most, do_sample=False, eos_token_id=ends or None, pad_token_id=0
    )
    with torch.no_grad():
        out = model.generate(ids.to(place), attention_mask=mask.to(place), generation_config=config)
    return [_until(answer, ends) for answer in out[:, width:].tolist()]


def _until(answer: list[int], ends: Sequence[int]) -> list[int]:
    at = next((i for i, token in enumerate(answer) if token in ends), len(answer))
    return answer[:at]


def answers_in(labels: npt.ArrayLike) -> list[tuple[int, int]]:
    """Begin and end of each run of supervised positions."""
    marked = np.concatenate(([False], np.asarray(labels) != IGNORED, [False]))
    edges = np.flatnonzero(marked[1:] != marked[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _tools(rows: Rows, dataset: Path) -> Iterator[Tools | None]:
    """What each row's calls may call."""
    chats = _chats(dataset)
    for source in rows.sources:
        chat = next(chats, {})
        yield tools_of(chat.get("tools")) if chat.get("source") == source else None


def _chats(dataset: Path) -> Iterator[dict[str, Any]]:
    with (dataset / "eval_messages.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
