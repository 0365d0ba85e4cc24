"""A store, a TUNESERVE_HOME, and what `tuneserve gc` finds in them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tuneserve.artifacts import Store, write_json_atomic
from tuneserve.runs import Runs

DAY = 86400


class House:
    """A store, a TUNESERVE_HOME, and chains of artifacts in them."""

    def __init__(self, folder: Path) -> None:
        self.home, self.store = folder / "home", Store(folder / "store")
        self.runs = Runs(self.home / "runs")

    def make(
        self, id: str, stage: str = "train", rows: dict[str, Any] | None = None, **facts: Any
    ) -> str:
        manifest = {
            "key": {},
            "inputs": {},
            "sources": {},
            "base": "org/name",
            "run": "weekly",
            "config": {"budget": {"price_per_gpu_hour": 2.0}, "train": {"seed": 0}},
            "versions": {"torch": "2.13.0"},
            "metrics": {},
            "gpus": 2,
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:30:00+00:00",
            "seconds": 1800.0,
            **facts,
        }
        with self.store.lock(id), self.store.draft(id) as draft:
            (draft.path / "weights").write_text(id)
            for side, conversations in (rows or {}).items():
                lines = [
                    {"source": f"d.jsonl:{n}", "messages": [{"content": text}], "tools": None}
                    for n, text in enumerate(conversations, 1)
                ]
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (draft.path / f"{side}_messages.jsonl").write_text(text)
            self.store.commit(draft, stage, manifest)
        old = time.time() - 100 * DAY
        os.utime(self.store.root / id / "manifest.json", (old, old))
        return id

    def chain(self, tag: str, **facts: Any) -> list[str]:
        dataset = self.make(f"dataset-{tag}", "validate", **facts)
        adapter = self.make(f"adapter-{tag}", "train", inputs={"dataset": dataset})
        merged = self.make(f"merged-{tag}", "merge", inputs={"adapter": adapter})
        return [dataset, adapter, merged]

    def releases(self, active: str, **artifacts: str) -> None:
        record = {"name": "support", "key": "k", "model": "m", "proven": True, "report": {}}
        state = {
            "format": 1,
            "counter": 9,
            "default": "support",
            "gateway": {},
            "names": {"support": {"active": active, "promoting": None, "warm": None}},
            "releases": {id: {"id": id, "artifact": a, **record} for id, a in artifacts.items()},
        }
        (self.home / "run").mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.home / "run" / "releases.json", state)

    def ids(self) -> set[str]:
        return {p.name for p in self.store.root.iterdir() if not p.name.startswith(".")}
