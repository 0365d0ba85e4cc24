"""What each stage is: where its code starts, what goes into its key, what it needs.

The table is plain data, so that keys can be computed and the store asked without loading an
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.artifacts import Artifact
from tuneserve.config import RunFile


@dataclass(frozen=True)
class StageSpec:
    """One stage.

    Attributes:
        name: The verb: what the CLI and the child protocol call it.
        entry: ``module:function``, imported in the child only.
        engine: Field of `engines` in the run file whose interpreter runs it.
        makes: Kind of the artifact it makes (the beginning of its id); None: only a small JSON
            object.
        inputs: Kinds of artifacts it reads.
        sections: Dotted fields of the run file that change the artifact's bytes.
        packages: Distributions whose version changes the artifact's bytes.
        code_version: Raised when our own code changes the artifact's bytes.
        uses_base: Whether the base model's fingerprint is part of the key.
        uses_files: Whether the data files' content is part of the key.
        checks_first: Whether its files must be unchanged when it begins, not when it ends: it reads
            them at its beginning, and what it makes then takes hours.
    """

    name: str
    entry: str
    engine: str
    makes: str | None = None
    inputs: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    code_version: int = 1
    uses_base: bool = False
    uses_files: bool = False
    checks_first: bool = False


_TRAIN_FIELDS = (
    "method",
    "lora",
    "epochs",
    "max_steps",
    "effective_batch",
    "learning_rate",
    "lr_scheduler",
    "warmup_fraction",
    "weight_decay",
    "max_grad_norm",
    "optimizer",
    "attention",
    "seed",
    "zero",
)
_QUANTIZE_FIELDS = (
    "bits",
    "group_size",
    "calibration_rows",
    "calibration_max_tokens",
    "min_calibration_tokens",
    "allow_fallback",
)

STAGES: dict[str, StageSpec] = {
    spec.name: spec
    for spec in (
        StageSpec("fetch", "tuneserve.checkpoint.base:run", engine="data"),
        StageSpec(
            "validate",
            "tuneserve.data.stage:run",
            engine="data",
            makes="dataset",
            sections=(
                "data",
                "model.chat_template",
                "model.trust_remote_code",
                "serve.tool_parser",
            ),
            packages=("transformers", "tokenizers", "pyarrow", "jinja2"),
            code_version=2,  # what is equal, what is kept on one side, null fields of Parquet
            uses_base=True,
            uses_files=True,
        ),
        StageSpec("plan", "tuneserve.plan.stage:run", engine="data", inputs=("dataset",)),
        StageSpec(
            "train",
            "tuneserve.train.stage:run",
            engine="train",
            makes="adapter",
            inputs=("dataset",),
            sections=(*(f"train.{name}" for name in _TRAIN_FIELDS), "model.trust_remote_code"),
            # unsloth: absent, unless engines.train.python is another trainer's.
            packages=("torch", "transformers", "peft", "trl", "bitsandbytes", "unsloth"),
            code_version=3,  # no step has a row twice; what dropout drops, recomputed blocks drop
            uses_base=True,
            checks_first=True,
        ),
        StageSpec(
            "merge",
            "tuneserve.merge.stage:run",
            engine="merge",
            makes="merged",
            inputs=("adapter",),
            packages=("torch", "peft", "bitsandbytes"),
            code_version=2,  # heads that a config ties only by default, or in a nested part
            uses_base=True,
        ),
        StageSpec(
            "evaluate",
            "tuneserve.evaluate.stage:run",
            engine="evaluate",
            makes="evaluation",
            inputs=("dataset", "adapter", "merged"),
            sections=("gates.eval_rows", "gates.structured_answers", "quantize.group_size"),
            packages=("torch", "transformers", "peft", "trl", "bitsandbytes"),
            code_version=6,  # the longest answers behind other conversations' questions
            uses_base=True,
        ),
        StageSpec(
            "quantize",
            "tuneserve.quantize.stage:run",
            engine="quantize",
            makes="quantized",
            inputs=("merged", "dataset"),
            sections=tuple(f"quantize.{name}" for name in _QUANTIZE_FIELDS),
            packages=("torch", "transformers", "gptqmodel"),
        ),
        StageSpec(
            "release",
            "tuneserve.release.stage:run",
            engine="serve",
            inputs=("quantized", "merged", "dataset", "evaluation"),
        ),
    )
}


@dataclass(frozen=True)
class StageContext:
    """What a stage function gets. It fills `out` and returns metrics.

    Attributes:
        run: The whole run file.
        base: Local folder of the base model; None where the stage needs none.
        inputs: Finished artifacts by kind.
        out: Empty folder that becomes the artifact (an empty scratch folder where there is none).
        work: Scratch that survives a killed attempt of the same key; removed after success.
        settings: Choices that are part of the key, such as ``{"method": "gptq"}``.
        hints: Choices that do not change what is made, such as ``{"micro_batch": 4}``.
    """

    run: RunFile
    base: Path | None
    inputs: Mapping[str, Artifact]
    out: Path
    work: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)


def section(run: RunFile, dotted: str) -> Any:
    """The value of a dotted field, as plain JSON."""
    value: Any = run.model_dump(mode="json")
    for part in dotted.split("."):
        value = value[part]
    return value
