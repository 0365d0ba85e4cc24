"""The ladder of exports with stages that answer as told: what is tried, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuneserve.calls import StageCall, StageResult
from tuneserve.errors import (
    GateRefused,
    OutOfMemory,
    QuantizeError,
    RunFileError,
    ServerError,
    StageKilled,
    TuneserveError,
)
from tuneserve.ladder import check_held_out, quantize, release_best
from tuneserve.release.proving import _advised_methods
from tuneserve.runfile import parse_run

BASE = Path("/base")
HAVE = {"dataset": "dataset-1", "adapter": "adapter-1", "merged": "merged-1",
        "evaluation": "evaluation-1"}  # fmt: skip
PROMOTED = {"endpoint": "http://x/v1", "model": "m", "release": "r1"}


def run(**sections: Any) -> Any:
    minimal = {"name": "x", "model": {"base": "b"}, "data": {"train": "t.jsonl"}}
    return parse_run({**minimal, **sections})


class Stages:
    """Answers each call with the next of `answers` for its stage; an error is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers, self.calls = answers, list[StageCall]()

    def __call__(self, call: StageCall) -> StageResult:
        self.calls.append(call)
        answer = self.answers[call.stage].pop(0)
        if isinstance(answer, TuneserveError):
            raise answer
        if call.stage == "quantize":
            return StageResult("quantize", {}, answer)
        return StageResult(call.stage, answer)


def refusal(text: str, *settings: str) -> GateRefused:
    return GateRefused(text, expected="less", details={"would_pass": list(settings)})


def test_the_first_rung_that_passes_is_promoted_and_all_are_reported() -> None:
    stages = Stages(
        quantize=["quantized-g", QuantizeError("AWQ failed\nin layer 3")],
        release=[refusal("lost 30 %", "gates.max_quantize_share: 0.31"), PROMOTED],
    )
    artifacts = dict(HAVE)
    chosen = run(quantize={"methods": ["gptq", "awq", "none"]})
    found = release_best(chosen, BASE, artifacts, stages, {"kv": 1})
    assert found["release"] == "r1"
    assert [(r["method"], r["decision"], r["reason"]) for r in found["rungs"]] == [
        ("gptq", "refused", "lost 30 %"), ("awq", "failed", "AWQ failed"), ("none", "passed", ""),
    ]  # fmt: skip
    assert artifacts == HAVE  # what was refused is not part of the result
    last = stages.calls[-1]
    assert "quantized" not in last.inputs and last.hints["kv"] == 1
    assert [rung["method"] for rung in last.hints["rungs"]] == ["gptq", "awq"]
    assert stages.calls[1].inputs["quantized"] == "quantized-g"
    assert last.hints["methods"] == ["gptq", "awq", "none"]


@pytest.mark.parametrize(
    ("hints", "export", "advised"),
    [
        ({"methods": ["gptq", "none"], "rungs": []}, "gptq", []),  # 16 bits follow
        ({"methods": ["gptq", "awq"], "rungs": []}, "gptq", []),  # AWQ follows
        ({"methods": ["gptq", "awq"], "rungs": [{}]}, "awq", ["gptq", "awq", "none"]),
        ({"methods": ["none", "awq"], "rungs": [{}]}, "awq", []),  # 16 bits were tried
        ({"methods": ["awq"], "rungs": []}, "awq", ["awq", "none"]),
        ({}, "gptq", ["gptq", "none"]),  # a folder, without a run file
        ({}, None, []),
    ],
)
def test_16_bits_are_advised_only_where_nothing_follows(
    hints: dict[str, Any], export: str | None, advised: list[str]
) -> None:
    candidate: Any = SimpleNamespace(
        request=SimpleNamespace(hints=hints), facts=SimpleNamespace(quantization=export)
    )
    assert _advised_methods(candidate) == advised


def test_when_every_rung_is_refused_the_error_says_what_would_have_passed() -> None:
    stages = Stages(
        quantize=["quantized-g", "quantized-a"],
        release=[refusal("worse", "gates.max_quantize_share: 0.31"), refusal("gibberish")],
    )
    with pytest.raises(GateRefused) as caught:
        release_best(run(quantize={"methods": ["gptq", "awq"]}), BASE, dict(HAVE), stages, {})
    error = caught.value
    assert error.exit_status == 4
    assert "gptq: refused: worse" in error.message and "awq: refused: gibberish" in error.message
    assert "gptq with gates.max_quantize_share: 0.31" in error.hint
    assert "add none to quantize.methods" in error.hint
    assert [rung["decision"] for rung in error.details["rungs"]] == ["refused", "refused"]


