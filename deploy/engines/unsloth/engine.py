"""Another trainer in the train stage's place: Unsloth, on the rows that `validate` proved.

The contract of the stage is its artifact: a PEFT adapter, the tokenizer of the dataset, the base's
fingerprint and a few facts. Where Unsloth is not installed, plain PEFT does the same in its place,
so that the example can be tried without a GPU.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from typing import Any

try:
    import unsloth  # it patches the libraries below: first
except ImportError:
    unsloth = None

import torch

from tuneserve.artifacts import write_json_atomic
from tuneserve.checkpoint.fingerprint import fingerprint
from tuneserve.lm.load import nf4_settings, quantized_modules
from tuneserve.lm.loss import pad_rows
from tuneserve.lm.rows import IGNORED, read_rows
from tuneserve.progress import Progress
from tuneserve.stages import StageContext
from tuneserve.train.recipe import make_recipe, rate_factor, training_order

log = logging.getLogger("engine")

_MULTIPLE = 8  # of tokens a batch is wide


def run(context: StageContext) -> dict[str, Any]:
    """Train and fill `context.out`; what is returned is printed and kept as the stage's metrics."""
    train = context.run.train
    dataset = context.inputs["dataset"].path
    rows = read_rows(dataset / "train.parquet")
    recipe = make_recipe(train, len(rows), context.hints.get("micro_batch") or 1)
    # Batches are as wide as `pad_rows` makes them; Unsloth cuts masks at the longest it was told.
    model = _load(context, -(-int(rows.lengths.max()) // _MULTIPLE) * _MULTIPLE)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, train.lr_scheduler, recipe)
    )
    order = training_order(rows.lengths.tolist(), recipe, train.seed)
    place = next(model.parameters()).device
    losses: list[float] = []
    with Progress("train", total=recipe.steps) as progress:
        for step in range(recipe.steps):
            first = step * recipe.effective_batch
            chosen = order[first : first + recipe.effective_batch]
            losses.append(_step(model, rows, chosen, recipe.micro_batch, place))
            torch.nn.utils.clip_grad_norm_(trained, train.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            progress.advance(1, f"loss {losses[-1]:.4f}")
    _save(context, model, losses)
    who = f"Unsloth {unsloth.__version__}" if unsloth else "plain PEFT"
    return {
        "engine": who,
        "steps": recipe.steps,
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "eval_loss": None,
        "effective_batch": recipe.effective_batch,
        "micro_batch": recipe.micro_batch,
        "gradient_accumulation": recipe.accumulation,
    }


def _step(model: Any, rows: Any, chosen: list[int], micro_batch: int, place: Any) -> float:
    """Gradients of the mean over the supervised tokens of the whole batch."""
    batches = [
        pad_rows(rows, chosen[at : at + micro_batch], _MULTIPLE)
        for at in range(0, len(chosen), micro_batch)
    ]
    counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches]
    total = 0.0
    for batch, count in zip(batches, counts, strict=True):
        inputs = {name: value.to(place) for name, value in batch.items()}
        loss = model(**inputs, use_cache=False).loss * (count / sum(counts))
        loss.backward()
        total += float(loss.detach())
    return total


def _load(context: StageContext, longest: int) -> Any:
    train, lora = context.run.train, context.run.train.lora
    targets = lora.target_modules
    nf4 = train.method == "qlora"
    if unsloth:
        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            str(context.base), max_seq_length=longest, load_in_4bit=nf4, dtype=torch.bfloat16
        )
        return unsloth.FastLanguageModel.get_peft_model(
            model,
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=linears if targets == "all-linear" else targets,
            use_gradient_checkpointing="unsloth",
            random_state=train.seed,
        )
    import peft

    from tuneserve.lm import hardware
    from tuneserve.lm.load import load_base

    device = hardware.device()
    assert context.base is not None
    model = load_base(context.base, device=device, dtype=hardware.compute_dtype(device), nf4=nf4)
    torch.manual_seed(train.seed)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, settings).train()


def _save(context: StageContext, model: Any, losses: list[float]) -> None:
    out, nf4 = context.out, context.run.train.method == "qlora"
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    for source in sorted((context.inputs["dataset"].path / "tokenizer").iterdir()):
        shutil.copyfile(source, out / source.name)
    assert context.base is not None
    write_json_atomic(out / "base_fingerprint.json", fingerprint(context.base))
    sidecar = {
        "method": context.run.train.method,
        # What `merge.base: nf4` and `evaluate` repeat.
        "quantization": nf4_settings(torch.bfloat16) if nf4 else None,
        "quantized_modules": quantized_modules(model.get_base_model()) if nf4 else [],
        "steps": len(losses),
        "seed": context.run.train.seed,
    }
    write_json_atomic(out / "training.json", sidecar)
    lines = [json.dumps({"step": at, "loss": loss}) for at, loss in enumerate(losses, 1)]
    (out / "loss.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tuneserve.__main__ import main
    from tuneserve.lm.load import quiet_libraries
    from tuneserve.train import stage

    quiet_libraries()
    stage.run = run
    sys.argv[0] = "tuneserve"
    main()
