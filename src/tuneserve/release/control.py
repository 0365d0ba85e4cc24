"""What the commands `status`, `up`, `down`, `promote`, `rollback`, `logs` and `release DIR` do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tuneserve.config import GatesSection, RunFile, ServeSection
from tuneserve.errors import InputError, ServerError, TuneserveError
from tuneserve.places import run_root
from tuneserve.release import entrance, keys, mend, promote, state, traffic
from tuneserve.release.address import Listen
from tuneserve.release.gateway import root_certificate
from tuneserve.release.layout import layout
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.stage import release
from tuneserve.release.status import key_names as names_of_keys
from tuneserve.release.status import name_status, processes, put_in_order
from tuneserve.release.supervisor import GATEWAY, Keeper
from tuneserve.runs import Runs
from tuneserve.stagelog import latest_log, logged_stages
from tuneserve.stages import STAGES

log = logging.getLogger(__name__)

READY_SECONDS = 900.0
_DRAIN_SECONDS = 120.0


def release_model_dir(
    model_dir: Path,
    *,
    name: str | None = None,
    run: RunFile | None = None,
    serve: ServeSection | None = None,
    gates: GatesSection | None = None,
    dataset: Path | None = None,
    trust_remote_code: bool = False,
    hints: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Release a model folder without a pipeline; proofs that need a dataset are skipped aloud.

    Args:
        model_dir: A model in Hugging Face format.
        name: Served name; over that of `serve` or `run`.
        run: Its `serve`, `gates`, `engines` and `model.trust_remote_code` are taken.
        serve: Over the run's; defaults without both.
        gates: Over the run's; defaults without both.
        dataset: Folder of a dataset artifact, for parity and held-out loss.
        trust_remote_code: Allow code that comes with the model.
        hints: See `ReleaseRequest`.

    Returns:
        The same as `stage.release`.
    """
    section = serve or (run.serve if run else ServeSection())
    if name:
        section = ServeSection.model_validate({**section.model_dump(), "name": name})
    python = (run.engines.serve.python if run else None) or sys.executable
    return release(
        ReleaseRequest(
            model=model_dir.absolute(),
            serve=section,
            gates=gates or (run.gates if run else GatesSection()),
            python=python,
            dataset=dataset,
            longest_row=run.data.max_length if run else 1024,
            trust_remote_code=trust_remote_code or bool(run and run.model.trust_remote_code),
            hints=hints or {},
        )
    )


def status() -> dict[str, Any]:
    """What is serving: `endpoint`, `gateway` (supervisord's word, ``down`` or ``unseen``), and per
    name its release, state, since, health, load, history; under `last_runs` how the last run of
    each name ended, and under `runs_under_way` what runs now.

    A switch that was killed half-way is put in order first, when nobody else is at it. What cannot
    be put in order is logged; nothing is waited for longer than a few seconds. From other PID or
    network namespaces than those of the servers nothing is touched, and the gateway is unseen.
    """
    runs = {"last_runs": Runs().last_ends(), "runs_under_way": Runs().under_way()}
    if not run_root().is_dir():
        down: dict[str, Any] = {"endpoint": None, "gateway": "down", "default": None, "names": {}}
        return {**down, **runs}
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    busy = put_in_order(servers)
    known = state.read(places)
    running = processes(servers.keeper)
    gateway = running.get(GATEWAY)
    listen = Listen(**known.gateway) if known.gateway else None
    rates = traffic.recent(places.logs / "access.log", known.default or "")
    ours = listen is not None and gateway is not None and entrance.listens(servers.keeper, listen)
    gateway_state = gateway.state.lower() if gateway else "down"
    if gateway and not ours and servers.keeper.is_elsewhere():
        gateway_state = "unseen"
    names = {}
    for name, entry in known.names.items():
        prefix = "" if name == known.default else f"/{name}"
        names[name] = {
            **name_status(servers, name, entry, known, running, busy.get(name, "")),
            "requests_per_second": rates.get(name, 0.0),
            "endpoint": f"{listen.base_url}{prefix}/v1" if listen and ours else None,
        }
    return {
        "endpoint": f"{listen.base_url}/v1" if listen and ours else None,
        "gateway": gateway_state,
        "default": known.default,
        "keys": names_of_keys(places),
        "asks_for_key": listen.needs_key if listen and ours else None,
        "tls_root": str(root_certificate(places)) if listen and listen.tls == "internal" else None,
        "names": names,
        **runs,
    }


