"""The part of the run file that says when a candidate may be promoted: one field a threshold."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from tuneserve.section import Section
from tuneserve.yamltext import written_of


class CanarySection(Section):
    """A prompt whose answer you know: asked greedily of every candidate."""

    name: str = Field(
        "", description="What the report calls it; unset: the beginning of the prompt."
    )
    prompt: str = Field(min_length=1, description="The user's message.")
    system: str | None = Field(None, description="System message before it; unset: none.")
    contains: list[str] = Field(
        default_factory=list, description="Every one of these must stand in the answer."
    )
    matches: list[str] = Field(
        default_factory=list,
        description="Regular expressions (Python's), each of which must be found in the answer.",
    )
    lacks: list[str] = Field(
        default_factory=list, description="None of these may stand in the answer."
    )
    max_tokens: int = Field(256, ge=1, description="Longest answer in tokens.")

    @field_validator("contains", "matches", "lacks", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return [value] if isinstance(value, str) or written_of(value) else value

    @field_validator("matches")
    @classmethod
    def _compiles(cls, value: list[str]) -> list[str]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _asks_something(self) -> CanarySection:
        if not (self.contains or self.matches or self.lacks):
            raise ValueError("says nothing about the answer; set contains, matches or lacks")
        return self

    @property
    def label(self) -> str:
        """The name, or the beginning of the prompt."""
        return self.name or self.prompt[:40]


class GatesSection(Section):
    """When a candidate may be promoted.

    Losses are mean nats per supervised token on held-out rows. Each bound is the upper end of a
    paired bootstrap over conversations, so a candidate passes when it is surely good enough, and
    not when it merely looks so.
    """

    enabled: bool = Field(
        True, description="Judge the candidate on held-out rows before it is promoted."
    )
    eval_rows: int = Field(64, ge=1, description="Most held-out rows that losses are measured on.")
    min_conversations: int = Field(
        8,
        ge=2,
        description="With fewer held-out conversations nothing can be decided, and the candidate "
        "is refused.",
    )
    allow_undecided: bool = Field(
        False,
        description="Promote also when there are too few held-out conversations to decide, as "
        "long as the measured values themselves are within the thresholds.",
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="Share of bootstrap draws that an interval spans."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the bootstrap's draws.")
    must_beat_base: bool = Field(
        True, description="The served model's loss must be below the base model's."
    )
    max_misplaced: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Largest share of held-out conversations whose longest answer the merged model "
        "finds as likely behind another's question as behind its own; answers at the wrong "
        "questions give 0.5, which must surely not be the case unless it is allowed; 1 asks for "
        "nothing.",
    )
    max_heed_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Largest share that tuning may take of how much likelier the base finds a "
        "longest answer behind its own question than behind another's, in nats; 1 asks for "
        "nothing.",
    )
    max_merge_share: float = Field(
        0.1,
        ge=0,
        description="Largest share of what tuning gained (base minus adapter, in loss) that "
        "merging may lose (merged minus adapter).",
    )
    max_quantize_share: float = Field(
        0.2,
        ge=0,
        description="Largest share of what tuning gained (base minus merged, in loss) that "
        "quantizing and serving may lose (served minus merged).",
    )
    max_merge_kl_over_rtn: float = Field(
        2.0,
        ge=0,
        description="Largest divergence of the merged model from the adapter on its training "
        "base, as a multiple of what plain 4-bit rounding to nearest costs.",
    )
    max_kl_over_rtn: float = Field(
        1.5,
        ge=0,
        description="Largest divergence of the served from the merged model, as a multiple of "
        "what plain 4-bit rounding to nearest costs.",
    )
    merge_kl_floor: float = Field(
        0.02,
        ge=0,
        description="Divergence in nats per token that merging may add to that.",
    )
    kl_floor: float = Field(
        0.02,
        ge=0,
        description="Divergence in nats per token that serving may add to max_kl_over_rtn: what "
        "two right engines differ by, one of them computing in 16 bits.",
    )
    max_flips_over_rtn: float = Field(
        0.05,
        ge=0,
        le=1,
        description="How much larger the share of tokens whose first choice is not the merged "
        "model's may be than under plain 4-bit rounding to nearest.",
    )
    max_over_champion: float = Field(
        0.02,
        description="Largest loss over what serves now, on the same conversations, in nats per "
        "byte of answer; negative asks for an improvement.",
    )
    compare_champion: bool = Field(
        True, description="Measure what serves now on the same conversations and compare."
    )
    parity_chats: int = Field(
        8, ge=1, description="Held-out chats whose token ids the server must reproduce."
    )
    answers: int = Field(
        8, ge=0, description="Held-out prompts that the candidate answers greedily."
    )
    min_ended: float = Field(
        0.5, ge=0, le=1, description="Smallest share of those answers that end with a stop token."
    )
    max_looping: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Largest share of answers that repeat one token or phrase to their end.",
    )
    max_gibberish: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Largest share of answers that are broken text, or whose tokens the model "
        "itself finds unlikely (see max_answer_nats).",
    )
    max_answer_nats: float = Field(
        2.5,
        gt=0,
        description="Mean nats per token of a greedy answer, by the model that gave it, above "
        "which it counts as gibberish.",
    )
    structured_answers: int = Field(
        16,
        ge=0,
        description="Held-out rows with JSON or tool calls whose served answers must parse as "
        "often as the merged model's.",
    )
    max_parse_loss: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of those rows that may parse with the merged model and not when "
        "served, on balance.",
    )
    canaries: list[CanarySection] = Field(
        default_factory=list, description="Prompts whose answers you know."
    )
