"""A small OpenAI-compatible server on a unix socket that really computes with given weights.

It stands in for vLLM where a test is about what a model says and not about vLLM: `/tokenize`,
`/v1/completions` with `prompt_logprobs` and greedy answers with `logprobs`, and
`/v1/chat/completions`. Everything is float32 and one request at a time.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: str, model: Any, tokenizer: Any, ends: set[int]) -> None:
        self.model, self.tokenizer, self.ends = model, tokenizer, ends
        self.lock = threading.Lock()
        super().__init__(path, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "m", "max_model_len": 1024}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock, torch.no_grad():
            answer = self._answer(body)
        self._send(answer)

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/tokenize":
            return {"tokens": self._render(body, generate=body["add_generation_prompt"])}
        if self.path == "/v1/completions":
            return {"choices": [self._complete(body)]}
        made = self._greedy(self._render(body, generate=True), int(body["max_tokens"]))
        text = made["text"].removesuffix("<|im_end|>")
        return {"choices": [{"message": {"content": text}, "finish_reason": made["finish_reason"]}]}

    def _render(self, body: dict[str, Any], *, generate: bool) -> list[int]:
        return list(
            self.server.tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=generate,
                return_dict=False,
            )
        )

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, top = body["prompt"], body.get("prompt_logprobs")
        if top is None:
            return self._greedy(ids, int(body["max_tokens"]))
        logprobs = self.server.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        best, places = logprobs.topk(top, dim=-1)
        entries: list[Any] = [None]
        for at, token in enumerate(ids[1:]):
            actual = float(logprobs[at, token])
            rank = int((logprobs[at] > actual).sum()) + 1
            found = {str(token): {"logprob": actual, "rank": rank}}
            pairs = zip(places[at].tolist(), best[at].tolist(), strict=True)
            for place, (other, value) in enumerate(pairs, start=1):
                found[str(other)] = {"logprob": value, "rank": place}
            entries.append(found)
        return {"prompt_logprobs": entries, "text": "", "finish_reason": "length"}

    def _greedy(self, ids: list[int], most: int) -> dict[str, Any]:
        cache, fed, made, scores, reason = None, ids, [], [], "length"
        for _ in range(most):
            out = self.server.model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache, logprobs = out.past_key_values, out.logits[0, -1].log_softmax(-1)
            token = int(logprobs.argmax())
            if token in self.server.ends:
                reason = "stop"
                break
            made.append(token)
            scores.append(float(logprobs[token]))
            fed = [token]
        tokens = [self.server.tokenizer.decode([token]) for token in made]
        return {
            "text": self.server.tokenizer.decode(made),
            "finish_reason": reason,
            "logprobs": {"tokens": tokens, "token_logprobs": scores},
        }


@contextlib.contextmanager
def serving(model: Any, tokenizer: Any, ends: set[int]) -> Iterator[Path]:
    """The socket of a server that answers with `model` while the body runs."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        path = Path(folder) / "s"
        with _Server(str(path), model, tokenizer, ends) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            try:
                yield path
            finally:
                server.shutdown()
                thread.join()
