"""What a loaded model says about rows of tokens: its likeliest tokens a position. Engine file."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tuneserve.lm.rows import IGNORED, Rows
from tuneserve.lm.scores import TOP, TopScores, join_rows

_POSITIONS = 512  # logits held at a time: 0.3 GB with 150 thousand tokens
_HEAD_ROWS = 16384  # of the head, widened at a time


@torch.no_grad()
def row_scores(
    model: Any,
    rows: Rows,
    indices: Sequence[int],
    *,
    done: Callable[[int], None] = lambda count: None,
) -> TopScores:
    """The scores at the supervised positions of rows, one row at a time.

    Args:
        model: A causal language model in evaluation mode, its forward pass as transformers has it.
        rows: The rows.
        indices: Which of them.
        done: Called with the number of rows finished since the last call.
    """
    place = next(model.parameters()).device
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper
    sparing = "logits_to_keep" in inspect.signature(type(whole).forward).parameters
    with _float32_head(whole):
        return _row_scores(model, rows, indices, place, sparing, done)


def _row_scores(
    model: Any,
    rows: Rows,
    indices: Sequence[int],
    place: torch.device,
    sparing: bool,
    done: Callable[[int], None],
) -> TopScores:
    found = []
    for index in indices:
        ids, labels = rows.row(index)
        positions = np.flatnonzero(labels != IGNORED)
        positions = positions[positions > 0]  # nothing predicts the first
        inputs = torch.from_numpy(ids.astype(np.int64))[None].to(place)
        parts = [
            _scores(model, inputs, positions[at : at + _POSITIONS], sparing)
            for at in range(0, len(positions), _POSITIONS)
        ]
        joined = join_rows(parts)
        found.append(
            TopScores(
                np.array([0, len(positions)], np.int64),
                labels[positions].astype(np.int32),
                joined.actual,
                joined.ids,
                joined.logprobs,
            )
        )
        done(1)
    return join_rows(found)


@contextlib.contextmanager
def _float32_head(model: Any) -> Iterator[None]:
    """Multiply by the head in float32: 16-bit logits of 20 are good to 0.06 nats only."""
    head = model.get_output_embeddings()
    if head is None or head.weight.dtype == torch.float32:
        yield
        return
    parts, bias = head.weight.split(_HEAD_ROWS), getattr(head, "bias", None)

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        logits = torch.cat([torch.nn.functional.linear(wide, part.float()) for part in parts], -1)
        return logits if bias is None else logits + bias.float()

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _scores(model: Any, inputs: torch.Tensor, positions: Any, sparing: bool) -> TopScores:
    before = torch.from_numpy(positions - 1).to(inputs.device)
    if sparing:
        logits = model(input_ids=inputs, logits_to_keep=before, use_cache=False).logits[0]
    else:
        logits = model(input_ids=inputs, use_cache=False).logits[0, before]
    logprobs = logits.float().log_softmax(-1)
    tokens = inputs[0, torch.from_numpy(positions).to(inputs.device)]
    actual = logprobs.gather(1, tokens[:, None])[:, 0]
    best, ids = logprobs.topk(min(TOP, logprobs.shape[1]), dim=-1)
    wide_ids = np.full((len(positions), TOP), -1, np.int32)
    wide = np.full((len(positions), TOP), -np.inf, np.float32)
    wide_ids[:, : ids.shape[1]] = ids.cpu().numpy()
    wide[:, : ids.shape[1]] = best.cpu().numpy()
    return TopScores(
        np.array([0, len(positions)], np.int64),
        tokens.cpu().numpy().astype(np.int32),
        actual.cpu().numpy().astype(np.float32),
        wide_ids,
        wide,
    )
