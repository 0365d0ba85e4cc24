"""What transformers takes as a generation config, and how one that it would refuse is mended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What transformers refuses when it loads or saves such a config
# (GenerationConfig.validate(strict=True) of transformers 5.19), hours after the merge. A config
# that samples nothing must not set these:
_SAMPLING_FIELDS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_BEAM_FIELDS = {"early_stopping": False, "length_penalty": 1.0}
_OUTPUT_FIELDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_CACHE_FIELDS = ("cache_implementation", "cache_config")
_CACHES = frozenset(
    """
    static offloaded_static dynamic offloaded quantized paged sliding_window hybrid hybrid_chunked
    offloaded_hybrid offloaded_hybrid_chunked
    """.split()
)
# Arguments of generate(), which a saved config must not hold.
_ARGUMENTS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "compile_config",
)


def valid_generation_config(generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy without what transformers refuses, and a note about every repair.

    With more beams than one, what only beams read stays; vLLM reads none of it.
    """
    repaired, notes = dict(generation), list[str]()
    _repair_sampling(repaired, notes)
    for why, names in _dead_fields(repaired):
        for name in names:
            del repaired[name]
        if names:
            notes.append(f"generation config {why}: {', '.join(names)} removed")
    return repaired, notes


def _repair_sampling(repaired: dict[str, Any], notes: list[str]) -> None:
    """Sampling fields without `do_sample` mean sampling; with an explicit `do_sample: false` they
    are dead. A temperature of 0 means greedy.
    """
    sampling = _set_fields(repaired, _SAMPLING_FIELDS)
    is_zero = _number(repaired.get("temperature"), 1) == 0
    has_beams = _number(repaired.get("num_beams"), 1) > 1
    if is_zero and (repaired.get("do_sample") is True or not has_beams):
        # transformers refuses it, sampling or not; vLLM reads no do_sample, and without a
        # temperature takes 1. With top_k 1 a request without settings is greedy in both.
        for name in sampling:
            del repaired[name]
        repaired.update(do_sample=True, top_k=1)
        notes.append(
            "generation config has temperature 0: written as top_k 1, which is as greedy; to "
            "sample, a request (or serve in a run file) sets top_k beside the temperature"
        )
    elif sampling and repaired.get("do_sample") is None and not is_zero:
        repaired["do_sample"] = True
        notes.append(f"generation config sets {', '.join(sampling)}: do_sample set to true")
    elif sampling and repaired.get("do_sample") is not True:
        for name in sampling:
            del repaired[name]
        notes.append(
            f"generation config does not sample: {', '.join(sampling)} removed; vLLM is greedy by "
            "default only with serve.temperature: 0"
        )


def _dead_fields(config: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Reasons, and the fields that have to go for each; no field has two."""
    beams = _number(config.get("num_beams"), 1)
    answers = _number(config.get("num_return_sequences"), 1)
    of_beams = _set_fields(config, _BEAM_FIELDS) if beams == 1 else []
    unknown = config.get("early_stopping") not in (None, True, False, "never")
    weighs = config.get("assistant_ensemble_weight") is not None
    weight = _number(config.get("assistant_ensemble_weight"))
    cache = config.get("cache_implementation")
    uncached = config.get("use_cache") is False
    caches = [n for n in _CACHE_FIELDS if uncached and config.get(n) is not None]
    outputs = [n for n in _OUTPUT_FIELDS if config.get(n) is True]
    suppressed = set(as_ids(config.get("suppress_tokens")))
    forced = [
        name
        for name in ("forced_bos_token_id", "forced_eos_token_id")
        if (ids := set(as_ids(config.get(name)))) and ids <= suppressed
    ]

    def only(name: str, is_dead: bool) -> list[str]:
        return [name] if is_dead else []

    return [
        ("holds arguments of generate()", [n for n in _ARGUMENTS if n in config]),
        ("uses one beam", of_beams),
        ("stops early in no known way", only("early_stopping", unknown and not of_beams)),
        (
            "has a negative pad_token_id",
            only("pad_token_id", _number(config.get("pad_token_id")) < 0),
        ),
        (
            "asks for no new token",
            only("max_new_tokens", _number(config.get("max_new_tokens"), 1) < 1),
        ),
        (
            "asks for more answers than it has beams or samples",
            only(
                "num_return_sequences",
                answers > 1
                and (answers > beams if beams > 1 else config.get("do_sample") is not True),
            ),
        ),
        ("returns no dictionary", [] if config.get("return_dict_in_generate") is True else outputs),
        ("uses no cache", caches),
        (
            "names an unknown cache",
            only(
                _CACHE_FIELDS[0], not uncached and cache is not None and str(cache) not in _CACHES
            ),
        ),
        (
            "weighs its assistant outside 0 to 1",
            only("assistant_ensemble_weight", weighs and not 0 < weight < 1),
        ),
        ("forces tokens that it suppresses", forced),
    ]


def _set_fields(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """The fields that are set to something else than their default."""
    return [n for n, off in defaults.items() if config.get(n) is not None and config[n] != off]


def _number(value: Any, default: int = 0) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else default


def as_ids(value: Any) -> list[int]:
    """An id, or the ids of a list; what is no id is none."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
