"""What a loaded model says about rows of tokens: its likeliest tokens a position. Engine file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tuneserve.lm.loss import pad_rows
from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.lm.scores import TOP, TopScores, join_rows

_LOGITS_BYTES = 256 * 2**20  # of float32 logits held at a time, a few times over
_BATCH_TOKENS = 4096  # padded
_HEAD_ROWS = 16384  # of the head, widened to float32 at a time


@torch.no_grad()
def row_scores(
    model: Any,
    rows: Rows,
    indices: Sequence[int],
    *,
    done: Callable[[int], None] = lambda count: None,
) -> TopScores:
    """The scores at the supervised positions of rows, in the order of `indices`.

    Rows of like length share a batch: a 4-bit model is taken apart anew for each.

    Args:
        model: A causal language model in evaluation mode, its forward pass as transformers has it.
        rows: The rows.
        indices: Which of them.
        done: Called with the number of rows finished since the last call.
    """
    counts = rows.supervised()
    found: dict[int, TopScores] = {}
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper
    most = max(64, _LOGITS_BYTES // (4 * int(whole.config.get_text_config().vocab_size)))
    order = sorted(range(len(indices)), key=lambda at: (-rows.lengths[indices[at]], at))
    while order:
        batch = [order.pop(0)]
        width = max(1, int(rows.lengths[indices[batch[0]]]))
        positions = int(counts[indices[batch[0]]])
        while (
            order
            and (len(batch) + 1) * width <= _BATCH_TOKENS
            and positions + int(counts[indices[order[0]]]) <= most
        ):
            batch.append(order.pop(0))
            positions += int(counts[indices[batch[-1]]])
        scored = _batch(model, whole, rows, [indices[at] for at in batch], most)
        found.update(zip(batch, scored, strict=True))
        done(len(batch))
    return join_rows(found[at] for at in range(len(indices)))


def _batch(
    model: Any, whole: Any, rows: Rows, indices: Sequence[int], most: int
) -> list[TopScores]:
    """One forward pass over some rows; one row with too many positions takes several."""
    padded = pad_rows(rows, indices)
    labels = padded.pop("labels")
    place = next(model.parameters()).device
    inputs = {name: value.to(place) for name, value in padded.items()}
    row, position = torch.nonzero(labels != IGNORED, as_tuple=True)
    tokens = labels[row, position]
    before = row * labels.shape[1] + position - 1  # what predicts a token stands before it
    parts = [
        _positions(model, whole, inputs, before[at : at + most], tokens[at : at + most])
        for at in range(0, len(tokens), most)
    ]
    actual, best, ids = (np.concatenate(column) for column in zip(*parts, strict=True))
    all_tokens, ends = tokens.numpy().astype(np.int32), np.bincount(row, minlength=len(indices))
    starts = np.concatenate(([0], np.cumsum(ends)))
    return [
        TopScores(
            np.array([0, end - begin], np.int64),
            all_tokens[begin:end],
            actual[begin:end],
            ids[begin:end],
            best[begin:end],
        )
        for begin, end in zip(starts, starts[1:], strict=False)
    ]


def _positions(
    model: Any, whole: Any, inputs: Any, before: torch.Tensor, tokens: torch.Tensor
) -> tuple[Any, Any, Any]:
    """Log-probabilities of the tokens, of the likeliest, and which these are."""
    place = inputs["input_ids"].device
    with _head_at(whole, before.to(place)):
        logits = model(**inputs, use_cache=False).logits[0]
    logprobs = logits.float().log_softmax(-1)
    actual = logprobs.gather(1, tokens.to(place)[:, None])[:, 0]
    best, ids = logprobs.topk(min(TOP, logprobs.shape[1]), dim=-1)
    wide_ids = np.full((len(tokens), TOP), -1, np.int32)
    wide = np.full((len(tokens), TOP), -np.inf, np.float32)
    wide_ids[:, : ids.shape[1]] = ids.cpu().numpy()
    wide[:, : ids.shape[1]] = best.cpu().numpy()
    return actual.cpu().numpy().astype(np.float32), wide, wide_ids


@contextlib.contextmanager
def _head_at(model: Any, at: torch.Tensor) -> Iterator[None]:
    """Let the head see only some positions of the batch, in float32; its logits are [1, n, vocab].

    What a model does to its logits afterwards (scales, soft caps) it does to each by itself.
    16-bit logits of 20 would be good to 0.06 nats only.
    """
    head = model.get_output_embeddings()
    original = head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        chosen = x.flatten(0, -2)[at][None]
        if type(head) is not torch.nn.Linear or head.weight.dtype == torch.float32:
            return original(chosen)  # an adapter of the head's own is inside
        wide = chosen.float()
        parts = [
            torch.nn.functional.linear(wide, part.float()) for part in head.weight.split(_HEAD_ROWS)
        ]
        logits = torch.cat(parts, -1)
        return logits if head.bias is None else logits + head.bias.float()

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
