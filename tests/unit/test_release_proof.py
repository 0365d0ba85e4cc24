"""Parity, served scores, death reports: numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuneserve.errors import OutOfMemory, ServerError
from tuneserve.release import parity
from tuneserve.release.heldout import Row, spread
from tuneserve.release.parity import ParityRefused, check_parity
from tuneserve.release.ready import death_error, prompts_of
from tuneserve.release.served_loss import row_scores
from tuneserve.release.traffic import recent

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
# user turn 10 11, generation prompt 20, answer 30 31, end 2, and a newline 9 that is not learned
WHOLE, PROMPT = [10, 11, 20, 30, 31, 2, 9], [10, 11, 20]
LABELS = [-100, -100, -100, 30, 31, 2, -100]


def row(ids: list[int], labels: list[int], messages: list[dict[str, Any]] = CHAT) -> Row:
    return Row(ids, labels, "chats.jsonl:1", messages, None)


def serve(monkeypatch: pytest.MonkeyPatch, whole: list[int], prompt: list[int]) -> None:
    def tokenize(*_: Any, generate: bool) -> list[int]:
        return prompt if generate else whole

    monkeypatch.setattr(parity, "tokenize", tokenize)


def check(found: Row) -> parity.Parity:
    return check_parity(Path("/nowhere"), "m", [found])


def test_equal_ids_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, WHOLE, PROMPT)
    assert check(row(WHOLE, LABELS)).whole == 1


def test_a_row_that_was_cut_passes_as_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, WHOLE, PROMPT)
    assert check(row(WHOLE[:5], LABELS[:5])).truncated == 1


def test_a_difference_names_the_first_index(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, [10, 12, *WHOLE[2:]], [10, 12, 20])
    with pytest.raises(ParityRefused, match=r"chats.jsonl:1.*at index 1: .*\[10, 12, 20\] served"):
        check(row(WHOLE, LABELS))


def test_a_missing_end_token_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, [10, 11, 20, 30, 31, 9], PROMPT)
    with pytest.raises(ParityRefused, match="index 5"):
        check(row(WHOLE, LABELS))


def test_supervision_must_begin_where_the_server_begins_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(monkeypatch, WHOLE, PROMPT)
    with pytest.raises(ParityRefused, match="begins to write at index 3.*from index 4"):
        check(row(WHOLE, [-100] * 4 + LABELS[4:]))


def test_a_row_per_turn_is_compared_by_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [*CHAT, *CHAT]
    ids = [10, 30, 11, 20, 40, 31, 2]  # rendered for generation, then the answer with its thinking
    labels = [-100] * 4 + [40, 31, 2]
    serve(monkeypatch, [10, 30, 11, 20, 31, 2], [10, 30, 11, 20])
    assert check(row(ids, labels, chat)).prompts_only == 1


def test_a_changed_template_is_no_rewritten_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """System, user and assistant: nothing came before that a template could have rewritten."""
    chat = [{"role": "system", "content": "s"}, *CHAT]
    ids, labels = [5, *WHOLE], [-100, *LABELS]
    serve(monkeypatch, ids, [5, *PROMPT])
    assert check(row(ids, labels, chat)).whole == 1
    # The prompt is right, and a token within the answer, or its end, is not.
    for changed, index in (([5, 10, 11, 20, 30, 32, 2, 9], 5), ([5, 10, 11, 20, 30, 31, 9], 6)):
        serve(monkeypatch, changed, [5, *PROMPT])
        with pytest.raises(ParityRefused, match=f"differ from the trained ids at index {index}"):
            check(row(ids, labels, chat))


def test_spread_takes_first_and_last() -> None:
    rows = [row([i], [-100]) for i in range(10)]
    assert [r.ids[0] for r in spread(rows, 4)] == [0, 3, 6, 9]
    assert spread(rows, 20) == rows and spread(rows, 1) == rows[:1]


def test_prompts_leave_out_the_answer() -> None:
    assert prompts_of([row(WHOLE, LABELS)], 3) == [CHAT[:1]]


def test_scores_are_of_supervised_tokens_only() -> None:
    logprobs = [None] + [{str(t): {"logprob": -i / 2, "rank": i}} for i, t in enumerate(WHOLE)][1:]
    found = row_scores(logprobs, row(WHOLE, LABELS))
    # positions 3, 4, 5: 1.5 + 2 + 2.5
    assert found.nats().tolist() == [6.0] and found.tokens.tolist() == [30, 31, 2]


def test_the_likeliest_tokens_come_in_their_order() -> None:
    entry = {
        "30": {"logprob": -5.0, "rank": 40},  # stands there, and is not among the likeliest
        "7": {"logprob": -1.0, "rank": 2},
        "8": {"logprob": -0.5, "rank": 1},
    }
    logprobs: list[Any] = [{str(t): {"logprob": -1.0, "rank": 1}} for t in WHOLE]
    logprobs[3] = entry
    found = row_scores(logprobs, row(WHOLE, LABELS))
    assert found.actual.tolist() == [-5.0, -1.0, -1.0]
    assert found.ids[0, :3].tolist() == [8, 7, -1]
    assert found.first_choice().tolist() == [False, True, True]


@pytest.mark.parametrize("bad", [{}, {"2": {"logprob": float("nan"), "rank": 1}}])
def test_a_number_that_is_missing_or_not_finite_is_an_error(bad: dict[str, Any]) -> None:
    logprobs: list[Any] = [{str(t): {"logprob": -1.0, "rank": 1}} for t in WHOLE]
    logprobs[5] = bad
    with pytest.raises(ServerError, match="for token 2 at 5"):
        row_scores(logprobs, row(WHOLE, LABELS))


def test_a_dead_server_is_quoted_with_a_hint(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    line = "ValueError: To serve at least one request with the models's max seq len (32768), "
    line += "9.0 GiB KV cache is needed; the estimated maximum model length is 1234."
    log.write_text(f"INFO loading\n{line}\nTraceback\n")
    error = death_error("r1", log)
    assert isinstance(error, OutOfMemory)
    assert "estimated maximum model length is 1234" in error.message
    assert "serve.max_model_len" in error.hint
    log.write_text("one\ntwo\n")
    assert "one\n    two" in death_error("r1", log).message
    assert "wrote nothing" in death_error("r1", tmp_path / "none").message


def test_requests_per_second_from_the_access_log(tmp_path: Path) -> None:
    lines = [
        {"ts": 1000.0, "request": {"uri": "/v1/models"}},
        {"ts": 1030.0, "request": {"uri": "/v1/chat/completions"}},
        {"ts": 1031.0, "request": {"uri": "/moss/v1/chat/completions"}},
        {"ts": 1032.0, "request": {"uri": "/health"}},
    ]
    path = tmp_path / "access.log"
    path.write_text("cut line\n" + "".join(json.dumps(line) + "\n" for line in lines))
    assert recent(path, "main", now=1070.0) == {"main": 0.02, "moss": 0.02}
    assert recent(tmp_path / "none", "main") == {}
