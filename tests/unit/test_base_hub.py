"""What is asked of the hub, and what its refusals become. No network: its client is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from tuneserve.checkpoint.hub import download, needed_files
from tuneserve.config import ModelSection
from tuneserve.errors import DiskFull, HubError, ModelError

MODEL = ModelSection(base="org/name", revision="v1")
FILES = {
    "config.json": 10,
    "model-00001-of-00002.safetensors": 1000,
    "model-00002-of-00002.safetensors": 1000,
    "model.safetensors.index.json": 10,
    "consolidated.safetensors": 2000,
    "pytorch_model.bin": 2000,
    "pytorch_model.bin.index.json": 10,
    "tokenizer.json": 10,
    "chat_template.jinja": 10,
    "modeling_name.py": 10,
    "original/consolidated.00.pth": 2000,
    "onnx/model.onnx": 2000,
    "README.md": 10,
}


@dataclass
class Listed:
    """As huggingface_hub lists a file in a dry run."""

    filename: str
    file_size: int
    will_download: bool = True
    commit_hash: str = "c0ffee"


class Hub:
    """Stands for `snapshot_download`; keeps the calls."""

    def __init__(self, folder: Path, files: dict[str, int] | BaseException) -> None:
        self.folder, self.files = folder, files
        self.calls: list[dict[str, Any]] = []
        self.cached = False

    def __call__(self, repo: str, **options: Any) -> Any:
        self.calls.append({"repo": repo, **options})
        if options.get("local_files_only"):
            if not self.cached:
                raise errors.LocalEntryNotFoundError("not in the cache")
            return str(self.folder)
        if isinstance(self.files, BaseException):
            raise self.files
        if options.get("dry_run"):
            return [Listed(name, size) for name, size in self.files.items()]
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(tmp_path, dict(FILES))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    return found


def refusal(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = httpx2.Request("GET", "https://hub.invalid/org/name")
    return kind("refused", response=httpx2.Response(status, request=request))


def offline() -> errors.DryRunError:
    error = errors.DryRunError("cannot be accessed")
    error.__cause__ = httpx2.ConnectError("no route")
    return error


def test_only_safe_and_needed_files() -> None:
    wanted = needed_files(FILES, weights=True, remote_code=False)
    assert sorted(wanted) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    small = needed_files(FILES, weights=False, remote_code=False)
    assert not any(name.endswith(".safetensors") for name in small)
    assert "modeling_name.py" in needed_files(FILES, weights=True, remote_code=True)


def test_pickle_only_is_refused() -> None:
    with pytest.raises(ModelError, match="only pytorch_model.bin") as caught:
        needed_files(["config.json", "pytorch_model.bin"], weights=True, remote_code=False)
    assert "run code" in caught.value.expected


def test_downloads_the_commit_that_was_listed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert download(MODEL, weights=True) == hub.folder
    listing, fetching = hub.calls
    assert listing["revision"] == "v1" and listing["dry_run"]
    assert fetching["revision"] == "c0ffee"
    assert "pytorch_model.bin" not in fetching["allow_patterns"]
    assert listing["token"] == fetching["token"] == "secret"


@pytest.mark.parametrize(
    ("held", "sent"), [("secret\n", "secret"), (" secret ", "secret"), ("", None), ("\n", None)]
)
def test_a_token_without_what_surrounds_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, held: str, sent: str | None
) -> None:
    """An empty one is none: public models are then asked for without a header."""
    monkeypatch.setenv("HF_TOKEN", held)
    download(MODEL, weights=False)
    assert [call["token"] for call in hub.calls] == [sent, sent]


def test_disk_is_checked_before(hub: Hub) -> None:
    assert isinstance(hub.files, dict)
    hub.files["model-00001-of-00002.safetensors"] = 2**60
    with pytest.raises(DiskFull, match="downloading org/name"):
        download(MODEL, weights=True)
    assert len(hub.calls) == 1
    assert download(MODEL, weights=False) == hub.folder


def test_no_network_uses_the_cache(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.files, hub.cached = offline(), True
    assert download(MODEL, weights=True) == hub.folder
    assert "*.safetensors" in hub.calls[-1]["allow_patterns"]
    assert "does not answer" in caplog.text


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (offline(), "cannot be reached", "builtin:smollm2-135m"),
        (offline(), "cannot be reached", "HF_ENDPOINT to a mirror"),
        (refusal(errors.GatedRepoError, 403), "accepted its terms", "HF_TOKEN"),
        (refusal(errors.RepositoryNotFoundError, 404), "not found", "spelling"),
        (refusal(errors.RevisionNotFoundError, 404), "no such revision", "model.revision"),
        (refusal(errors.HfHubHTTPError, 401), "refuses the token", "read token"),
        (refusal(errors.HfHubHTTPError, 500), "answered HTTP 500", "later"),
    ],
)
def test_refusals(hub: Hub, error: BaseException, message: str, hint: str) -> None:
    hub.files = error
    with pytest.raises(HubError, match=message) as caught:
        download(MODEL, weights=True)
    assert "org/name@v1" in caught.value.message and hint in caught.value.hint
    assert caught.value.exit_status == 5
    # A no stays a no; only silence may pass by itself.
    assert caught.value.retryable == ("cannot be reached" in message or "500" in message)


def test_not_a_hub_id() -> None:
    with pytest.raises(ModelError, match="neither a folder here nor a hub id"):
        download(ModelSection(base="my model/at home"), weights=True)


def test_local_disk_errors_stay_what_they_are(hub: Hub) -> None:
    hub.files = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        download(MODEL, weights=True)
