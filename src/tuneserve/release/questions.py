"""Whether answers depend on what is asked: the gates that wrong pairs of question and answer do not
pass. Pure.

Both ask what is measured to be within its threshold. What must be sure is less than elsewhere: that
chance does not explain it. Where many right answers suit several questions, nothing else could be
sure with the conversations that are usually held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tuneserve.release.bootstrap import Interval, Resampled
from tuneserve.release.bounded import bounded
from tuneserve.release.decisions import Gate
from tuneserve.thresholds import GatesSection

FOLLOW, _HEED = "answers follow questions", "questions count as before"
# What wrong pairs give: of two questions, either may be the one that an answer is likelier behind.
_CHANCE = 0.5


def judge_questions(
    config: GatesSection,
    sources: Sequence[str],
    nats: Mapping[str, npt.NDArray[np.float64]],
    held_out: int,
) -> list[Gate | str]:
    """Whether answers depend on what is asked, and still as much as with the base.

    Trained on answers at the wrong questions a model gains what answers have in common, so that
    losses agree. But to it an answer is as likely behind any question: by chance behind another's
    in half of the cases. One that knew better before loses that by and by.

    Args:
        config: Thresholds.
        sources: Conversation of each answer that was tried.
        nats: Its summed loss: `base_own`, `base_other`, `merged_own`, `merged_other`.
        held_out: Conversations that are held out.

    Returns:
        Gates, and why one is skipped.
    """
    tried = len(set(sources))
    if not tried or tried < config.min_conversations <= held_out:
        why = "a partner with another question and another answer"
        return [f"{FOLLOW}: {tried} of {held_out} held-out conversations have {why}"]
    merged = nats["merged_other"] - nats["merged_own"]
    base = nats["base_other"] - nats["base_own"]
    misplaced = ~(merged > 0)
    # Wilcoxon's signed ranks: a near miss says less than a wide one.
    ranks = np.argsort(np.argsort(np.abs(merged))) + 1.0
    columns = {
        "rows": np.ones(len(sources)), "misplaced": misplaced,
        "ranks": ranks, "misplaced_ranks": ranks * misplaced,
        "base": base, "base_other": nats["base_other"],
        "merged": merged, "merged_other": nats["merged_other"],
    }  # fmt: skip
    draws = Resampled(sources, columns, seed=config.seed, confidence=config.confidence)
    return [_follow(config, draws), _heed(config, draws)]


def _follow(config: GatesSection, draws: Resampled) -> Gate:
    share = draws.interval(lambda s: s["misplaced"] / s["rows"])
    ranks = draws.interval(lambda s: s["misplaced_ranks"] / s["ranks"])
    limit, number = config.max_misplaced, _point(share)
    if share.mean <= limit < _CHANCE:  # few enough, and now surely not by chance
        limit, number = _CHANCE, ranks
    rows, wrong = (int(draws.sums[name]) for name in ("rows", "misplaced"))
    return bounded(
        config,
        FOLLOW,
        number,
        limit,
        strict=number is ranks,
        found=f"{wrong} of {rows} answers are as likely behind another conversation's question: "
        f"{share.percent()}, by ranks of how much {ranks.percent()}",
        wanted=f"at most {config.max_misplaced:.0%}, and by ranks surely below the "
        f"{_CHANCE:.0%} of chance",
        setting="gates.max_misplaced",
        most=max(share.mean, _CHANCE),
    )


def _heed(config: GatesSection, draws: Resampled) -> Gate | str:
    limit = config.max_heed_share
    if limit >= 1:
        return f"{_HEED}: not asked for (gates.max_heed_share)"
    if draws.interval(lambda s: s["base"]).low <= 0:
        return f"{_HEED}: to the base itself answers do not depend on these questions"
    lost = draws.interval(lambda s: 1 - s["merged"] / s["base"])
    # The same question without a quotient has bounds whatever the base makes of a draw.
    surely = draws.interval(lambda s: s["base"] - s["merged"]).low > 0
    rows = draws.sums["rows"]
    both = " and ".join(f"{draws.sums[name] / rows:.2f}" for name in ("base", "merged"))
    return bounded(
        config,
        _HEED,
        _point(lost, lost.mean if surely else min(lost.mean, limit)),
        limit,
        found=f"an answer is likelier behind its own question by {both} nats, with the base and "
        f"with the merged model: lost {lost.percent()}",
        wanted=f"at most {limit:.0%} lost, or not surely any",
        setting="gates.max_heed_share",
        most=min(lost.mean, 1.0),
    )


def _point(interval: Interval, number: float | None = None) -> Interval:
    """The number alone, or another one in its place, of as many conversations."""
    number = interval.mean if number is None else number
    return Interval(number, number, number, interval.conversations)
