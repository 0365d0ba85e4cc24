"""Small checkpoints and adapters for tests of the merge, written without a model class."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tuneserve.checkpoint.headers import read_header
from tuneserve.merge import sample
from tuneserve.merge.plan import MergePlan

WIDTH = 256
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
A = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"


def make_base(folder: Path, layers: int = 6, shards: int = 3) -> Path:
    """A Llama-shaped checkpoint of `layers` layers dealt out to files."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        tensors: dict[str, tuple[int, ...]] = {}
        if shard == 0:
            tensors["model.embed_tokens.weight"] = (300, WIDTH)
        for layer in range(shard, layers, shards):
            tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = (WIDTH, WIDTH)
            tensors[f"model.layers.{layer}.input_layernorm.weight"] = (WIDTH,)
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        values = {
            k: torch.randn(*s, generator=generator).bfloat16().mul_(0.1) for k, s in tensors.items()
        }
        save_file(values, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": 7}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 300})
    )
    return folder


def make_adapter(folder: Path, layers: int = 6, **config: Any) -> Path:
    """Rank 8 on every q_proj; alpha / r is 2."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(layers):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, WIDTH, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(WIDTH, 8, generator=generator) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def weights(folder: Path) -> dict[str, bytes]:
    """Everything but the proof, whose times differ."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "mergeproof.json")
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change an adapter's tensors in place."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@contextlib.contextmanager
def disk_of(place: Path, kibibytes: int) -> Iterator[Path]:
    """A file system of its own, of this size; the test is skipped where none can be mounted."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(place)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def real_base(folder: Path, **changes: Any) -> Path:
    """A small Llama of random values, as transformers saves it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        **changes,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**settings))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def peft_adapter(base: Path, folder: Path, **lora: Any) -> Path:
    """An adapter of random values on all linear layers, as PEFT saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    settings = {"r": 8, "lora_alpha": 16, "target_modules": LINEARS, "task_type": "CAUSAL_LM"}
    peft = get_peft_model(model, LoraConfig(**{**settings, **lora}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.normal_(std=0.03)
    peft.save_pretrained(folder)
    return folder


class InProcessSampler:
    """The comparison with PEFT without a process of its own, whose start takes seconds."""

    def __init__(self, plan: MergePlan, nf4: Any) -> None:
        self.picked, self.nf4 = sample.picked(plan), nf4
        self.tensors: list[dict[str, Any]] = []

    def ask(self, shard: Path) -> None:
        """As `Sampler.ask`, but it waits."""
        written = {info.name: info for info in read_header(shard).tensors}
        for place, output in self.picked.get(shard.name, []):
            wanted = sample.request(output, written[output.name], place, self.nf4)
            self.tensors.append(sample.compare(wanted))

    def answers(self) -> dict[str, Any]:
        """As `Sampler.answers`."""
        equal = sum(t["bit_equal"] for t in self.tensors)
        return {"checked": len(self.tensors), "bit_equal": equal, "tensors": self.tensors}

    def close(self) -> None:
        """Nothing to end."""
