"""The gates against real vLLM: an honest AWQ export passes, one with wrong zero points does not."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from train_rows import write_dataset
from tuneserve.config import GatesSection, ModelSection, ServeSection
from tuneserve.errors import GateRefused
from tuneserve.release import control, state
from tuneserve.release.layout import layout
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.stage import release

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)]
TEMPLATES = Path(__file__).parents[2] / "data_templates"


def _sabotage() -> ModuleType:
    path = Path(__file__).with_name("test_gates_sabotage.py")
    spec = importlib.util.spec_from_file_location("sabotage_house", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sabotage_house"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    monkeypatch.setenv("TUNESERVE_HOME", str(folder / "home"))
    try:
        yield folder
    finally:
        control.down()
        shutil.rmtree(folder, ignore_errors=True)


def quantized(model: Path, dataset: Path, out: Path, *options: str) -> Path:
    """An AWQ export, made in a process of its own."""
    code = (
        "import sys; from pathlib import Path; from tuneserve.config import QuantizeSection; "
        "from tuneserve.quantize import quantize_model; "
        "model, dataset, out, group, rows, tokens = sys.argv[1:]; "
        "section = QuantizeSection(group_size=int(group), calibration_rows=int(rows), "
        "calibration_max_tokens=int(tokens), min_calibration_tokens=100); "
        "quantize_model(Path(model), 'awq', Path(dataset), Path(out), section)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(dataset), str(out), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def request(model: Path, **fields: Any) -> ReleaseRequest:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    known = layout().state_file
    if known.is_file():  # the gateway keeps its address
        port = json.loads(known.read_text())["gateway"].get("port", port)
    serve = ServeSection(port=port, max_model_len=512, max_concurrent_chats=2)
    return ReleaseRequest(model=model, artifact=f"quantized-{model.name}", serve=serve, **fields)


def test_wrong_zero_points_are_refused_and_the_champion_stays(home: Path, pico_model: Path) -> None:
    sabotage = _sabotage()
    house = sabotage.House(home / "house", pico_model)
    tuned = house.tune(0, house.rows(house.dataset))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "generation_config.json"):  # fmt: skip
        shutil.copyfile(pico_model / name, tuned.merged / name)
    export = quantized(tuned.merged, house.dataset.path, home / "awq", "32", "32", "64")
    evaluation = house.evaluation(tuned, house.dataset)
    given: dict[str, Any] = {
        "dataset": house.dataset.path,
        "evaluation": evaluation,
        "gates": GatesSection.model_validate({"canaries": sabotage.CANARIES}),
    }
    made = release(request(export, **given))
    assert {gate["decision"] for gate in made["gates"]} == {"passed"}, made["gates"]
    names = [gate["name"] for gate in made["gates"]]
    assert "close to merged" in names and "canary 'sum'" in names
    folder = Path(made["report_folder"])
    for name in ("gates.md", "README.md", "losses.png", "kl.png", "quant_loss.png"):
        assert (folder / name).is_file(), name

    spoiled = home / "awq-spoiled"
    shutil.copytree(export, spoiled)
    _shift_zero_points(spoiled / "model.safetensors")
    with pytest.raises(GateRefused) as caught:
        release(request(spoiled, **given))
    refused = {g["name"] for g in caught.value.details["gates"] if not g["passed"]}
    assert {"close to merged", "not worse than the champion"} <= refused
    assert state.read(layout()).names["default"].active == made["release"]


def _shift_zero_points(path: Path) -> None:
    """Every zero point one higher, as an exporter with another convention would store it."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name, packed in tensors.items():
        if name.endswith(".qzeros"):
            shifts = torch.arange(0, 32, 4)
            values = ((packed.unsqueeze(-1).long() >> shifts) & 15).add(1).clamp(max=15)
            words = (values << shifts).sum(-1)
            words = torch.where(words >= 2**31, words - 2**32, words)
            tensors[name] = words.to(torch.int32)
    save_file(tensors, path, metadata={"format": "pt"})


def test_an_awq_export_of_smollm2_is_served(home: Path) -> None:
    from tuneserve.checkpoint.base import resolve_base

    base = resolve_base(ModelSection(base="builtin:smollm2-135m"))
    lines = (TEMPLATES / "support.jsonl").read_text(encoding="utf-8").splitlines()[:64]
    chats = [json.loads(line)["messages"] for line in lines]
    dataset = write_dataset(home / "dataset", base, chats, chats[:4])
    export = quantized(base, dataset.path, home / "smollm2-awq", "64", "8", "48")
    canary = {"prompt": "What is the capital of France?", "contains": "Paris", "max_tokens": 48}
    gates = GatesSection.model_validate({"canaries": [canary]})
    made = release(request(export, gates=gates))
    assert [gate["name"] for gate in made["gates"]] == ["canary 'What is the capital of France?'"]
