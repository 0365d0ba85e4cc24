"""How long an answer may be, and which settings keep it shorter than the trained ones need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuneserve.config import ServeSection
from tuneserve.release.heldout import Row

# An answer gets room for twice the longest known one, and what lies within these.
_LEAST, _MOST = 64, 512
# What limits every answer of a server.
CUTS_ANSWERS = "serve.max_tokens or the model's max_new_tokens"


@dataclass(frozen=True)
class AnswerRoom:
    """Tokens that an answer may have.

    Attributes:
        asked: What the proofs ask for.
        served: What the server gives at most, whoever asks.
        cut: Which settings left less than an answer may need, and what to set; empty where none
            did.
        setting: These settings with their new values, for the report; empty as well.
    """

    asked: int = 256
    served: int = 1 << 30
    cut: str = ""
    setting: str = ""


def answer_room(
    rows: Sequence[Row], serve: ServeSection, max_new_tokens: int | None, max_model_len: int
) -> AnswerRoom:
    """Room for an answer: twice the longest known one, at least 64, at most 512 and what the server
    takes and gives.

    Args:
        rows: Known answers.
        serve: Part of the run file.
        max_new_tokens: What the server gives, by the run file or else by generation_config.json.
        max_model_len: Prompt and answer that the server takes; half is left for the prompt.
    """
    longest = max((len(row.ids) - row.answer_start for row in rows), default=_LEAST // 2)
    wanted = min(max(_LEAST, 2 * longest), _MOST)
    served = 1 << 30 if max_new_tokens is None else int(max_new_tokens)
    tokens = min(wanted, served, max_model_len // 2)
    if tokens == wanted:
        return AnswerRoom(tokens, served)
    cuts = []
    if served < wanted:
        name = f"serve.max_tokens is {served}"
        if serve.max_tokens is None:
            name = f"generation_config.json of the model has max_new_tokens {served}"
        cuts.append((served, name, f"serve.max_tokens: {wanted}"))
    if max_model_len // 2 < wanted:
        name = f"the server takes {max_model_len} tokens, half of them for the answer"
        if serve.max_model_len is not None:
            name = f"serve.max_model_len is {max_model_len}, half of it for the answer"
        cuts.append((max_model_len // 2, name, f"serve.max_model_len: {2 * wanted}"))
    names, settings = zip(*(cut[1:] for cut in sorted(cuts)), strict=True)
    setting = " and ".join(settings)
    need = f"known answers have up to {longest} tokens: set {setting}, or more"
    return AnswerRoom(tokens, served, ", and ".join((*names, need)), setting)
