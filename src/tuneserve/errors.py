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
    |   |   +-- StoreRefused           it answered no: no bucket, no access, no credentials
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
        hint: What to do about it, as an imperative sentence; empty: the class's `usual_hint`.
        details: Small JSON-able facts for programs (offending tensor names, byte counts, row
            counts).
    """

    exit_status: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    # What to do, where the one who raises knows nothing better.
    usual_hint: ClassVar[str] = (
        "run it again; if it fails again, report it on the project's issue tracker on GitHub, with "
        "the log above"
    )

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
        self.hint = hint or self.usual_hint
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
    usual_hint = "mend what is named"


class RunFileError(InputError):
    """One or more fields of the run file are wrong; the message lists all of them."""

    usual_hint = "mend the fields named; docs/run-file.md describes all of them"


class DataError(InputError):
    """The training or evaluation data cannot be used."""

    usual_hint = "mend the file named; docs/data.md shows what is read"


class ModelError(InputError):
    """The base model, its tokenizer or its chat template cannot be used."""

    usual_hint = "copy or download the model again, or choose another"


class AdapterError(InputError):
    """The adapter does not fit the base, or holds something that cannot be merged."""

    usual_hint = "save the adapter again with PEFT, or train again"


class QuantizeError(InputError):
    """The 4-bit export cannot be made, or could not be served."""

    usual_hint = "add awq or none to quantize.methods, or choose another base"


class TrainingDiverged(InputError):
    """The loss or the gradient norm stopped being finite."""

    usual_hint = "lower train.learning_rate, and look at the rows named"


class OutputExists(InputError):
    """The output path holds something that this command did not make."""

    usual_hint = "choose another name, or remove what is there"


class ResourceError(TuneserveError):
    """The machine has too little memory, disk or GPU."""

    exit_status = 3
    usual_hint = "free some, or use a larger machine; `tuneserve doctor` shows what there is"


class OutOfMemory(ResourceError):
    """A step did not fit into memory."""

    usual_hint = "lower what needs it; `tuneserve plan` shows the choices"


class DiskFull(ResourceError):
    """There is not enough free disk."""

    usual_hint = "free some space, or set store.root to another disk"


class DeviceBusy(ResourceError):
    """Another run or process holds the GPU or the served name."""

    retryable = True
    usual_hint = "wait for the other, or end it"


class BudgetSpent(ResourceError):
    """A run used up what the run file's budget allows."""

    usual_hint = "raise the limit in budget, or run the rest later: what is finished is kept"


class GateRefused(TuneserveError):
    """A gate refused the candidate; what was serving goes on serving."""

    exit_status = 4
    usual_hint = "read the report; what was serving goes on serving"


class ServiceError(TuneserveError):
    """Something outside this program failed."""

    exit_status = 5
    retryable = True
    usual_hint = "try again later"


class HubError(ServiceError):
    """The model hub did not give the files."""

    usual_hint = "check the network, or set model.base to a folder with the model"


class HubRefused(HubError):
    """The hub answered no; asking again gives the same answer."""

    retryable = False
    usual_hint = "check model.base and model.revision, and HF_TOKEN for restricted models"


class ServerError(ServiceError):
    """vLLM, the gateway or the process keeper failed."""

    usual_hint = "see `tuneserve logs`"


class StoreError(ServiceError):
    """The object store that `store.remote` names did not take or give an artifact."""

    usual_hint = "check store.remote, the credentials in the environment, and the service"


class StoreRefused(StoreError):
    """The object store answered no; asking again gives the same answer."""

    retryable = False
    usual_hint = "check store.remote, and the credentials in the environment"


class PortTaken(ServiceError):
    """Somebody else listens on the address."""

    retryable = False
    usual_hint = "end the other program, or set serve.port"


class StageTimeout(ServiceError):
    """A stage took longer than its limit."""

    retryable = False
    usual_hint = "raise max_seconds of this stage in engines, or see in the log where it hangs"


class StageCrashed(TuneserveError):
    """A child process ended without a result: a bug of ours."""


class StageKilled(StageCrashed):
    """A signal ended a child process: somebody, or the kernel for want of memory."""

    retryable = True
    usual_hint = "run the same command again: it goes on where it was; watch the memory"


def error_classes() -> dict[str, type[TuneserveError]]:
    """The error classes of this tree by name."""
    found: dict[str, type[TuneserveError]] = {}
    todo: list[type[TuneserveError]] = [TuneserveError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(sub for sub in cls.__subclasses__() if sub.__module__ == __name__)
    return found
