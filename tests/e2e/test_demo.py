"""The whole job for real: `deploy/demo.py` on SmolLM2, then what a user does with the endpoint.

Only the sizes are smaller than in `make demo`: fewer steps, fewer calibration rows.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as parquet
import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@dataclass
class Demo:
    """A finished first run."""

    run_file: Path
    environment: dict[str, str]
    output: str
    port: int

    def tuneserve(self, *arguments: str) -> dict[str, Any]:
        """The JSON that a command prints."""
        done = subprocess.run(
            [sys.executable, "-m", "tuneserve", *arguments, "--json"],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def go(self) -> str:
        """What `make demo | cat` prints; it returns once no process holds the pipe."""
        done = subprocess.run(
            f"{sys.executable} {ROOT}/deploy/demo.py {self.run_file} 2>&1 | cat",
            shell=True,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=1800,
        )
        return done.stdout

    def artifacts(self, kind: str) -> list[Path]:
        return sorted((Path(self.environment["TUNESERVE_HOME"]) / "store").glob(f"{kind}-*"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        port = free_port()
        run = yaml.safe_load((ROOT / "deploy" / "runs" / "demo.yaml").read_text())
        templates = ROOT / "data_templates"
        run["data"] |= {
            "train": str(templates / "support.jsonl"),
            "eval": str(templates / "support_eval.jsonl"),
        }
        run["train"]["max_steps"] = 8
        run["quantize"] |= {"calibration_rows": 16, "min_calibration_tokens": 256}
        # Eight steps do not teach every answer to end.
        run["gates"] = {"eval_rows": 8, "parity_chats": 4, "max_looping": 0.5, "min_ended": 0.25}
        run["serve"]["port"] = port
        run_file = Path(folder) / "run.yaml"
        run_file.write_text(yaml.safe_dump(run))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")},
            "TUNESERVE_HOME": f"{folder}/home",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        made = Demo(run_file, environment, "", port)
        try:
            made.output = made.go()
            yield made
        finally:
            made.tuneserve("down")


def test_the_demo_ends_with_a_live_endpoint(demo: Demo) -> None:
    assert "tuned, 4-bit, served" in demo.output, demo.output[-6000:]
    endpoint = f"http://127.0.0.1:{demo.port}/v1"
    assert f"the endpoint is {endpoint}" in demo.output
    assert f"curl -s {endpoint}/chat/completions" in demo.output
    assert "tuneserve down" in demo.output
    client = openai.OpenAI(base_url=endpoint, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["support"]
    reply = client.chat.completions.create(
        model="support",
        messages=[{"role": "user", "content": "Who are you?"}],
        max_tokens=64,
        temperature=0,
    )
    assert reply.choices[0].message.content
    with client.chat.completions.with_streaming_response.create(
        model="support", messages=[{"role": "user", "content": "Hi"}], max_tokens=1
    ) as raw:
        release = raw.headers["x-tuneserve-release"]
    assert release == demo.tuneserve("status")["names"]["support"]["release"]


def test_every_step_left_its_artifact_and_the_proofs_hold(demo: Demo) -> None:
    kinds = ("dataset", "adapter", "merged", "evaluation", "quantized")
    folders = {kind: demo.artifacts(kind) for kind in kinds}
    assert all(len(found) == 1 for found in folders.values()), folders
    rows = parquet.read_table(folders["dataset"][0] / "train.parquet")
    lines = (ROOT / "data_templates" / "support.jsonl").read_text().splitlines()
    assert rows.num_rows == len(lines)
    config = json.loads((folders["quantized"][0] / "config.json").read_text())
    assert config["quantization_config"]["bits"] == 4
    assert config["quantization_config"]["group_size"] == 64
    for kind in ("adapter", "merged", "quantized"):  # the template never changes on the way
        template = (folders[kind][0] / "chat_template.jinja").read_bytes()
        assert (
            template == (folders["dataset"][0] / "tokenizer" / "chat_template.jinja").read_bytes()
        )
    losses = json.loads((folders["evaluation"][0] / "losses.json").read_text())
    assert losses["adapter"] < losses["base"] and losses["merged"] < losses["base"]
    served = demo.tuneserve("status")["names"]["support"]["losses"]["served"]
    assert served < losses["base"]


def test_lineage_goes_back_to_the_data_file(demo: Demo) -> None:
    import hashlib

    trace = demo.tuneserve("lineage", demo.artifacts("quantized")[0].name)
    dataset = trace["inputs"]["dataset"]
    data = (ROOT / "data_templates" / "support.jsonl").read_bytes()
    (source,) = dataset["sources"]["train"]
    assert source["sha256"] == hashlib.sha256(data).hexdigest()
    assert Path(source["path"]).name == "support.jsonl"
    assert trace["inputs"]["merged"]["inputs"]["adapter"]["inputs"]["dataset"] == dataset


def test_a_second_run_makes_nothing_again(demo: Demo) -> None:
    before = {p: p.stat().st_ino for p in demo.artifacts("*")}
    status = demo.tuneserve("status")["names"]["support"]
    output = demo.go()
    assert f"the endpoint is http://127.0.0.1:{demo.port}/v1" in output, output[-6000:]
    assert {p: p.stat().st_ino for p in demo.artifacts("*")} == before
    assert demo.tuneserve("status")["names"]["support"]["release"] == status["release"]
    assert "nothing to do: nothing changed since run" in output, output[-6000:]


def test_down_ends_everything(demo: Demo) -> None:
    home = demo.environment["TUNESERVE_HOME"]
    demo.tuneserve("down")
    with (
        pytest.raises(OSError, match="refused"),
        socket.create_connection(("127.0.0.1", demo.port), timeout=5),
    ):
        pass
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/environ")
        if _reads(path, f"TUNESERVE_HOME={home}".encode())
    ]
    assert left == []


def _reads(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes()
    except OSError:  # it ended meanwhile
        return False
