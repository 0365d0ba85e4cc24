"""`tuneserve ask`: whose fault it is when no answer comes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tuneserve.ask import ask_endpoint
from tuneserve.errors import InputError, ServerError
from tuneserve.release import control

TOO_LONG = "max_tokens=9999 cannot be greater than max_model_len=512"


class Refusing(BaseHTTPRequestHandler):
    """Answers as vLLM does: 400 to what is too long, 500 to the rest."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, said = (400, TOO_LONG) if asked["max_tokens"] > 512 else (500, "engine is dead")
        body = json.dumps({"error": {"message": said, "type": "x", "code": status}}).encode()
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


def test_nothing_is_no_question(endpoint: str) -> None:
    for nothing in ("", " \n"):
        with pytest.raises(InputError, match="the question is empty"):
            ask_endpoint(nothing)
