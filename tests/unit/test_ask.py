"""`tuneserve ask`: whose fault it is when no answer comes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tuneserve.__main__ import app
from tuneserve.ask import ask_endpoint
from tuneserve.errors import InputError, ServerError
from tuneserve.release import control

# What the answering server allows, as `serve.max_tokens` does.
ALLOWED = 300
TOO_LONG = "max_tokens=9999 cannot be greater than max_model_len=512"


class Refusing(BaseHTTPRequestHandler):
    """Answers as vLLM does: 400 to what is too long, 500 to the rest but one question."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, said = (400, TOO_LONG) if asked["max_tokens"] > 512 else (500, "engine is dead")
        if asked["messages"][-1]["content"] == "no key":
            status, said = 401, "a valid API key is needed"
        answer: object = {"error": {"message": said, "type": "x", "code": status}}
        if asked["messages"][-1]["content"] == "go on":
            status, tokens = 200, min(asked["max_tokens"], ALLOWED)
            message = {"role": "assistant", "content": "and on"}
            usage = {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": tokens + 2}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            head = {"id": "x", "object": "chat.completion", "created": 0, "model": "support"}
            answer = {**head, "choices": [choice], "usage": usage}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    names = {"support": {"state": "serving", "release": "r1"}}
    found = {"default": "support", "names": names, "endpoint": url}
    monkeypatch.setattr(control, "status", lambda: found)
    yield url
    server.shutdown()
    server.server_close()


def test_what_the_server_refuses_is_the_user_s_input(endpoint: str) -> None:
    with pytest.raises(InputError) as caught:
        ask_endpoint("hi", max_tokens=9999)
    error = caught.value
    assert error.exit_status == 2
    assert error.message == f"{endpoint} refuses the request: {TOO_LONG}"
    assert "--max-tokens" in error.hint


def test_a_server_that_fails_is_no_input_error(endpoint: str) -> None:
    with pytest.raises(ServerError, match=r"did not answer: .*engine is dead") as caught:
        ask_endpoint("hi")
    assert caught.value.exit_status == 5


def test_where_no_key_is_left_it_says_how_to_make_one(endpoint: str) -> None:
    with pytest.raises(InputError) as caught:
        ask_endpoint("no key")
    assert caught.value.message == f"{endpoint} asks for an API key, and no key is left"
    assert "`tuneserve keys add NAME`" in caught.value.hint


def test_a_server_that_starts_again_is_no_missing_release(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"support": {"state": "restarting", "release": "r1"}}
    found = {"default": "support", "names": names, "endpoint": endpoint}
    monkeypatch.setattr(control, "status", lambda: found)
    with pytest.raises(ServerError, match="the server of 'support' is starting") as caught:
        ask_endpoint("hi")
    assert "ask again" in caught.value.hint and "tuneserve run" not in caught.value.hint


@pytest.mark.parametrize("asked_for", [True, False])
def test_whoever_has_no_key_left_is_told_who_still_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: bool
) -> None:
    monkeypatch.setenv("TUNESERVE_HOME", str(tmp_path))
    monkeypatch.setattr(control, "asks_for_keys", lambda: asked_for)
    run = CliRunner().invoke
    added = run(app, ["keys", "add", "alice"]).stdout
    assert ("`tuneserve run RUN.yaml --force`" in added) is not asked_for
    shut = "nobody gets in until `tuneserve keys add NAME`"
    revoked, listed = (run(app, ["keys", *more]).stdout for more in (["revoke", "alice"], ["list"]))
    assert revoked == (f"revoked alice; no keys: {shut}\n" if asked_for else "revoked alice\n")
    assert listed == (f"no keys: {shut}\n" if asked_for else "no keys\n")


def test_nothing_is_no_question(endpoint: str) -> None:
    for nothing in ("", " \n"):
        with pytest.raises(InputError, match="the question is empty"):
            ask_endpoint(nothing)


@pytest.mark.parametrize(
    ("asked", "said"),
    [(256, "256 tokens: --max-tokens"), (400, "300 tokens: serve.max_tokens or serve.max_mod")],
)
def test_an_answer_that_was_cut_says_so_and_who_cut_it(
    endpoint: str, asked: int, said: str
) -> None:
    done = CliRunner().invoke(app, ["ask", "go on", "--max-tokens", str(asked)])
    assert (done.exit_code, done.stdout) == (0, "and on\n")
    assert done.stderr.startswith(f"(cut after {said}") and done.stderr.count("\n") == 1
