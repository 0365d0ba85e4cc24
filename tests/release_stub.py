"""A real HTTP server on a unix socket: enough of vLLM's API, and it misbehaves when told to.

Started in place of vLLM by an interpreter shim (`stub_python`), so the product runs unchanged. How
it behaves is read from `stub.json` in the model folder:

    start_seconds   wait before listening
    die             print this and end with status 1
    names           served names instead of ours
    hang            chat completions never come; also after SIGUSR1
    never_stop      finish_reason is length
    shift           /tokenize adds 1 to the id at this index
    nats            loss of every prompt token (an answer is "x")
    token_seconds   time per answered token
    chatter_bytes   so much is logged at the start
    engine          start a child that ignores SIGTERM and, like vLLM's, writes a title over its
                    command line and environment; /health is 503 once it is gone
    apart           start a child in a session of its own; its number is in apart.pid by the socket
    memory          a file that stands for the memory of the device, which has room for one server;
                    it holds the release that has it
"""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

END = 0
RELEASE = os.environ.get("TUNESERVE_RELEASE", "none")
# The places of command line and environment are fields 48 to 51 of proc(5)'s stat.
_ENGINE = """
import ctypes, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[45]), int(fields[48])
ctypes.memset(begin, 0, end - begin)
ctypes.memmove(begin, b"VLLM::EngineCore", 16)
time.sleep(3600)
"""


def render(messages: list[dict[str, Any]], *, generate: bool = False) -> list[int]:
    """Ids of a chat: a role's first letter, the text's bytes, and 0 where a turn ends."""
    ids: list[int] = []
    for message in messages:
        ids += [ord(message["role"][0]), *str(message["content"]).encode(), END]
    return [*ids, ord("a")] if generate else ids


def make_model(folder: Path, **behaviour: Any) -> Path:
    """A folder that looks like a model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 64,
        "max_position_embeddings": 4096,
        "eos_token_id": END,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    (folder / "stub.json").write_text(json.dumps(behaviour))
    return folder


def make_dataset(folder: Path, count: int = 8, *, side: str = "eval", system: str = "") -> Path:
    """A dataset artifact's folder whose ids are what `render` gives; `system` begins each chat."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    rows, chats = [], []
    for number in range(count):
        messages = [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        ids = render(messages)
        start = len(render(messages[:-1], generate=True))
        labels = [-100] * start + ids[start:]
        source = f"chats.jsonl:{number + 1}"
        rows.append({"input_ids": ids, "labels": labels, "source": source})
        chats.append({"source": source, "messages": messages, "tools": None})
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("labels", pa.list_(pa.int32())),
            ("source", pa.string()),
        ]
    )
    for name in ("eval", "train"):
        used = rows if name == side else []
        parquet.write_table(pa.Table.from_pylist(used, schema=schema), folder / f"{name}.parquet")
        text = "".join(json.dumps(chat) + "\n" for chat in (chats if name == side else []))
        (folder / f"{name}_messages.jsonl").write_text(text)
    return folder


