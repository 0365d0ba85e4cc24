"""Every error a user can meet, in one tree.

    TuneserveError
    +-- InputError            exit 2   the user's data, run file, model or adapter
    |   +-- RunFileError               a field of the run file is wrong
    |   +-- DataError                  a data file or row is wrong
    |   +-- ModelError                 a base model, tokenizer or template cannot be used
    |   +-- AdapterError               an adapter does not belong to the base, or is unusable
    |   +-- QuantizeError              a 4-bit export that could not be served, or not be made
    |   +-- TrainingDiverged           the loss or a gradient stopped being finite
    |   +-- OutputExists               the output folder holds something that is not ours
    +-- ResourceError         exit 3   not enough memory, disk or GPU
    |   +-- OutOfMemory                did not fit; retried only with changed settings
    |   +-- DiskFull                   not enough free disk
    |   +-- DeviceBusy                 another run or process holds the GPU or the name
    |   +-- BudgetSpent                the run used up what its budget allows
    +-- GateRefused           exit 4   a gate refused the candidate; the champion keeps serving
    +-- ServiceError          exit 5   something outside failed
    |   +-- HubError                   the model hub did not answer
    |   |   +-- HubRefused             it answered no: not found, no access, no such revision
    |   +-- ServerError                vLLM, the gateway or the process keeper failed
    |   +-- StoreError                 the object store of store.remote failed
    |   +-- PortTaken                  somebody else listens on the address
    |   +-- StageTimeout               a stage took longer than its limit
    +-- StageCrashed          exit 1   a child process died without saying why: our bug
        +-- StageKilled                a signal ended it; the same call may succeed later

A class says three things: what was found (with where), what was expected, and what to do.
`retryable` is true only where the same call can succeed later by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class TuneserveError(Exception):
    """Base of all errors that a user can act on.

    Args:
        message: Where and what was found, for example ``train.jsonl:3:17: role "bot" is not
            known``.
        expected: What would have been right, as a phrase: ``one of system, user, assistant,
        tool``.
        hint: What to do about it, as an imperative sentence.
        details: Small JSON-able facts for programs (offending tensor names, byte counts, row
            counts).
    """

    exit_status: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        expected: str = "",
        hint: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.hint = hint
        self.details = dict(details or {})

    def __str__(self) -> str:
        parts = [self.message]
        if self.expected:
            parts.append(f"expected: {self.expected}")
        if self.hint:
            parts.append(f"what to do: {self.hint}")
        return "\n  ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The error as the child protocol and ``--json`` carry it."""
        # A class that a room made for itself travels as the nearest one of this tree, which
        # every reader knows.
        known = next(c for c in type(self).__mro__ if c.__module__ == __name__)
        return {
            "kind": known.__name__,
            "message": self.message,
            "expected": self.expected,
            "hint": self.hint,
            "details": self.details,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TuneserveError:
        """Rebuild the error that a child process reported; unknown kinds become `StageCrashed`."""
        cls = error_classes().get(str(data.get("kind")), StageCrashed)
        return cls(
            str(data.get("message", "")),
            expected=str(data.get("expected", "")),
            hint=str(data.get("hint", "")),
            details=data.get("details") or {},
        )


class InputError(TuneserveError):
    """The user's input cannot be used as it is."""

    exit_status = 2


class RunFileError(InputError):
    """One or more fields of the run file are wrong; the message lists all of them."""


class DataError(InputError):
    """The training or evaluation data cannot be used."""


class ModelError(InputError):
    """The base model, its tokenizer or its chat template cannot be used."""


class AdapterError(InputError):
    """The adapter does not fit the base, or holds something that cannot be merged."""


class QuantizeError(InputError):
    """The 4-bit export cannot be made, or could not be served."""


class TrainingDiverged(InputError):
    """The loss or the gradient norm stopped being finite."""


class OutputExists(InputError):
    """The output path holds something that this command did not make."""


class ResourceError(TuneserveError):
    """The machine has too little memory, disk or GPU."""

    exit_status = 3


class OutOfMemory(ResourceError):
    """A step did not fit into memory."""


class DiskFull(ResourceError):
    """There is not enough free disk."""


class DeviceBusy(ResourceError):
    """Another run or process holds the GPU or the served name."""

    retryable = True


class BudgetSpent(ResourceError):
    """A run used up what the run file's budget allows."""


class GateRefused(TuneserveError):
    """A gate refused the candidate; what was serving goes on serving."""

    exit_status = 4


class ServiceError(TuneserveError):
    """Something outside this program failed."""

    exit_status = 5
    retryable = True


class HubError(ServiceError):
    """The model hub did not give the files."""


class HubRefused(HubError):
    """The hub answered no; asking again gives the same answer."""

    retryable = False


class ServerError(ServiceError):
    """vLLM, the gateway or the process keeper failed."""


class StoreError(ServiceError):
    """The object store that `store.remote` names did not take or give an artifact."""


class PortTaken(ServiceError):
    """Somebody else listens on the address."""

    retryable = False


class StageTimeout(ServiceError):
    """A stage took longer than its limit."""

    retryable = False


class StageCrashed(TuneserveError):
    """A child process ended without a result: a bug of ours."""


class StageKilled(StageCrashed):
    """A signal ended a child process: somebody, or the kernel for want of memory."""

    retryable = True


def error_classes() -> dict[str, type[TuneserveError]]:
    """The error classes of this tree by name."""
    found: dict[str, type[TuneserveError]] = {}
    todo: list[type[TuneserveError]] = [TuneserveError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(sub for sub in cls.__subclasses__() if sub.__module__ == __name__)
    return found
