"""The model card: what it says about base, data, settings and measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuneserve.release.card import CardFacts, write_card
from tuneserve.release.gates import Gate, GateReport


def artifact(store: Path, id: str, stage: str, inputs: dict[str, str], **more: Any) -> Path:
    folder = store / id
    folder.mkdir(parents=True)
    manifest = {
        "id": id, "stage": stage, "inputs": inputs, "base": "org/base-1b", "finished": "2026-01-02",
        "versions": {"torch": "2.13"}, "metrics": {}, "sources": {}, **more,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def facts(tmp_path: Path) -> CardFacts:
    store, base = tmp_path / "store", tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
    source = {"path": "/home/someone/private/chats.jsonl", "sha256": "ab" * 32}
    artifact(store, "dataset-1", "validate", {}, sources={"train": [source]},
             metrics={"train_rows": 90, "eval_rows": 10})  # fmt: skip
    artifact(store, "adapter-1", "train", {"dataset": "dataset-1"})
    config = {"train": {"learning_rate": 0.1}, "serve": {"api_key_env": "KEY"}}
    model = artifact(store, "merged-1", "merge", {"adapter": "adapter-1"}, config=config)
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    (model / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "quantization_config": scheme})
    )
    return CardFacts("r0001-x", "support", model, base, {"dataset": "dataset-1"}, "2026-01-03")


def test_the_card_says_what_the_release_is_made_of(tmp_path: Path, facts: CardFacts) -> None:
    report = GateReport(
        {"base": 4.5, "served": 0.7},
        [Gate("better than base", True, "served 0.7, base 4.5", "x")],
        intervals={"served": (0.6, 0.8)},
    )
    (tmp_path / "losses.png").write_bytes(b"png")
    text = write_card(tmp_path, facts, report).read_text()
    front = text.split("---\n")[1]
    assert "base_model: org/base-1b" in front and "license: apache-2.0" in front
    assert "LlamaForCausalLM, gptq, 4 bits, group size 64" in text
    assert "| served | 0.7000 | 0.6000 to 0.8000 |" in text
    assert "- better than base: served 0.7, base 4.5" in text
    assert "train rows 90, eval rows 10" in text
    assert f"chats.jsonl, SHA-256 `{'ab' * 32}`" in text
    assert "/home/someone" not in text  # a card may be shared
    assert '"learning_rate": 0.1' in text and "api_key_env" not in text
    for id in ("merged-1", "adapter-1", "dataset-1"):
        assert f"| `{id}` |" in text
    assert "![losses](losses.png)" in text and "kl.png" not in text


def test_a_licence_that_nobody_stated_is_said_to_be_unknown(
    tmp_path: Path, facts: CardFacts
) -> None:
    assert facts.base is not None
    (facts.base / "README.md").write_text("# Base without front matter\n")
    text = write_card(tmp_path, facts, GateReport({})).read_text()
    assert "license: unknown" in text and "before you share this" in text
