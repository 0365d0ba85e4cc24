"""Exact losses of rows, without ever holding the logits of a batch. Engine file: imports torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tuneserve.lm.exhausted import is_out_of_memory
from tuneserve.lm.rows import IGNORED, Rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowLosses:
    """Loss of each row: summed nats, and how many tokens they are summed over."""

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Mean nats per supervised token over all rows."""
        return float(self.sums.sum() / self.counts.sum())


def pad_rows(
    rows: Rows, indices: Sequence[int], multiple: int = 1, limit: int | None = None
) -> dict[str, torch.Tensor]:
    """Rows as one right-padded batch: `input_ids`, `attention_mask`, `labels`: [rows, width].

    What is padding follows from each row's length, never from an id: the pad token of many models
    is their end token as well. The first label of a row is ignored, since nothing predicts it.

    Args:
        rows: Where from.
        indices: Which rows, in this order.
        multiple: The width is rounded up to a multiple of this.
        limit: But not beyond this, which is how many positions the model has.
    """
    pairs = [rows.row(index) for index in indices]
    longest = max(len(ids) for ids, _ in pairs)
    width = -(-longest // multiple) * multiple
    if limit is not None:
        width = max(longest, min(width, limit))
    input_ids = torch.zeros((len(pairs), width), dtype=torch.long)
    labels = torch.full((len(pairs), width), IGNORED, dtype=torch.long)
    mask = torch.zeros((len(pairs), width), dtype=torch.long)
    for at, (ids, marks) in enumerate(pairs):
        input_ids[at, : len(ids)] = torch.from_numpy(ids)
        labels[at, 1 : len(ids)] = torch.from_numpy(marks[1:])
        mask[at, : len(ids)] = 1
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def row_losses(
    model: Any,
    rows: Rows,
    indices: Sequence[int],
    *,
    batch_tokens: int = 4096,
    done: Callable[[int], None] = lambda count: None,
) -> RowLosses:
    """The loss of each of the rows, in the order of `indices`.

    Rows of like length share a batch of at most `batch_tokens` padded tokens. When a batch does not
    fit, smaller ones are tried, down to single rows; the result does not depend on it beyond
    rounding.

    Args:
        model: With a fused head (`tuneserve.lm.fused_head`), in evaluation mode.
        rows: The rows.
        indices: Which of them.
        batch_tokens: Bound of padded tokens a batch; a longer row goes alone.
        done: Called with the number of rows finished since the last call.
    """
    sums, counts = np.zeros(len(indices)), np.zeros(len(indices), np.int64)
    place = next(model.parameters()).device
    order = sorted(range(len(indices)), key=lambda at: (-rows.lengths[indices[at]], at))
    begin = 0
    while begin < len(order):
        longest = int(rows.lengths[indices[order[begin]]])
        batch = order[begin : begin + max(1, batch_tokens // max(longest, 1))]
        inputs = pad_rows(rows, [indices[at] for at in batch])
        try:
            nats = _batch_nats(model, {key: value.to(place) for key, value in inputs.items()})
        except (RuntimeError, MemoryError) as error:
            if len(batch) == 1 or not is_out_of_memory(error):
                raise
            batch_tokens = longest * (len(batch) // 2)
            torch.cuda.empty_cache()
            log.warning("evaluation did not fit: going on with %d rows a batch", len(batch) // 2)
            continue
        sums[batch] = nats
        counts[batch] = (inputs["labels"] != IGNORED).sum(-1).numpy()
        begin += len(batch)
        done(len(batch))
    return RowLosses(sums, counts)


@torch.no_grad()
def _batch_nats(model: Any, inputs: dict[str, torch.Tensor]) -> npt.NDArray[np.float64]:
    out = model(**inputs, fused_lm_head=True)
    return (-out.log_probs.double().sum(-1)).cpu().numpy()
