"""The error tree: what a child reports is what the caller gets."""

from __future__ import annotations

import pytest

from tuneserve import errors
from tuneserve.errors import StageCrashed, TuneserveError, error_classes


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_every_error_survives_the_child_protocol(name: str) -> None:
    cls = error_classes()[name]
    sent = cls("a.jsonl:3:4: found x", expected="y", hint="do z", details={"rows": 3})
    got = TuneserveError.from_json(sent.to_json())
    assert type(got) is cls
    assert str(got) == "a.jsonl:3:4: found x\n  expected: y\n  what to do: do z"
    assert got.details == {"rows": 3}
    assert cls.__doc__ and name in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("cls", "status", "retryable"),
    [
        (errors.DataError, 2, False),
        (errors.RunFileError, 2, False),
        (errors.AdapterError, 2, False),
        (errors.TrainingDiverged, 2, False),
        (errors.OutOfMemory, 3, False),
        (errors.DiskFull, 3, False),
        (errors.DeviceBusy, 3, True),
        (errors.GateRefused, 4, False),
        (errors.HubError, 5, True),
        (errors.HubRefused, 5, False),
        (errors.StoreError, 5, True),
        (errors.StoreRefused, 5, False),
        (errors.PortTaken, 5, False),
        (errors.StageCrashed, 1, False),
        (errors.StageKilled, 1, True),
    ],
)
def test_exit_status_and_retries(cls: type[TuneserveError], status: int, retryable: bool) -> None:
    assert (cls.exit_status, cls.retryable) == (status, retryable)


def test_an_unknown_kind_is_a_crash() -> None:
    assert type(TuneserveError.from_json({"kind": "Nonsense", "message": "m"})) is StageCrashed


def test_a_rooms_own_class_travels_as_the_nearest_known_one() -> None:
    class Refined(errors.GateRefused):
        pass

    got = TuneserveError.from_json(Refined("refused").to_json())
    assert type(got) is errors.GateRefused
    assert "Refined" not in error_classes()
