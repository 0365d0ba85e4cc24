"""Tokens per second of model folders, each served with the command line that a release gets.

    python bench/bench_serve.py MODEL... [--out FILE] [--side-by-side] [--repeat-layers N]

The servers are vLLM alone: command, length, KV cache and environment are those of a release, the
gateway before it is what `bench_gateway.py` measures. Prompts are random ids, so no prefix is
shared, and answers have a fixed length. `--side-by-side` starts all servers at once, as a candidate
starts beside a champion; they are asked one after the other. Speed does not depend on what a model
knows: with `--repeat-layers` a folder's layers are repeated until there are so many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from tuneserve.artifacts import write_json_atomic
from tuneserve.config import ServeSection
from tuneserve.release import vllm_command
from tuneserve.release.capacity import plan_capacity, read_free_memory
from tuneserve.release.model_files import read_model

NAME = "bench"
READY_SECONDS = 900


def main() -> None:
    """Serve, measure, print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="model folders, 16 or 4 bits")
    parser.add_argument("--out", type=Path, help="result file; default: print only")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--side-by-side", action="store_true", help="start all servers at once")
    parser.add_argument("--repeat-layers", type=int, help="repeat each model's layers up to this")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 32], help="requests")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4, help="requests one after another a client")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bs-") as folder:
        found = measure(options, Path(folder))
    result = {
        "bench": "serve",
        "prompt_tokens": options.prompt_tokens,
        "answer_tokens": options.answer_tokens,
        "side_by_side": options.side_by_side,
        "models": found,
        "machine": machine(),
        "versions": {name: known_version(name) for name in ("torch", "transformers", "vllm")},
    }
    if options.out:
        write_json_atomic(options.out.absolute(), result)
    print(json.dumps(result))