def _nothing_yet() -> InputError:
    return InputError(
        "nothing was released yet", expected="a release", hint="`tuneserve run RUN.yaml` makes one"
    )


def up() -> dict[str, Any]:
    """Start everything that was serving, after a restart of the machine or a killed keeper.

    Returns:
        The status afterwards.

    Raises:
        InputError: Nothing was ever released.
        ServerError: A server does not come up.
    """
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    known = state.read(places)
    if not known.gateway or not any(entry.active for entry in known.names.values()):
        raise _nothing_yet()
    failed: list[TuneserveError] = []
    with _all_names(servers, "starting everything"):
        servers.keeper.ensure_running()
        try:
            servers.ensure_gateway(Listen(**known.gateway).as_files_are())
        except TuneserveError as error:  # what it waits for loads meanwhile
            log.error("the gateway does not start, the servers do: %s", error)
            failed.append(error)
        for name, entry in known.names.items():
            if not entry.active:
                continue
            with state.change(places) as changed:
                changed.names[name].wanted = "up"
            try:
                mend.reconcile(servers, name, ready_seconds=READY_SECONDS)
            except TuneserveError as error:  # the other names still come up
                log.error("%s: %s", name, error)
                failed.append(error)
    if failed:
        raise failed[0]
    return status()


def down(name: str | None = None) -> dict[str, Any]:
    """End the servers of one name, or everything. Models and history stay; `up` starts them again.

    Raises:
        DeviceBusy: A release or a switch is under way.
        InputError: There is no such name.
    """
    if not run_root().is_dir():
        return {"ended": []}
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    known = state.read(places)
    names = [name] if name else list(known.names)
    for each in names:
        known.name(each)
    others = [n for n, e in known.names.items() if n not in names and e.wanted == "up" and e.active]
    ended = [known.names[n].active for n in names if known.names[n].wanted == "up"]
    with ExitStack() as locks:
        for each in names:
            locks.enter_context(state.lock_name(places, each, "going down"))
        with state.change(places) as changed:
            for each in names:
                changed.names[each].wanted = "down"
                changed.names[each].promoting = changed.names[each].warm = None
            if changed.default in names and others:
                changed.default = others[0]
        if not others:
            promote.end_all(servers)
            return {"ended": ended}
        for each in names:
            places.name_link(each).unlink(missing_ok=True)
            for record in known.releases.values():
                if record.name == each:
                    servers.stop(record.id)
        promote.point_default(servers)
    return {"ended": ended}


def promote_release(id: str, *, keep_warm: bool = False) -> dict[str, Any]:
    """Make a release that was proven before the current one of its name.

    Args:
        id: Its id, or a unique beginning.
        keep_warm: Keep the one it replaces running, so that a rollback is instant; not after
            `hold`, which has no memory for two, and says so.

    Raises:
        InputError: It is unknown, was never proven, or its model is gone.
        ServerError: It does not come up, or answers no chat; what was serving goes on serving.
    """
    places = layout()
    servers = promote.Servers(places, Keeper(places))
    record = state.read(places).release(id)
    if not record.proven:
        raise InputError(
            f"release {record.id} was never proven",
            expected="a release that passed its gates",
            hint=f"its report: {places.release_folder(record.id) / 'gates.md'}",
        )
    with state.lock_name(places, record.name, f"promoting {record.id}"):
        if not servers.keeper.running():
            raise ServerError("nothing is running", hint="start what served with `tuneserve up`")
        mend.tidy(servers, record.name)  # a champion that is down is not waited for
        if state.read(places).name(record.name).active == record.id:
            _serve_current(servers, record)
        else:
            try:
                _switch_to(servers, record, keep_warm=keep_warm)
            except TuneserveError:
                mend.settle(servers, record.name, ready_seconds=READY_SECONDS)
                raise
    return {"name": record.name, "release": record.id}


def rollback(name: str | None = None, *, keep_warm: bool = False) -> dict[str, Any]:
    """Go back to the release that served before the current one; again, and it is the current
    one again.

    Raises:
        InputError: There is no earlier release.
        ServerError: It does not come up; what was serving goes on serving.
    """
    places = layout()
    known = state.read(places)
    name = name or known.default
    if name is None:
        raise _nothing_yet()
    entry = known.name(name)
    earlier = [item["release"] for item in entry.history if item["release"] != entry.active]
    if not earlier:
        raise _no_earlier(name, entry)
    return promote_release(earlier[-1], keep_warm=keep_warm)


