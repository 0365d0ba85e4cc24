"""When a run starts a Prefect server of its own, and what it says when that does not come up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import embedded
from tuneserve.errors import ServiceError


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ports of the servers that were started; each ends at once with status 7."""
    ports: list[int] = []

    def start(port: int) -> subprocess.Popen[bytes]:
        ports.append(port)
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])

    monkeypatch.setattr(embedded, "_start", start)
    for name in ("PREFECT_API_URL", "PREFECT_UI_URL"):
        monkeypatch.setenv(name, "")  # put back afterwards, as it was
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    return ports


def test_a_server_that_does_not_come_up_is_said_with_its_status(started: list[int]) -> None:
    ready = embedded.own_server()
    assert os.environ["PREFECT_API_URL"] == f"http://127.0.0.1:{started[0]}/api"
    with pytest.raises(ServiceError, match="ended with status 7 before it answered"):
        ready()


def test_a_server_that_is_configured_is_used(
    started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "http://prefect.invalid/api"
    (tmp_path / "profiles.toml").write_text(
        f'active = "team"\n[profiles.team]\nPREFECT_API_URL = "{address}"\n[profiles.mine]\n'
    )
    embedded.own_server()()
    assert started == []
    monkeypatch.setenv("PREFECT_PROFILE", "mine")
    embedded.own_server()
    assert len(started) == 1
    monkeypatch.setenv("PREFECT_API_URL", address)
    embedded.own_server()()
    assert len(started) == 1 and os.environ["PREFECT_API_URL"] == address


def test_nothing_of_prefect_is_imported_before_the_server_starts() -> None:
    code = "import sys, tasks.embedded; print([n for n in sys.modules if n.startswith('prefect')])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
