"""Stage `evaluate`: the held-out loss before training, as trained and as merged, on the same rows.

Nothing heavy is imported before `run`. One model is in memory at a time.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.lm.rows import read_rows
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

MODELS = ("base", "adapter", "merged")


def run(context: StageContext) -> dict[str, Any]:
    """Measure on at most `gates.eval_rows` held-out rows; fill `losses.json` and `samples.jsonl`.

    Losses are exact mean nats per supervised token. The adapter is measured on the base it was
    trained on, which is the NF4 one after QLoRA.

    Raises:
        DataError: The held-out rows cannot be read.
        ModelError: A model cannot be loaded.
    """
    from tuneserve.lm.load import quiet_libraries

    quiet_libraries()
    dataset = context.inputs["dataset"].path
    rows = read_rows(dataset / "eval.parquet")
    counts = rows.supervised()
    chosen = [i for i in range(len(rows)) if counts[i]][: context.run.gates.eval_rows]
    tokens = int(counts[chosen].sum()) if chosen else 0
    result: dict[str, Any] = {"rows": len(chosen), "supervised_tokens": tokens}
    if not chosen:
        log.warning("there are no held-out rows: no loss is measured, and nothing can be compared")
        write_json_atomic(context.out / "losses.json", {**result, **dict.fromkeys(MODELS)})
        (context.out / "samples.jsonl").touch()
        return {**result, **{f"{name}_loss": None for name in MODELS}}

    from tuneserve.evaluate import models

    measured, samples = models.measure(context, rows, chosen)
    means = {name: found.mean for name, found in measured.items()}
    per_row: dict[str, Any] = {
        "source": [rows.sources[i] for i in chosen],
        "supervised_tokens": [int(counts[i]) for i in chosen],
        **{name: [float(x) for x in found.sums] for name, found in measured.items()},
    }
    write_json_atomic(context.out / "losses.json", {**result, **means, "per_row": per_row})
    text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    (context.out / "samples.jsonl").write_text(text, encoding="utf-8")
    log.info(
        "held-out loss over %d rows: %s",
        len(chosen),
        ", ".join(f"{name} {loss:.4f}" for name, loss in means.items()),
    )
    return {**result, **{f"{name}_loss": loss for name, loss in means.items()}}
