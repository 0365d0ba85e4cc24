"""Whether the fields of an adapter_config.json hold what PEFT's LoraConfig lets them hold.

Whoever edits such a file by hand, or writes one without PEFT, is told the field; the merge itself
may then take the values for what they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_Check = Callable[[Any], bool]


def wrong_fields(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with each field that decides something; empty when nothing is."""
    return [
        f"{name} is {config[name]!r}, not {wanted}"
        for names, is_right, wanted in _FIELDS
        for name in names
        if name in config and not is_right(config[name])
    ]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return isinstance(value, str)


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _list_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _by_pattern(is_right: _Check) -> _Check:
    def check(value: Any) -> bool:
        return not value or (
            isinstance(value, dict)
            and all(map(_is_pattern, value))
            and all(map(is_right, value.values()))
        )

    return check


def _any_of(*checks: _Check) -> _Check:
    return lambda value: value is None or any(check(value) for check in checks)


def _is_rows_by_module(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_list_of(_is_whole), value.values()))


_FIELDS: tuple[tuple[tuple[str, ...], _Check, str], ...] = (
    (("r",), _is_rank, "a whole number above 0"),
    (("lora_alpha",), _is_number, "a number"),
    (("rank_pattern",), _by_pattern(_is_rank), "whole numbers above 0 by regular expression"),
    (("alpha_pattern",), _by_pattern(_is_number), "numbers by regular expression"),
    (
        ("target_modules", "exclude_modules"),
        _any_of(_is_pattern, _list_of(_is_text)),
        "a list of names or a regular expression",
    ),
    (("modules_to_save",), _any_of(_list_of(_is_text)), "a list of names"),
    (
        ("trainable_token_indices",),
        _any_of(_list_of(_is_whole), _is_rows_by_module),
        "a list of token ids, or such lists by module",
    ),
    (
        ("layers_to_transform",),
        _any_of(_is_whole, _list_of(_is_whole)),
        "a layer's number or a list of them",
    ),
    (
        ("layers_pattern",),
        _any_of(_is_pattern, _list_of(_is_pattern)),
        "a name or a list of them",
    ),
    (
        ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"),
        _is_switch,
        "true or false",
    ),
    (("init_lora_weights",), _any_of(_is_switch, _is_text), "true, false or a method's name"),
    (
        ("bias",),
        lambda value: value in (None, "none", "all", "lora_only"),
        "none, all or lora_only",
    ),
)
