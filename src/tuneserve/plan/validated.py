"""The dataset that `tuneserve validate` has made of a run's data, where it has."""

from __future__ import annotations

import logging
from pathlib import Path

from tuneserve.artifacts import Artifact, artifact_id
from tuneserve.calls import StageCall
from tuneserve.config import RunFile
from tuneserve.errors import TuneserveError

log = logging.getLogger(__name__)


def validated_dataset(run: RunFile, base_dir: Path) -> Artifact | None:
    """The artifact that a run would re-use instead of validating; None where there is none, or
    where it cannot be told without fetching: the base's weights or remote data.

    Nothing is made, waited for or refused. Local data files are read once, for their hashes.

    Args:
        run: The run file.
        base_dir: The base's folder, as `peek_base` gives it.
    """
    call = StageCall("validate", run, base_dir)
    kind, remote = str(call.spec.makes), any("://" in p for p in [*run.data.train, *run.data.eval])
    if remote or not any(base_dir.glob("*.safetensors")):
        return None
    if not any(call.store.root.glob(f"{kind}-*")):  # spares the hashing
        return None
    try:
        return call.store.find(artifact_id(kind, call.key()))
    except (TuneserveError, OSError) as error:  # whoever needs the file says what to do
        log.debug("no dataset to plan with: %s", error)
        return None