def _no_earlier(name: str, entry: state.Name) -> InputError:
    expected = "an earlier release to go back to"
    if entry.active is None:
        return InputError(
            f"no release of {name} was promoted yet, so there is nothing to go back to",
            expected=expected,
            hint="`tuneserve runs` says how its runs ended",
        )
    return InputError(
        f"{name} has no release before {entry.active}: it is the only one that ever served, so "
        "there is nothing to go back to",
        expected=expected,
        hint=f"after the next promotion there is; `tuneserve down --name {name}` ends this one",
    )


def _serve_current(servers: promote.Servers, record: state.Release) -> None:
    with state.change(servers.places) as changed:
        changed.names[record.name].wanted = "up"
    mend.reconcile(servers, record.name, ready_seconds=READY_SECONDS)
    log.info("%s serves %s, which was current already", record.name, record.id)


def _switch_to(servers: promote.Servers, record: state.Release, *, keep_warm: bool) -> None:
    known = state.read(servers.places)
    entry = known.names[record.name]
    promote.end_warm(servers, record.name, but=record.id)
    active = known.releases.get(entry.active or "") if entry.wanted == "up" else None
    held = active is not None and "hold" in (active.rollout, record.rollout)
    if held and entry.warm != record.id:  # there may be no memory for two
        if keep_warm:
            log.warning("%s is not kept warm: serve.rollout is hold", entry.active)
        promote.check_startable(servers, record)  # before anything is stopped for it
        promote.replace_while_held(
            servers,
            record,
            lambda: promote.start_again(servers, record, READY_SECONDS),
            drain_seconds=_DRAIN_SECONDS,
            restart_champion=lambda old: promote.start_again(servers, old, READY_SECONDS),
            end_refused=servers.stop,
        )
        return
    with promote.promoting(servers, record):
        try:
            promote.start_again(servers, record, READY_SECONDS)
        except BaseException:
            servers.stop(record.id)
            raise
    promote.make_current(servers, record, drain_seconds=_DRAIN_SECONDS, keep_warm=keep_warm)


@contextmanager
def _all_names(servers: promote.Servers, doing: str) -> Iterator[None]:
    with ExitStack() as locks:
        for name in state.read(servers.places).names:
            locks.enter_context(state.lock_name(servers.places, name, doing))
        yield


def log_files(which: str | None = None) -> list[Path]:
    """Log files to show: of a served name's current release (where nothing passed yet: its latest),
    of a release, a stage, the gateway.

    Args:
        which: A served name, a release id, ``gateway``, ``access``, ``keeper`` or a stage, whose
            latest log is taken; None: the default name.

    Raises:
        InputError: There is no such thing.
    """
    places = layout()
    known = state.read(places)
    fixed = {
        "gateway": places.logs / "gateway.log",
        "access": places.logs / "access.log",
        "keeper": places.logs / "supervisord.log",
    }
    if which in fixed:
        return [fixed[which]]
    if which in STAGES and which not in known.names:
        return [latest_log(which)]
    latest = {record.name: record.id for record in known.releases.values()}
    active = {name: entry.active for name, entry in known.names.items() if entry.active}
    shown = {**latest, **active}
    name = which or known.default or next(reversed(latest), None)
    if name is None:
        raise _no_server_log()
    if name in shown:
        return [places.server_log(shown[name])]
    if not any(id.startswith(name) for id in known.releases):
        raise InputError(
            f"{name!r} is no served name, release or stage",
            expected=f"one of {', '.join([*sorted(shown), *STAGES, *fixed])}, or a release's id",
            hint="`tuneserve status` shows the releases of each name",
        )
    return [places.server_log(known.release(name).id)]


def _no_server_log() -> InputError:
    error = _nothing_yet()
    if stages := logged_stages():
        error.expected = f"a release, or a stage that ran here: {', '.join(stages)}"
        error.hint = f"`tuneserve logs {stages[-1]}` shows what ran last"
    return error


def add_key(name: str) -> str:
    """Make a new API key called `name`; it works at once when the gateway asks for keys.

    Raises:
        InputError: There is one of that name.
    """
    return keys.add_key(layout().keys, name)


def asks_for_keys() -> bool:
    """Whether the gateway asks for keys now; on loopback it does from the first release on that
    finds some."""
    known = state.read(layout()).gateway
    return bool(known) and Listen(**known).needs_key


def revoke_key(name: str) -> None:
    """Make an API key useless at once."""
    keys.revoke_key(layout().keys, name)


def key_names() -> list[str]:
    """Names of the API keys."""
    return sorted(keys.read_keys(layout().keys))