def make_evaluation(folder: Path, dataset: Path, **losses: float) -> Path:
    """An evaluation artifact's folder: every token of a model has the same loss."""
    import pyarrow.parquet as parquet

    rows = parquet.read_table(dataset / "eval.parquet").to_pylist()
    counts = [sum(label != -100 for label in row["labels"][1:]) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    per_row = {name: [loss * count for count in counts] for name, loss in losses.items()}
    found = {
        "rows": len(rows),
        "supervised_tokens": sum(counts),
        **losses,
        "per_row": {"source": [row["source"] for row in rows], **per_row},
    }
    (folder / "losses.json").write_text(json.dumps(found))
    return folder


def stub_python(folder: Path) -> str:
    """An executable that stands for the interpreter which has vLLM, and runs this file."""
    folder.mkdir(parents=True, exist_ok=True)
    shim = folder / "python"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).absolute()}" "$@"\n')
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    return str(shim)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 256
    running = 0
    total = 0
    draining = False
    lock = threading.Lock()

    def __init__(self, path: str, names: list[str], behaviour: dict[str, Any]) -> None:
        self.names, self.behaviour = names, behaviour
        self.engine: subprocess.Popen[bytes] | None = None
        super().__init__(path, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _begin(self, status: int, length: int | None = None) -> None:
        self.send_response(status)
        kind = "application/json" if length is not None else "text/event-stream"
        self.send_header("Content-Type", kind)
        self.send_header("X-Tuneserve-Release", RELEASE)
        if self.path == "/health":
            self.send_header("X-Tuneserve-Load", f"{self.server.running},{self.server.total}")
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _json(self, data: Any, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self._begin(status, len(body))
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            engine = self.server.engine
            dead = engine is not None and engine.poll() is not None
            self._json({}, 503 if dead else 200)
        elif self.path == "/v1/models":
            names = self.server.behaviour.get("names", self.server.names)
            self._json({"data": [{"id": name} for name in names]})
        else:
            self._json({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.draining:
            self._json({"error": "shutting down"}, 500)
            return
        with self.server.lock:
            self.server.running += 1
            self.server.total += 1
        try:
            if self.path == "/tokenize":
                self._tokenize(body)
            elif self.path == "/v1/completions":
                self._score(body)
            else:
                self._chat(body)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def _tokenize(self, body: dict[str, Any]) -> None:
        ids = render(body["messages"], generate=body["add_generation_prompt"])
        shift = self.server.behaviour.get("shift")
        if shift is not None and shift < len(ids):
            ids[shift] += 1
        self._json({"tokens": ids, "count": len(ids)})

    def _score(self, body: dict[str, Any]) -> None:
        nats = float(self.server.behaviour.get("nats", 1.0))
        entries: list[Any] = [None]
        entries += [{str(id): {"logprob": -nats, "rank": 1}} for id in body["prompt"][1:]]
        ends = not self.server.behaviour.get("never_stop")
        answer = {"text": "x", "finish_reason": "stop" if ends else "length"}
        answer["logprobs"] = {"tokens": ["x"], "token_logprobs": [-0.1]}
        self._json({"choices": [{"prompt_logprobs": entries, **answer}]})

    def _chat(self, body: dict[str, Any]) -> None:
        behaviour = self.server.behaviour
        while behaviour.get("hang"):
            if self.server.draining:
                raise ConnectionAbortedError
            time.sleep(0.02)
        count = int(body.get("max_tokens") or 8)
        wait = float(behaviour.get("token_seconds", 0.0))
        reason = "length" if behaviour.get("never_stop") else "stop"
        if not body.get("stream"):
            time.sleep(wait * count)
            message = {"role": "assistant", "content": f"{RELEASE} " * count}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            usage = {"completion_tokens": count, "prompt_tokens": 1, "total_tokens": count + 1}
            self._json(
                {
                    "id": "c",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [choice],
                    "usage": usage,
                }
            )
            return
        self._begin(200)
        for number in range(count):
            time.sleep(wait)
            self._event(body, {"content": f"{RELEASE} "}, reason if number == count - 1 else None)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, body: dict[str, Any], delta: dict[str, str], reason: str | None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        data = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
        }
        self._chunk(f"data: {json.dumps(data)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def main(arguments: list[str]) -> int:
    """Serve as told; ends by SIGTERM after the answers that were running."""
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"], arguments
    options = dict(zip(arguments[2:], arguments[3:], strict=False))
    behaviour = json.loads((Path(options["--model"]) / "stub.json").read_text())
    memory = open(behaviour.get("memory", os.devnull), "a")  # held until we end, however
    if memory.name != os.devnull:
        try:
            fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("torch.OutOfMemoryError: CUDA out of memory\n")
            return 1
        Path(memory.name).write_text(RELEASE)
    time.sleep(float(behaviour.get("start_seconds", 0.0)))
    for _ in range(int(behaviour.get("chatter_bytes", 0)) // 100):
        sys.stderr.write("x" * 99 + "\n")
    if behaviour.get("die"):
        sys.stderr.write(f"{behaviour['die']}\n")
        return 1
    server = _Server(options["--uds"], [options["--served-model-name"]], behaviour)
    if behaviour.get("engine"):
        server.engine = subprocess.Popen([sys.executable, "-c", _ENGINE])
    if behaviour.get("apart"):
        code = "import time; time.sleep(3600)"
        apart = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        Path(options["--uds"]).with_name("apart.pid").write_text(str(apart.pid))

    def drain(*_: object) -> None:
        server.draining = True

        def wait() -> None:
            while server.running:
                time.sleep(0.01)
            server.shutdown()

        threading.Thread(target=wait).start()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGUSR1, lambda *_: behaviour.update(hang=True))
    server.serve_forever(poll_interval=0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