def test_the_only_rung_s_own_error_is_the_run_s() -> None:
    alone = refusal("worse", "gates.kl_floor: 1")
    with pytest.raises(GateRefused) as caught:
        release_best(run(), BASE, dict(HAVE), Stages(quantize=["quantized-g"], release=[alone]), {})
    assert caught.value is alone


@pytest.mark.parametrize("lasting", [refusal("lost 30 %"), QuantizeError("no group fits")])
@pytest.mark.parametrize(
    "passing", [StageKilled("signal 9"), OutOfMemory("no KV cache"), ServerError("no vLLM")]
)
@pytest.mark.parametrize("first", [True, False])
def test_what_another_attempt_may_mend_is_no_refusal(
    lasting: TuneserveError, passing: TuneserveError, first: bool
) -> None:
    """A refusal is recorded and never tried again."""
    errors = [passing, lasting] if first else [lasting, passing]
    stages = Stages(quantize=["q"], release=list(errors))
    chosen = run(quantize={"methods": ["gptq", "none"]})
    with pytest.raises(type(passing)) as caught:
        release_best(chosen, BASE, dict(HAVE), stages, {})
    assert caught.value is passing
    rungs = [rung["reason"] for rung in passing.details["rungs"]]
    assert rungs == [error.message for error in errors]


