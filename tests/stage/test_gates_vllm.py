"""The gates against real vLLM: an honest AWQ export passes, one with wrong zero points does not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
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

from train_rows import IGNORED, write_dataset
from tuneserve.config import GatesSection, ModelSection, ServeSection
from tuneserve.errors import GateRefused
from tuneserve.release import control, state
from tuneserve.release.heldout import read_rows
from tuneserve.release.layout import layout
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.served_loss import served_scores
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
    export = packed_awq(tuned.merged, home / "awq")
    evaluation = house.evaluation(tuned, house.dataset)
    given: dict[str, Any] = {
        "dataset": house.dataset.path,
        "evaluation": evaluation,
        "gates": GatesSection.model_validate({"canaries": sabotage.CANARIES}),
    }
    made = release(request(export, **given))
    assert {gate["decision"] for gate in made["gates"]} == {"passed"}, made["gates"]
    sys.stdout.write(made["report"])
    names = [gate["name"] for gate in made["gates"]]
    assert "close to merged" in names and "canary 'sum'" in names
    folder = Path(made["report_folder"])
    for name in ("gates.md", "README.md", "losses.png", "kl.png"):
        assert (folder / name).is_file(), name

    spoiled = home / "awq-spoiled"
    packed_awq(tuned.merged, spoiled, zero_error=1)
    with pytest.raises(GateRefused) as caught:
        release(request(spoiled, **given))
    refused = {g["name"] for g in caught.value.details["gates"] if not g["passed"]}
    assert {"close to merged", "not worse than the champion"} <= refused
    assert state.read(layout()).names["default"].active == made["release"]


def packed_awq(merged: Path, out: Path, *, zero_error: int = 0) -> Path:
    """Plain rounding with zero points, packed by AWQ's definition (gemm, groups of 32).

    Eight columns an int32 in the order 0 2 4 6 1 3 5 7; ``w = (q - zero) * scale``. `zero_error`
    is added to every stored zero point, as an exporter with another convention would do.
    """
    import torch
    from safetensors.torch import load_file, save_file

    def pack(values: Any) -> Any:
        ordered = values.reshape(values.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].long()
        words = (ordered << torch.arange(0, 32, 4)).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    shutil.copytree(merged, out)
    tensors = load_file(out / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors.pop(name).float().T.contiguous()  # [in, out]
        groups = weight.reshape(-1, 32, weight.shape[1])
        low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True)
        scale = ((high.clamp(min=0) - low) / 15).half().float()
        zero = (-low / scale).round().clamp(0, 15)
        values = (groups / scale + zero).round().clamp(0, 15).reshape(weight.shape)
        module = name.removesuffix(".weight")
        tensors[f"{module}.qweight"] = pack(values)
        tensors[f"{module}.qzeros"] = pack((zero[:, 0] + zero_error).clamp(max=15))
        tensors[f"{module}.scales"] = scale[:, 0].half()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    return out


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


def test_an_awq_export_of_four_layers_says_the_same_when_served(home: Path) -> None:
    """Of SmolLM2, which keeps its shapes, head and tokenizer; all 30 take AWQ ten minutes."""
    import torch
    from transformers import AutoModelForCausalLM

    from tuneserve.checkpoint.base import resolve_base
    from tuneserve.quantize.smoke import load_dequantized

    base = home / "smollm2"
    first_layers(resolve_base(ModelSection(base="builtin:smollm2-135m")), 4, base)
    lines = (TEMPLATES / "support.jsonl").read_text(encoding="utf-8").splitlines()[:64]
    chats = [json.loads(line)["messages"] for line in lines]
    dataset = write_dataset(home / "dataset", base, chats, chats[:4])
    export = quantized(base, dataset.path, home / "smollm2-awq", "64", "8", "48")
    made = release(request(export))
    rows, side = read_rows(dataset.path)
    assert side == "eval" and len(rows) == 4
    served = served_scores(layout().socket(made["release"]), "default", rows)

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    own: list[float] = []
    with torch.inference_mode():
        load_dequantized(model, export, base, "awq", 64)
        for row in rows:
            scores = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
            own += [
                -float(scores[at - 1, token])
                for at, token in enumerate(row.labels)
                if at and token != IGNORED
            ]
    assert len(own) == len(served.tokens)
    # the server computes in bfloat16
    assert served.nats().sum() / len(own) == pytest.approx(sum(own) / len(own), rel=0.01)


def first_layers(model: Path, count: int, folder: Path) -> None:
    """A model with only its first layers."""
    from safetensors.torch import load_file, save_file

    later = re.compile(r"\.layers\.(\d+)\.")
    kept = {
        name: tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        if not (at := later.search(name)) or int(at.group(1)) < count
    }
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
