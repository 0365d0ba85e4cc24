"""Load base, adapter and merged model one after the other and measure each. Engine file."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tuneserve.errors import AdapterError
from tuneserve.evaluate import answers
from tuneserve.evaluate.misplaced import answer_nats, misplaced
from tuneserve.evaluate.rounding import round_to_nearest
from tuneserve.lm import hardware
from tuneserve.lm.fused_head import add_fused_head
from tuneserve.lm.load import load_base
from tuneserve.lm.loss import row_losses
from tuneserve.lm.rows import Rows
from tuneserve.lm.scores import TopScores
from tuneserve.lm.topk import row_scores
from tuneserve.progress import Clock, Progress
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)


@dataclass
class Found:
    """What was measured.

    Attributes:
        sums: Summed nats of each row, by model.
        adapter: The adapter's likeliest tokens, on the base it was trained on.
        merged: The same of the merged model.
        rtn: The same of the merged model after plain rounding to 4 bits.
        samples: What the base answers to the first held-out questions.
        questions: Summed nats of answers behind their `own` question and behind that of an
            `other` conversation, by model; and the `source` of each.
        structured: What the merged model answers where JSON or a tool call is due.
        laps_seconds: Seconds of each part.
        peak_gpu_bytes: The most that torch's allocator held; None without a GPU.
    """

    sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    adapter: TopScores | None = None
    merged: TopScores | None = None
    rtn: TopScores | None = None
    questions: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    structured: list[dict[str, Any]] = field(default_factory=list)
    laps_seconds: dict[str, float] = field(default_factory=dict)
    peak_gpu_bytes: int | None = None


def measure(context: StageContext, rows: Rows, chosen: Sequence[int]) -> Found:
    """Measure base, adapter, merged and rounded model on the `chosen` rows."""
    device = hardware.device()
    dataset = context.inputs["dataset"].path
    found = Found()
    tried = misplaced(rows, chosen)
    home, moved = tried.home, tried.moved
    found.questions["source"] = list(home.sources)
    clock = Clock()
    with Progress("evaluate", total=4 * len(chosen), unit="row") as progress:
        model = _load("base", context, device)
        clock.lap("loading the base")
        said = functools.partial(progress.advance, detail="base")
        found.sums["base"] = row_losses(model, rows, chosen, done=said).sums
        if len(home):
            own = found.sums["base"][tried.places]
            # Of rows with several answers the longest one's own loss is not known yet.
            whole = rows.supervised()[[chosen[place] for place in tried.places]]
            several = np.flatnonzero(home.supervised() != whole).tolist()
            if several:
                own[several] = row_losses(model, home, several).sums
            other = row_losses(model, moved, range(len(moved))).sums
            found.questions["base"] = {"own": own.tolist(), "other": other.tolist()}
        clock.lap("losses of the base")
        found.samples = answers.samples(model, dataset)
        clock.lap("answers of the base")
        del model
        hardware.release_memory()
        model = _load("adapter", context, device)
        clock.lap("loading base and adapter")
        said = functools.partial(progress.advance, detail="adapter")
        found.adapter = row_scores(model, rows, chosen, done=said)
        found.sums["adapter"] = found.adapter.nats()
        clock.lap("scores of the adapter")
        del model
        hardware.release_memory()
        model = _load("merged", context, device)
        clock.lap("loading the merged model")
        said = functools.partial(progress.advance, detail="merged")
        found.merged = row_scores(model, rows, chosen, done=said)
        found.sums["merged"] = found.merged.nats()
        clock.lap("scores of the merged model")
        if len(home):
            own = answer_nats(found.merged, tried)
            other = row_scores(model, moved, range(len(moved))).nats()
            found.questions["merged"] = {"own": own.tolist(), "other": other.tolist()}
        clock.lap("answers behind other questions")
        most = context.run.gates.structured_answers
        found.structured = answers.structured_rows(rows, dataset, most)
        answers.answer_structured(model, found.structured, dataset)
        clock.lap("structured answers")
        round_to_nearest(model, context.run.quantize.group_size)
        clock.lap("rounding to 4 bits")
        said = functools.partial(progress.advance, detail="merged, rounded to 4 bits")
        found.rtn = row_scores(model, rows, chosen, done=said)
        clock.lap("scores after rounding")
        del model
        hardware.release_memory()
    log.info("where the time went: %s", clock)
    found.laps_seconds = clock.rounded()
    found.peak_gpu_bytes = hardware.peak_reserved_bytes()
    return found


def _load(name: str, context: StageContext, device: torch.device) -> Any:
    folder = context.base if name != "merged" else context.inputs["merged"].path
    assert folder is not None
    dtype = hardware.model_dtype(device, folder)
    adapter = context.inputs["adapter"].path
    nf4 = name == "adapter" and _trained_on_nf4(adapter, context)
    model = load_base(
        folder,
        device=device,
        dtype=dtype,
        nf4=nf4,
        attention=context.run.train.attention,
        trust_remote_code=context.run.model.trust_remote_code,
    )
    if name == "base":
        add_fused_head(model, float32=True)
    if name != "adapter":
        return model
    import peft

    try:
        wrapped = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    except (ValueError, RuntimeError, OSError) as error:
        raise AdapterError(
            f"{adapter}: cannot be loaded onto the base ({error})",
            expected="an adapter of this base",
            hint="train again on this base",
        ) from error
    for name_, parameter in wrapped.named_parameters():
        if "lora_" in name_ and "lora_magnitude_vector" not in name_:
            parameter.data = parameter.data.to(dtype)
    return wrapped.eval()


def _trained_on_nf4(adapter: Path, context: StageContext) -> bool:
    path = adapter / "training.json"
    if not path.is_file():  # an adapter from elsewhere does not say; the run file does
        return context.run.train.method == "qlora"
    return json.loads(path.read_text(encoding="utf-8")).get("quantization") is not None
