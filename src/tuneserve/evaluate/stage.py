"""Stage `evaluate`: the held-out loss before training, as trained and as merged, on the same rows,
and the references that a served model is held against.

Nothing heavy is imported before `run`. One model is in memory at a time.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from tuneserve.artifacts import write_json_atomic
from tuneserve.evaluate.picture import PLOT_NAME, plot_rows
from tuneserve.lm import scores
from tuneserve.lm.conversations import round_robin
from tuneserve.lm.rows import read_rows
from tuneserve.stages import StageContext

if TYPE_CHECKING:
    from tuneserve.evaluate.models import Found

log = logging.getLogger(__name__)

MODELS = ("base", "adapter", "merged")


def run(context: StageContext) -> dict[str, Any]:
    """Measure on at most `gates.eval_rows` held-out rows, and write what gates compare with.

    They are rows of as many conversations as there are. Losses are exact mean nats per supervised
    token. The adapter is measured on the base it was trained on, which is the NF4 one after QLoRA.

    Files: `losses.json`, with what answers cost behind other conversations' questions;
    `samples.jsonl`, answers of the base; `references.npz`, the merged model's
    likeliest tokens at every supervised position, how far they are from the adapter's, and how far
    plain 4-bit rounding is from them; `answers.jsonl`, the merged model's answers where JSON or
    tool calls are due; `rows.png`, each conversation's loss before and after.

    Raises:
        DataError: The held-out rows cannot be read.
        ModelError: A model cannot be loaded.
    """
    from tuneserve.lm.load import quiet_libraries

    quiet_libraries()
    dataset = context.inputs["dataset"].path
    rows = read_rows(dataset / "eval.parquet")
    counts = rows.supervised()
    usable = [i for i in range(len(rows)) if counts[i]]
    places = round_robin([rows.sources[i] for i in usable], context.run.gates.eval_rows)
    chosen = [usable[place] for place in places]
    tokens = int(counts[chosen].sum()) if chosen else 0
    result: dict[str, Any] = {"rows": len(chosen), "supervised_tokens": tokens}
    if not chosen:
        log.warning("there are no held-out rows: no loss is measured, and nothing can be compared")
        write_json_atomic(context.out / "losses.json", {**result, **dict.fromkeys(MODELS)})
        (context.out / "samples.jsonl").touch()
        return {**result, **{f"{name}_loss": None for name in MODELS}}

    from tuneserve.evaluate import models

    found = models.measure(context, rows, chosen)
    means = {name: float(sums.sum() / tokens) for name, sums in found.sums.items()}
    per_row: dict[str, Any] = {
        "source": [rows.sources[i] for i in chosen],
        "supervised_tokens": [int(counts[i]) for i in chosen],
        **{name: [float(x) for x in sums] for name, sums in found.sums.items()},
    }
    per_row["questions"] = found.questions
    base, tuned = (found.sums[name] / counts[chosen] for name in ("base", "adapter"))
    plot_rows(base.tolist(), tuned.tolist(), context.out / PLOT_NAME)
    yardstick = _references(context, found)
    result |= {f"rtn_{name}": value for name, value in yardstick.items()}
    write_json_atomic(context.out / "losses.json", {**result, **means, "per_row": per_row})
    _write_lines(context, "samples.jsonl", found.samples)
    _write_lines(context, "answers.jsonl", found.structured)
    log.info(
        "held-out loss over %d rows: %s",
        len(chosen),
        ", ".join(f"{name} {loss:.4f}" for name, loss in means.items()),
    )
    result |= {"laps_seconds": found.laps_seconds, "peak_gpu_bytes": found.peak_gpu_bytes}
    return {**result, **{f"{name}_loss": loss for name, loss in means.items()}}


def _references(context: StageContext, found: Found) -> dict[str, float]:
    """Write what the served model will be held against; say what plain rounding costs."""
    assert found.adapter is not None and found.merged is not None and found.rtn is not None
    merging = scores.divergence(found.adapter, found.merged)
    apart = scores.divergence(found.merged, found.rtn)
    flipped = scores.flips(found.merged, found.rtn)
    found.merged.save(
        context.out / "references.npz",
        adapter_kl=merging.astype(np.float32),
        rtn_kl=apart.astype(np.float32),
        rtn_flips=flipped,
    )
    loss = float(found.rtn.nats().sum() / len(found.rtn.tokens))
    kl, agreement = float(apart.mean()), float(1 - flipped.mean())
    log.info(
        "plain rounding of the merged model to 4 bits: loss %.4f, divergence %.4f nats a token, "
        "same first choice in %.1f %%",
        loss, kl, 100 * agreement,
    )  # fmt: skip
    return {"loss": loss, "kl": kl, "agreement": agreement}


def _write_lines(context: StageContext, name: str, entries: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    (context.out / name).write_text(text, encoding="utf-8")
