"""Exports a tiny model of each family named, in one process; see `test_quantize_families.py`."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from model_families import family_config
from tuneserve.config import QuantizeSection
from tuneserve.errors import TuneserveError
from tuneserve.quantize import quantize_model

SECTION = QuantizeSection(
    group_size=32, calibration_rows=16, calibration_max_tokens=64, min_calibration_tokens=200
)


def main(root: Path, families: list[str]) -> None:
    account: dict[str, dict[str, Any]] = {}
    for family in families:
        model = root / family / "model"
        write_model(family, root / "tokenizer", model)
        account[family] = {}
        for method in ("gptq", "awq"):
            try:
                made = quantize_model(
                    model, method, root / "dataset", root / family / method, SECTION
                )
            except TuneserveError as error:
                account[family][method] = error.message
            else:
                account[family][method] = made.smoke
    (root / "account.json").write_text(json.dumps(account))


def write_model(family: str, tokenizer: Path, folder: Path) -> None:
    """Random weights, and the pico model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in tokenizer.iterdir():
        shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    main(Path(sys.argv[1]), sys.argv[2:])
