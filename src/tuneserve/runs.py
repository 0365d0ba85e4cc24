"""A record of every run: what it is doing, how it ended, and which were left behind by a kill.

HOME/runs/ID.json   the record, replaced whole at every change
HOME/runs/ID.lock   held by the run: a record that says `running` whose lock is free is stale
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuneserve.artifacts import write_json_atomic
from tuneserve.places import home

log = logging.getLogger(__name__)

# Ends that the same inputs would only repeat.
_SERVING = ("promoted", "confirmed")
_SETTLED = (*_SERVING, "refused")


def now() -> str:
    """The time as records keep it: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass
class RunRecord:
    """One run.

    Attributes:
        id: Prefect's flow run id, or a random one.
        name: `name` of the run file.
        served: `serve.name`.
        state: running; promoted; confirmed (all was there and serves); unchanged (nothing to do);
            refused; still refused (nothing changed since); failed; cancelled; stale (killed).
        stage: The stage it is in, or was in when it ended.
        inputs: Digest of everything that decides the result; empty until it is known.
        config: The run file.
        artifacts: Artifact ids by kind: what led to the release.
        used: Every artifact it made or re-used, in order.
        release: The release it led to, or found serving.
        result: What it gave, as `tuneserve run --json` prints it.
        seconds: Seconds of each stage that really ran.
        gpus: Cards it saw.
        error: What ended it, in words.
        link: Where people see it.
    """

    id: str
    name: str
    served: str
    state: str = "running"
    started: str = field(default_factory=now)
    ended: str | None = None
    stage: str | None = None
    inputs: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    release: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    gpus: int = 0
    error: str = ""
    link: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


class Runs:
    """The records of one TUNESERVE_HOME."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or home() / "runs"

    def all(self) -> list[RunRecord]:
        """Every record that can be read, oldest first."""
        found = []
        for path in self.root.glob("*.json") if self.root.is_dir() else ():
            if record := self._read(path):
                found.append(record)
        return sorted(found, key=lambda record: (record.started, record.id))

    def last_settled(self, served: str) -> RunRecord | None:
        """The latest run under a served name that the same inputs would only repeat.

        A failed run in between does not count: what it was about is tried again anyway.
        """
        mine = (r for r in self.all() if r.served == served and r.state in _SETTLED)
        return max(mine, key=lambda record: record.ended or "", default=None)

    def is_settled(self, release: str) -> bool:
        """Whether a run ended that had led to a release, or found it serving: it was told."""
        return any(r.release == release and r.state in _SERVING for r in self.all())

    def last_ends(self) -> dict[str, dict[str, Any]]:
        """How the last run of each served name ended: run, state, when, stage and error."""
        found = {record.served: record for record in self.all() if record.ended}
        return {
            served: {
                "run": record.id,
                "state": record.state,
                "ended": record.ended,
                "stage": record.stage,
                "error": reason(record),
            }
            for served, record in found.items()
        }

    def under_way(self) -> dict[str, dict[str, Any]]:
        """The latest running run of each served name: run, stage and since when."""
        return {
            record.served: {"run": record.id, "stage": record.stage, "since": record.started}
            for record in self.running()
        }

    def save(self, record: RunRecord) -> None:
        """Replace the record on disk."""
        write_json_atomic(self.root / f"{record.id}.json", asdict(record))

    @contextlib.contextmanager
    def recording(self, record: RunRecord) -> Iterator[RunRecord]:
        """Keep the record on disk while the body runs; whoever finds its lock free knows that we
        are gone.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with self._lock(record.id).open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            self.save(record)
            try:
                yield record
            finally:
                record.ended = now()
                self.save(record)
                self._lock(record.id).unlink(missing_ok=True)

    def running(self) -> list[RunRecord]:
        """The runs whose process is there."""
        return [r for r in self.all() if r.state == "running" and not self._abandoned(r.id)]

    def mark_stale(self) -> list[RunRecord]:
        """Mark the runs whose process was killed, and give them."""
        found = []
        for record in self.all():
            if record.state != "running" or not self._abandoned(record.id):
                continue
            record = self._read(self.root / f"{record.id}.json") or record
            if record.state != "running":  # it ended between the two looks
                continue
            record.state, record.ended = "stale", now()
            record.error = (
                f"process {record.pid} on {record.host} was killed during {record.stage or 'start'}"
            )
            self.save(record)
            self._lock(record.id).unlink(missing_ok=True)
            log.warning("run %s of %s: %s", record.id, record.name, record.error)
            found.append(record)
        return found

    @staticmethod
    def _read(path: Path) -> RunRecord | None:
        try:
            return RunRecord(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read (%s)", path, error)
            return None

    def _lock(self, id: str) -> Path:
        return self.root / f"{id}.lock"

    def _abandoned(self, id: str) -> bool:
        try:
            with self._lock(id).open("r+") as stream:  # NFS wants a writer
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass
        return True


def reason(record: RunRecord) -> str:
    """What ended a run, without what was expected and what to do."""
    return record.error.partition("\n  expected: ")[0]


def in_one_line(said: str) -> str:
    """An error's lines as one: indented ones are findings, which a semicolon keeps apart."""
    return " ".join(re.sub(r"(?<=[^:;\s])\n\s+", "; ", said).split())


def seconds_taken(record: RunRecord, *, at: str) -> float:
    """Seconds from a run's start to its end, or to `at` (ISO 8601) while it has none."""
    began, ended = (datetime.fromisoformat(when) for when in (record.started, record.ended or at))
    return (ended - began).total_seconds()


def summary(record: RunRecord) -> dict[str, Any]:
    """A record as `--json` and a notification carry it."""
    facts = asdict(record)
    del facts["result"], facts["config"]
    return {key: value for key, value in facts.items() if value not in (None, "", {}, [])}
