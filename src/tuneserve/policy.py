"""The parts of the run file for runs that nobody watches: what a run may cost, what it does when
another holds what it needs, and who hears how it ended.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tuneserve.credentials import variable_name, word_without_secret
from tuneserve.section import Section

Event = Literal["promoted", "refused", "failed", "unchanged"]


def _default_events() -> list[Event]:
    return ["promoted", "refused", "failed"]


class BudgetSection(Section):
    """What one run may cost. Artifacts that are re-used cost nothing."""

    max_gpu_hours: float | None = Field(
        None,
        gt=0,
        description="GPU hours of one run: hours of its stages times the cards it sees, waits "
        "between retries included; unset: no limit.",
    )
    max_seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds that the stages of one run may take together; unset: no limit. One "
        "stage alone: engines.*.max_seconds.",
    )
    price_per_gpu_hour: float | None = Field(
        None,
        ge=0,
        description="What one GPU costs an hour, in your currency; shown by `tuneserve lineage`.",
    )


class OverlapSection(Section):
    """What a run does while another holds its served name or a card."""

    when_busy: Literal["wait", "refuse"] = Field(
        "wait", description="Wait until the other run has ended, or end at once and name it."
    )
    max_wait_seconds: float = Field(
        86400, ge=0, description="Longest wait in seconds; then the run ends and names the other."
    )


class NotifySection(Section):
    """Who hears how a run ended: a webhook, with the gates' findings, and a command."""

    url_env: Annotated[str | None, BeforeValidator(variable_name)] = Field(
        None,
        description="Environment variable that holds the webhook's URL, which is a secret; the "
        "URL itself never here.",
    )
    events: list[Event] = Field(
        default_factory=_default_events,
        description="Which ends are told: promoted, refused (by a gate), failed, unchanged.",
    )
    promoted_command: list[Annotated[str, AfterValidator(word_without_secret)]] = Field(
        default_factory=list,
        description="Command run after a promotion, such as one that tells a cluster; it finds "
        "TUNESERVE_MODEL_DIR, TUNESERVE_RELEASE and TUNESERVE_SERVED_NAME in its environment, "
        "may run twice for one release, and its failure fails the run.",
    )
