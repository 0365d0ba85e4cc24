"""The built-in model as really converted, and generation configs as transformers judges them."""

from __future__ import annotations

import json
import subprocess
import sys

from tuneserve.checkpoint.base import BUILTIN, BUILTIN_CONFIG, resolve_base
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.config import ModelSection

# Asked of transformers itself, in its own process.
JUDGE = """
import json, sys
from transformers import GenerationConfig
from tuneserve.checkpoint.generation import valid_generation_config
for given in json.loads(sys.argv[1]):
    try:
        GenerationConfig(**given).validate(strict=True)
    except ValueError:
        pass
    else:
        raise SystemExit(f"{given} was fine")
    mended, changes = valid_generation_config(given)
    GenerationConfig(**mended).validate(strict=True)
    assert changes
"""
BAD = [
    {"do_sample": False, "temperature": 0.9},
    {"do_sample": False, "top_p": 0.6, "temperature": 0.9},
    {"do_sample": False, "temperature": 0.0},
    {"top_k": 20, "min_p": 0.1},
    {"typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1},
    {"early_stopping": True, "num_beams": 1},
    {"length_penalty": 2.0},
    {"pad_token_id": -1},
    {"num_beams": 4, "temperature": 0.0},
    {"num_beams": 4, "do_sample": True, "temperature": 0.7, "num_return_sequences": 5},
]


def test_transformers_refuses_the_bad_and_takes_the_mended() -> None:
    command = [sys.executable, "-c", JUDGE, json.dumps(BAD)]
    subprocess.run(command, check=True, timeout=300)


def test_builtin_model() -> None:
    """Converted once on a machine (a minute), then found; its checksum is checked each time."""
    folder = resolve_base(ModelSection(base=BUILTIN))
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in BUILTIN_CONFIG} == BUILTIN_CONFIG
    tensors = Checkpoint.open(folder).tensors
    assert sum(info.numel for info in tensors.values()) == 134515008
    assert {info.dtype for info in tensors.values()} == {"BF16"}
    assert "lm_head.weight" not in tensors  # tied
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").is_file()
