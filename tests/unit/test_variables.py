"""Variables that a run file names are checked before anything is made."""

from __future__ import annotations

from typing import Any

import pytest

from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.variables import check_variables

KEY = "0123456789abcdef"
HOOK = "https://hooks.example.com/T0/s3cret?x=1"


def run(**sections: Any) -> RunFile:
    whole = {"name": "n", "model": {"base": "org/m"}, "data": {"train": ["d.jsonl"]}}
    return RunFile.model_validate({**whole, **sections})


BOTH = {"serve": {"api_key_env": "MY_KEY"}, "notify": {"url_env": "MY_HOOK"}}


def test_what_is_set_is_enough_and_what_is_not_named_is_not_asked_for() -> None:
    check_variables(run(), {})
    check_variables(run(**BOTH), {"MY_KEY": KEY, "MY_HOOK": HOOK})
    check_variables(run(notify={"url_env": "MY_HOOK", "events": []}), {})  # nobody is told anything


def test_all_that_are_missing_are_named_at_once() -> None:
    with pytest.raises(RunFileError) as caught:
        check_variables(run(**BOTH), {"MY_HOOK": ""})
    assert caught.value.message == (
        "serve.api_key_env names MY_KEY, which is not set\n"
        "  notify.url_env names MY_HOOK, which is not set"
    )
    assert caught.value.expected == (
        "MY_KEY: 16 to 256 printable characters without spaces; MY_HOOK: an http(s) address"
    )
    assert not caught.value.retryable and caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("held", "field"),
    [
        ({"MY_KEY": KEY[:15]}, "serve.api_key_env names MY_KEY, which holds 15 characters"),
        # From a file whose last line ends: a header cannot carry it.
        ({"MY_KEY": f"{KEY}\n"}, "serve.api_key_env names MY_KEY, which holds 17 characters"),
        ({"MY_HOOK": f"{HOOK}\n"}, "notify.url_env names MY_HOOK, which holds 40 characters"),
        ({"MY_HOOK": "hooks.example.com/s3cret"}, "notify.url_env names MY_HOOK"),
    ],
)
def test_what_would_be_refused_at_the_end_is_refused_at_the_start(
    held: dict[str, str], field: str
) -> None:
    with pytest.raises(RunFileError) as caught:
        check_variables(run(**BOTH), {"MY_KEY": KEY, "MY_HOOK": HOOK, **held})
    assert field in caught.value.message and "that cannot be used" in caught.value.message
    assert "s3cret" not in str(caught.value) and KEY[:15] not in str(caught.value)