def measure(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """One entry a model; a server that does not come up has its last lines instead."""
    models = [path.absolute() for path in options.models]
    if options.repeat_layers:
        models = [
            repeated(path, options.repeat_layers, scratch / f"model{at}")
            for at, path in enumerate(models)
        ]
    servers = [Server(path, scratch / f"{at}", options) for at, path in enumerate(models)]
    found = []
    try:
        if options.side_by_side:
            for server in servers:
                server.start()
        for server, given in zip(servers, options.models, strict=True):
            if not options.side_by_side:
                server.start()
            found.append({"given": given.name, **server.facts(), **server.measured()})
            print(json.dumps(found[-1]), file=sys.stderr)
            if not options.side_by_side:
                server.end()
    finally:
        for at, server in enumerate(servers):
            server.end()
            if options.logs and server.log.is_file():
                shutil.copyfile(server.log, options.logs / f"server-{at}.log")
    return found


class Server:
    """vLLM on a unix socket, in a session of its own."""

    def __init__(self, model: Path, folder: Path, options: argparse.Namespace) -> None:
        self.options, self.folder = options, folder
        folder.mkdir()
        self.model, self.socket, self.log = read_model(model), folder / "s", folder / "log"
        most = max(options.concurrent)
        length = options.prompt_tokens + options.answer_tokens
        serve = ServeSection(name=NAME, max_model_len=2 * length, max_concurrent_chats=most)
        self.room = plan_capacity(self.model, serve, {}, read_free_memory())
        self.command = vllm_command.build(
            self.model,
            serve,
            self.room,
            release="r0",
            socket=self.socket,
            python=sys.executable,
            cores=len(os.sched_getaffinity(0)),
            given=os.environ,
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def start(self) -> None:
        """Returns at once."""
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            self.command.arguments,
            env={**os.environ, **self.command.environment},
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(self) -> None:
        """Kill the server with everything it started."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process:
            self.process.wait()

    def measured(self) -> dict[str, Any]:
        """What `measure` keeps of this server."""
        try:
            return asyncio.run(self._measure())
        except (httpx.HTTPError, RuntimeError) as error:
            lines = self.log.read_text("utf-8", "replace").splitlines()
            return {"error": f"{type(error).__name__}: {error}", "log_tail": lines[-30:]}

    def facts(self) -> dict[str, Any]:
        """Of the folder, and what it was given."""
        return {
            "quantization": self.model.quantization,
            "layers": json.loads((self.model.path / "config.json").read_text())[
                "num_hidden_layers"
            ],
            "weights_bytes": self.model.weights_bytes,
            "kv_cache_bytes": self.room.kv_cache_bytes,
            "predicted_bytes": self.room.needed_bytes,
            "arguments": [a.replace(str(self.folder.parent), "...") for a in self.arguments()],
        }

    def arguments(self) -> list[str]:
        """Without the interpreter."""
        return self.command.arguments[1:]

    async def _measure(self) -> dict[str, Any]:
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket))
        async with httpx.AsyncClient(transport=transport, timeout=600) as client:
            await self._until_up(client)
            up = time.monotonic() - self.started
            await self._answer(client, 0)
            found: dict[str, Any] = {
                "seconds_to_up": round(up, 1),
                "seconds_to_first_answer": round(time.monotonic() - self.started, 1),
                "said": self._said(),
                "device_used_bytes": used_bytes(),
            }
            await self._load(client, max(self.options.concurrent), 1)  # kernels are warm now
            for count in self.options.concurrent:
                found[f"at_{count}"] = await self._load(client, count, self.options.rounds)
            return found

    async def _until_up(self, client: httpx.AsyncClient) -> None:
        while True:
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError("the server ended while starting")
            if time.monotonic() - self.started > READY_SECONDS:
                raise RuntimeError("the server did not come up")
            try:
                if (await client.get("http://x/v1/models")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.25)

    async def _load(self, client: httpx.AsyncClient, count: int, rounds: int) -> dict[str, Any]:
        """`count` clients that never rest, `rounds` answers each."""
        firsts: list[float] = []

        async def work(number: int) -> None:
            for turn in range(rounds):
                firsts.append(await self._answer(client, hash((count, number, turn))))

        started = time.perf_counter()
        await asyncio.gather(*(work(number) for number in range(count)))
        seconds = time.perf_counter() - started
        tokens = count * rounds * self.options.answer_tokens
        return {
            "tokens_per_second": round(tokens / seconds, 1),
            "answers": count * rounds,
            "seconds": round(seconds, 3),
            "first_token_seconds": round(statistics.median(firsts), 4),
        }

    async def _answer(self, client: httpx.AsyncClient, seed: int) -> float:
        """One whole answer to random ids; returns the seconds until its first token."""
        rng = random.Random(seed)
        body = {
            "model": NAME,
            "prompt": [rng.randrange(10, 500) for _ in range(self.options.prompt_tokens)],
            "max_tokens": self.options.answer_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, tokens = time.perf_counter(), 0.0, 0
        async with client.stream("POST", "http://x/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread()).decode()[:500])
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - started
                    usage = json.loads(line[6:]).get("usage") or {}
                    tokens = usage.get("completion_tokens", tokens)
        if tokens != self.options.answer_tokens:
            raise RuntimeError(f"an answer of {tokens} tokens")
        return first

    def _said(self) -> list[str]:
        """What the server says of its weights, its kernel and its start."""
        text = self.log.read_text("utf-8", "replace")
        pattern = r"\] ((?:Model loading took|Using .*(?:Kernel|backend)|torch.compile|init engine|"
        pattern += r"Graph capturing finished).*)"
        return list(dict.fromkeys(line[:160] for line in re.findall(pattern, text)))[:12]


def repeated(model: Path, layers: int, folder: Path) -> Path:
    """A copy of a model with its layers repeated, in their order, until there are `layers`; one
    that has so many is taken as it is."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    had = config["num_hidden_layers"]
    if had == layers:
        return model
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja") and not path.name.endswith("index.json"):
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    weight_map, size = {}, 0
    for source in sorted(model.glob("*.safetensors")):
        with safe_open(source, framework="pt") as stream:
            for turn in range(-(-layers // had)):
                tensors = {}
                for name in stream.keys():  # noqa: SIM118 (it is no mapping)
                    at = re.search(r"\.layers\.(\d+)\.", name)
                    number = int(at.group(1)) + turn * had if at else 0
                    if (not at and turn) or number >= layers:
                        continue
                    new = re.sub(r"\.layers\.\d+\.", f".layers.{number}.", name)
                    tensors[new] = stream.get_tensor(name)
                if not tensors:
                    continue
                file = f"{source.stem}-{turn}.safetensors"
                save_file(tensors, folder / file, metadata={"format": "pt"})
                size += (folder / file).stat().st_size
                weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def used_bytes() -> int | None:
    """Memory of the GPU in use by all processes; None without a GPU."""
    free = read_free_memory()
    return free.total_bytes - free.free_bytes if free.device == "gpu" else None


def machine() -> str:
    """Processor kind, cores and GPU."""
    names = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = ", " + subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return f"{platform.machine()}, {os.cpu_count()} cores{names}"


def known_version(name: str) -> str:
    """Of an installed package; vLLM's CPU build has another name."""
    for known in (name, f"{name}-cpu"):
        try:
            return version(known)
        except PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    main()
