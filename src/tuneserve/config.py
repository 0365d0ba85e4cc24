"""The run file: one frozen model of everything that varies from run to run.

What varies per machine lives in `deploy/`; what a file format fixes is a constant beside that
format's code; secrets live in the environment and are named here, never held
(`serve.api_key_env`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from tuneserve.credentials import folder_here, without_secret
from tuneserve.endpoint import ServeSection as ServeSection
from tuneserve.parallel import check_zero, refuse_other_sharding
from tuneserve.policy import BudgetSection, NotifySection, OverlapSection
from tuneserve.section import Section, Written
from tuneserve.sizes import Size
from tuneserve.thresholds import GatesSection as GatesSection
from tuneserve.yamltext import written_of

# A path, a hub id or an address; an address must not carry a secret.
Place = Annotated[str, AfterValidator(without_secret)]


class ModelSection(Section):
    """Which base model to tune."""

    base: Place = Field(
        description="Hub id (org/name), a directory with a model, or builtin:smollm2-135m.",
        min_length=1,
    )
    revision: str | None = Field(
        None, description="Commit or tag of the hub repository; a directory has none."
    )
    chat_template: Place | None = Field(
        None,
        description="A Jinja file whose template replaces the tokenizer's own, in "
        "training and in serving.",
    )
    trust_remote_code: bool = Field(
        False,
        description="Run Python code that comes with the model. Off unless you have "
        "read that code.",
    )


class DataSection(Section):
    """Which conversations to train on, and what to refuse."""

    train: list[Place] = Field(
        description="Files, folders or globs with training conversations (JSONL, JSON, "
        "CSV, Parquet).",
        min_length=1,
    )
    eval: list[Place] = Field(
        default_factory=list,
        description="Files with held-out conversations; empty: split from train.",
    )
    eval_fraction: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of conversations held out when `eval` is empty; 0 trains without.",
    )
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion"] = Field(
        "auto", description="Row format; auto decides per file and reports what it found."
    )
    max_length: int = Field(1024, ge=8, description="Longest row in tokens; see too_long.")
    too_long: Literal["drop", "truncate", "error"] = Field(
        "drop",
        description="What happens to rows over max_length: leave out, cut at the end, or stop.",
    )
    max_rejected: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Largest share of rejected rows (a fraction) before the run stops.",
    )
    control_tokens: Literal["reject", "neutralize"] = Field(
        "reject",
        description="Rows whose text contains the tokenizer's control tokens: reject, "
        "or defuse the text.",
    )
    drop_duplicates: bool = Field(
        True, description="Leave out conversations that occur twice after normalization."
    )
    system: str | None = Field(
        None,
        description="System prompt for conversations that have none; unset leaves them "
        "to the template.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the train/eval split.")

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) or written_of(value) else value


class LoraSection(Section):
    """The adapter."""

    r: int = Field(16, ge=1, description="Rank.")
    alpha: float = Field(
        32, gt=0, description="Scale numerator: the update is scaled by alpha / r."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Annotated[list[str], Field(min_length=1)] | Literal["all-linear"] = Field(
        "all-linear", description="Names of the linear layers that get an adapter, or all-linear."
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead of alpha / r.")
    use_dora: bool = Field(False, description="Train DoRA magnitudes as well.")
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Modules trained whole, for example embed_tokens and lm_head.",
    )


class TrainSection(Section):
    """How to train."""

    method: Literal["qlora", "lora"] = Field(
        "qlora", description="qlora: base in NF4 with double quantization; lora: base in 16 bits."
    )
    lora: LoraSection = Field(default_factory=LoraSection, description="The adapter's shape.")
    epochs: float = Field(
        1.0, gt=0, description="Passes over the training rows; ignored when max_steps is set."
    )
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; overrides epochs.")
    effective_batch: int = Field(
        16, ge=1, description="Rows per optimizer step (micro-batch x accumulation)."
    )
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Rows per forward pass; auto takes the largest that the plan says fits."
    )
    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning-rate schedule."
    )
    warmup_fraction: float = Field(
        0.05, ge=0, le=1, description="Share of the steps spent warming up."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(
        1.0, gt=0, description="Gradient norm above which gradients are clipped."
    )
    optimizer: Literal["adamw_8bit", "paged_adamw_8bit", "adamw_torch"] = Field(
        "adamw_8bit", description="Optimizer of the adapter's parameters."
    )
    gradient_checkpointing: bool | Literal["auto", "offload"] = Field(
        "auto",
        description="Recompute activations: less memory, a third more time. offload also holds "
        "what is kept of each block in host memory. auto: the fastest that the plan says fits.",
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="Attention kernel."
    )
    eval_steps: int | None = Field(
        None, ge=1, description="Evaluate every N steps; unset: at the end only."
    )
    keep: Literal["last", "best"] = Field(
        "last",
        description="Which adapter is kept: of the last step, or of the lowest held-out loss among "
        "the evaluations of eval_steps and the end.",
    )
    stall_seconds: int = Field(
        1800, ge=1, description="End a training in which nothing was done for so many seconds."
    )
    save_steps: int = Field(
        50, ge=1, description="Write a checkpoint every N steps; a retry resumes there."
    )
    report_to: list[Literal["tensorboard", "mlflow", "wandb"]] = Field(
        default_factory=list, description="Experiment trackers of the transformers Trainer."
    )
    target_utilization: float = Field(
        0.88, gt=0, le=1, description="Share of the GPU's memory that the plan may fill."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of adapter weights and row order.")
    gpus: int = Field(
        1,
        ge=1,
        description="GPUs of this machine that share each step, one process a GPU; rows, order "
        "and losses stay those of one. Without a GPU: processes on the CPU.",
    )
    zero: Literal[0, 2] = Field(
        0,
        description="2: DeepSpeed ZeRO-2 spreads gradients and optimizer state over the GPUs, for "
        "a 16-bit LoRA with many parameters; 0: every GPU has all of them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_other_sharding(cls, data: Any) -> Any:
        return refuse_other_sharding(data)

    @model_validator(mode="after")
    def _batches_divide(self) -> TrainSection:
        if isinstance(self.micro_batch, int) and self.effective_batch % self.micro_batch:
            raise ValueError(
                f"effective_batch {self.effective_batch} is not a multiple of "
                f"micro_batch {self.micro_batch}"
            )
        if self.keep == "best" and self.eval_steps is None:
            raise ValueError("keep: best needs eval_steps, or there is nothing to choose from")
        together = self.gpus * (self.micro_batch if isinstance(self.micro_batch, int) else 1)
        if self.effective_batch % together:
            raise ValueError(
                f"effective_batch {self.effective_batch} cannot be shared evenly: not a multiple "
                f"of {together} (gpus x micro_batch)"
            )
        if self.zero:
            check_zero(self.method, use_dora=self.lora.use_dora)
        return self


class MergeSection(Section):
    """How the adapter goes into the base."""

    base: Literal["auto", "original", "nf4"] = Field(
        "auto",
        description="Onto the original 16-bit weights, the dequantized NF4 weights that "
        "training saw, or whichever "
        "has the lower held-out loss.",
    )
    max_memory: Size = Field(
        700 * 2**20, description="Memory the merge may use, torch included, in bytes or 700MiB."
    )


Method = Literal["gptq", "awq", "none"]


def _default_methods() -> list[Method]:
    return ["gptq"]


# Settings of GPTQModel that have one value here, the one that vLLM serves, and why.
_ONE_SCHEME = {
    "desc_act": "vLLM refuses activation order with groups, and without groups it changes nothing; "
    "exports have desc_act: false",
    "sym": "vLLM serves GPTQ with sym: true alone and AWQ with zero points, and exports are so",
    "lm_head": "the head stays in 16 bits: it is small beside the rest, often tied to the "
    "embedding, and costs the most when it is rounded",
}


class QuantizeSection(Section):
    """The 4-bit export."""

    methods: list[Method] = Field(
        default_factory=_default_methods,
        min_length=1,
        description="Ladder of exports: the next is tried when one is refused; none "
        "serves the 16-bit model.",
    )
    bits: Literal[4] = Field(4, description="Bits per weight.")
    group_size: int = Field(
        128, description="Weights per scale: 32, 64, 128 or -1 for one per row."
    )
    calibration_rows: int = Field(256, ge=1, description="Training rows used for calibration.")
    calibration_max_tokens: int = Field(
        512, ge=16, description="Calibration rows are cut to this many tokens."
    )
    min_calibration_tokens: int = Field(
        1024, ge=1, description="Fewer real calibration tokens than this: stop."
    )
    allow_fallback: bool = Field(
        False, description="Accept round-to-nearest for modules that calibration barely reached."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_scheme(cls, data: Any) -> Any:
        asked = [name for name in _ONE_SCHEME if isinstance(data, Mapping) and name in data]
        if asked:
            raise ValueError(f"{asked[0]} is no choice: {_ONE_SCHEME[asked[0]]}; leave it out")
        return data

    @field_validator("group_size")
    @classmethod
    def _known_group(cls, value: int) -> int:
        if value not in (-1, 32, 64, 128):
            raise ValueError(f"{value} is not served by vLLM; use 32, 64, 128 or -1")
        return value


class EngineSection(Section):
    """The interpreter of one stage."""

    python: Place | None = Field(
        None, description="Python interpreter for the stage; unset: the one running now."
    )
    max_seconds: float | None = Field(
        None,
        gt=0,
        description="The stage is ended after this many seconds, all its attempts in one run "
        "together; a run that is started again has them anew. Unset: no limit.",
    )


class EnginesSection(Section):
    """Stages can live in other environments."""

    data: EngineSection = Field(default_factory=EngineSection, description="For validate.")
    train: EngineSection = Field(default_factory=EngineSection, description="For train.")
    evaluate: EngineSection = Field(default_factory=EngineSection, description="For evaluate.")
    merge: EngineSection = Field(default_factory=EngineSection, description="For merge.")
    quantize: EngineSection = Field(default_factory=EngineSection, description="For quantize.")
    serve: EngineSection = Field(default_factory=EngineSection, description="For vLLM.")


class StoreSection(Section):
    """Where artifacts are kept."""

    root: Annotated[str, AfterValidator(folder_here)] | None = Field(
        None, description="Folder of the artifact store; unset: TUNESERVE_HOME/store."
    )
    remote: Place | None = Field(
        None,
        description="Where every artifact is copied to and looked for, such as "
        "s3://bucket/prefix; unset: nowhere.",
    )


class RunFile(Section):
    """One run: data and base in, endpoint out."""

    _written: Written = PrivateAttr(default_factory=Written)

    def where(self, path: str) -> str:
        """The path of a field, with file, line and column where the run was read from a file."""
        return self._written.where(path)

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="Name of the run, lower case with dashes."
    )
    model: ModelSection = Field(description="The base model.")
    data: DataSection = Field(description="The conversations.")
    train: TrainSection = Field(default_factory=TrainSection, description="Training.")
    merge: MergeSection = Field(default_factory=MergeSection, description="Merging.")
    quantize: QuantizeSection = Field(default_factory=QuantizeSection, description="4-bit export.")
    gates: GatesSection = Field(default_factory=GatesSection, description="Promotion gates.")
    serve: ServeSection = Field(default_factory=ServeSection, description="Serving.")
    engines: EnginesSection = Field(
        default_factory=EnginesSection, description="Interpreters per stage."
    )
    store: StoreSection = Field(default_factory=StoreSection, description="Artifact store.")
    budget: BudgetSection = Field(default_factory=BudgetSection, description="What a run may cost.")
    overlap: OverlapSection = Field(
        default_factory=OverlapSection, description="When another run is under way."
    )
    notify: NotifySection = Field(
        default_factory=NotifySection, description="Who hears how a run ended."
    )
