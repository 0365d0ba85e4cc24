"""Whether answers depend on what is asked: the gates that wrong pairs of question and answer do not
pass. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tuneserve.release.bootstrap import Resampled
from tuneserve.release.bounded import bounded
from tuneserve.release.decisions import Gate
from tuneserve.thresholds import GatesSection

FOLLOW, _HEED = "answers follow questions", "questions count as before"


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
        return [f"{FOLLOW}: {tried} of {held_out} held-out conversations have another answer"]
    merged = nats["merged_other"] - nats["merged_own"]
    base = nats["base_other"] - nats["base_own"]
    misplaced = ~(merged > 0)
    columns = {
        "misplaced": misplaced, "rows": np.ones(len(sources)), "base": base, "merged": merged,
    }  # fmt: skip
    draws = Resampled(sources, columns, seed=config.seed, confidence=config.confidence)
    share = draws.interval(lambda s: s["misplaced"] / s["rows"])
    gates: list[Gate | str] = [
        bounded(
            config,
            FOLLOW,
            share,
            config.max_misplaced,
            found=f"{misplaced.sum()} of {len(sources)} answers are as likely behind another "
            f"conversation's question: {share.percent()}",
            wanted=f"at most {config.max_misplaced:.0%}; half of them are by chance",
            setting="gates.max_misplaced",
        )
    ]
    limit = config.max_heed_share
    if limit >= 1:
        return [*gates, f"{_HEED}: not asked for (gates.max_heed_share)"]
    if draws.interval(lambda s: s["base"]).low <= 0:
        return [*gates, f"{_HEED}: to the base itself answers do not depend on these questions"]
    lost = draws.interval(lambda s: 1 - s["merged"] / s["base"])
    # The same question without a quotient has bounds whatever the base makes of a draw.
    room = draws.interval(lambda s: ((1 - limit) * s["base"] - s["merged"]) / s["rows"])
    both = " and ".join(f"{draws.sums[name] / len(sources):.2f}" for name in ("base", "merged"))
    gate = bounded(
        config,
        _HEED,
        room,
        0.0,
        found=f"an answer is likelier behind its own question by {both} nats, with the base and "
        f"with the merged model: lost {lost.percent()}",
        wanted=f"at most {limit:.0%} lost",
        setting="gates.max_heed_share",
        most=min(lost.high, 1.0),
    )
    return [*gates, gate]