def test_a_method_that_is_known_to_fail_is_passed_over(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "gemma3_text", "vocab_size": 100, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stages = Stages(quantize=["q"], release=[PROMOTED])
    chosen = run(quantize={"methods": ["awq", "gptq", "none"]})
    found = release_best(chosen, tmp_path, dict(HAVE), stages, {})
    assert [(r["method"], r["decision"]) for r in found["rungs"]] == [
        ("awq", "failed"), ("gptq", "passed"),
    ]  # fmt: skip
    assert "gemma3_text cannot be exported by awq" in found["rungs"][0]["reason"]
    assert [call.settings.get("method") for call in stages.calls] == ["gptq", None]


def test_an_export_that_does_not_fit_is_a_rung_that_failed() -> None:
    """GPTQ, which holds Hessians, may need more than AWQ; a killed process gave no other sign."""
    for gone in (OutOfMemory("no room for a row"), StageKilled("signal 9")):
        stages = Stages(quantize=[gone, gone, gone, "quantized-a"], release=[PROMOTED])
        if isinstance(gone, OutOfMemory):
            stages.answers["quantize"].pop(0)  # offloaded at once: smaller batches were tried
        artifacts = dict(HAVE)
        chosen = run(quantize={"methods": ["gptq", "awq"]})
        found = release_best(chosen, BASE, artifacts, stages, {})
        assert [(r["method"], r["decision"], r["reason"]) for r in found["rungs"]] == [
            ("gptq", "failed", gone.message), ("awq", "passed", ""),
        ]  # fmt: skip
        assert artifacts["quantized"] == "quantized-a"


def test_a_server_that_does_not_fit_is_a_rung_that_failed() -> None:
    stages = Stages(quantize=["q"], release=[OutOfMemory("no KV cache"), PROMOTED])
    found = release_best(run(quantize={"methods": ["gptq", "none"]}), BASE, dict(HAVE), stages, {})
    assert [r["decision"] for r in found["rungs"]] == ["failed", "passed"]
    last = OutOfMemory("nor here")
    stages = Stages(quantize=[OutOfMemory("a"), last, OutOfMemory("b"), last])
    with pytest.raises(OutOfMemory) as caught:  # memory is what is lacking: exit 3
        release_best(run(quantize={"methods": ["gptq", "awq"]}), BASE, dict(HAVE), stages, {})
    assert caught.value is last


def test_when_no_export_can_be_served_all_are_refused() -> None:
    stages = Stages(quantize=[QuantizeError("no group fits"), QuantizeError("AWQ failed")])
    with pytest.raises(GateRefused, match="every export of quantize.methods was refused") as caught:
        release_best(run(quantize={"methods": ["gptq", "awq"]}), BASE, dict(HAVE), stages, {})
    assert caught.value.exit_status == 4
    assert "gptq: failed: no group fits\n    awq: failed: AWQ failed" in caught.value.message
    assert "add none to quantize.methods" in caught.value.hint
    assert [call.stage for call in stages.calls] == ["quantize", "quantize"]  # nothing was released


def test_the_last_report_is_kept_when_all_are_refused() -> None:
    def judged(folder: str) -> GateRefused:
        gates = [{"name": "loss", "passed": False}]
        details = {"report_folder": folder, "gates": gates, "losses": {"served": 2.5}}
        return GateRefused("worse", details=details)

    stages = Stages(
        quantize=["g", QuantizeError("AWQ failed")], release=[judged("/r1"), QuantizeError("none")]
    )
    with pytest.raises(GateRefused) as caught:
        chosen = run(quantize={"methods": ["gptq", "awq", "none"]})
        release_best(chosen, BASE, dict(HAVE), stages, {})
    details = caught.value.details
    assert details["report_folder"] == "/r1" and details["losses"] == {"served": 2.5}
    assert details["gates"] == [{"name": "loss", "passed": False}]
    assert [rung["decision"] for rung in details["rungs"]] == ["refused", "failed", "failed"]


MADE = {"merged": "merged-1", "dataset": "dataset-1"}


def hints_of(stages: Stages) -> list[dict[str, Any]]:
    return [dict(call.hints) for call in stages.calls]


def test_out_of_memory_goes_on_with_offloading() -> None:
    # the stage itself tried batches down to one row before it gave up
    stages = Stages(quantize=[OutOfMemory("no room"), "quantized-1"])
    assert quantize(run(), BASE, MADE, "gptq", stages).artifact == "quantized-1"
    assert hints_of(stages) == [{}, {"calibration_batch": 1, "offload": True}]


def test_a_killed_attempt_is_tried_with_a_smaller_batch_first() -> None:
    killed = [StageKilled("signal 9"), StageKilled("signal 9"), "quantized-1"]
    stages = Stages(quantize=killed)
    assert quantize(run(), BASE, MADE, "gptq", stages).artifact == "quantized-1"
    assert hints_of(stages) == [
        {}, {"calibration_batch": 1}, {"calibration_batch": 1, "offload": True},
    ]  # fmt: skip
    # hints do not change what is made, so the key is the same
    assert {call.settings["method"] for call in stages.calls} == {"gptq"}


def test_at_the_bottom_the_last_error_is_raised() -> None:
    stages = Stages(quantize=[OutOfMemory("first"), OutOfMemory("last")])
    with pytest.raises(OutOfMemory, match="last"):
        quantize(run(), BASE, MADE, "awq", stages)
    assert len(stages.calls) == 2
    wrong = Stages(quantize=[QuantizeError("group size")])
    with pytest.raises(QuantizeError):  # no memory in the world mends that
        quantize(run(), BASE, MADE, "awq", wrong)
    assert len(wrong.calls) == 1


def test_too_few_held_out_rows_are_refused_before_anything_is_spent() -> None:
    with pytest.raises(RunFileError, match="3 conversations are held out.*than 8") as caught:
        check_held_out(run(), 3)
    assert "data.eval_fraction" in caught.value.hint
    with pytest.raises(RunFileError, match="gates.eval_rows is 4") as caught:
        check_held_out(run(gates={"eval_rows": 4}), 100)
    assert "raise gates.eval_rows to at least 8;" in caught.value.hint
    for fine in (
        (run(), 8), (run(), None), (run(gates={"allow_undecided": True}), 0),
        (run(gates={"enabled": False}), 0), (run(gates={"min_conversations": 3}), 3),
    ):  # fmt: skip
        check_held_out(*fine)


@pytest.mark.parametrize("limit", [None, 600])
def test_smaller_attempts_at_an_export_share_its_limit(limit: float | None) -> None:
    stages = Stages(quantize=[StageKilled("gone"), OutOfMemory("no room"), "quantized-g"])
    quantize(run(engines={"quantize": {"max_seconds": limit}}), BASE, HAVE, "gptq", stages)
    assert [call.hints for call in stages.calls] == [
        {},
        {"calibration_batch": 1},
        {"calibration_batch": 1, "offload": True},
    ]
    (ends,) = {call.ends for call in stages.calls}
    assert (ends is None) == (limit is None)
