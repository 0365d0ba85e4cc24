"""Makes every export that `test_quantize_export.py` looks at, in one process."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tuneserve.config import QuantizeSection
from tuneserve.errors import TuneserveError
from tuneserve.quantize import quantize_model

SECTION = QuantizeSection(
    group_size=32, calibration_rows=32, calibration_max_tokens=64, min_calibration_tokens=200
)


def main(root: Path) -> None:
    account: dict[str, Any] = {}

    def keep(name: str, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except TuneserveError as error:
            account[name] = error.to_json()
        else:
            account[name] = result if isinstance(result, dict) else result.to_json()

    def export(name: str, method: str = "gptq", model: str = "model") -> Callable[[], Any]:
        return lambda: quantize_model(root / model, method, root / "dataset", root / name, SECTION)

    with mock.patch("os.cpu_count", return_value=2):  # GPTQModel would make one worker of them
        keep("gptq", export("gptq"))
    account["workers"] = os.environ["GPTQMODEL_CPU_WORKERS"]
    keep("awq", export("awq", "awq"))
    for method in ("gptq", "awq"):
        keep("again", export(f"elsewhere/{method}", method))
    changed_models(root)
    keep("dead", export("dead", model="model_dead"))
    keep("dead_awq", export("dead_awq", "awq", model="model_dead"))
    keep("nan", export("nan", model="model_nan"))
    (root / "exists").mkdir()
    (root / "exists" / "mine").write_text("mine")
    keep("exists", export("exists"))
    broken(keep, export)
    out_of_memory(keep, export)
    spoiled(root, keep)
    keep("stage", lambda: as_stage(root))
    keep("references", lambda: references(root))
    (root / "account.json").write_text(json.dumps(account))


def changed_models(root: Path) -> None:
    """A model with a dead input channel, and one with a single NaN."""
    from safetensors.torch import load_file, save_file

    for name in ("model_dead", "model_nan"):
        shutil.copytree(root / "model", root / name)
        path = root / name / "model.safetensors"
        tensors = load_file(path)
        if name == "model_dead":
            tensors["model.layers.0.input_layernorm.weight"][5] = 0
        else:
            tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
        save_file(tensors, path, metadata={"format": "pt"})


def broken(keep: Any, export: Any) -> None:
    """GPTQModel fails deep inside the second layer, in its own ways."""
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.quantization.gptq import GPTQ

    quantize, apply = GPTQ.quantize, AWQProcessor.apply_quant

    def gptq(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "layers.1.mlp.down_proj" in str(getattr(self, "name", "")) or (
            calls.append(1) or len(calls) == 14
        ):
            raise RuntimeError("linalg.cholesky: not positive-definite")
        return quantize(self, *args, **kwargs)

    def awq(self: Any, named: Any, *args: Any, **kwargs: Any) -> Any:
        if any(module.layer_index == 1 for module in named.values()):
            raise AssertionError
        return apply(self, named, *args, **kwargs)

    calls: list[int] = []
    with mock.patch.object(GPTQ, "quantize", gptq):
        keep("broken_gptq", export("broken_gptq"))
    with mock.patch.object(AWQProcessor, "apply_quant", awq):
        keep("broken_awq", export("broken_awq", "awq"))


def out_of_memory(keep: Any, export: Any) -> None:
    """The forward pass runs out of memory above two rows at a time, then always."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def limited(most: int) -> Any:
        def run(self: Any, x: Any) -> Any:
            if x.shape[0] > most:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return forward(self, x)

        return run

    with mock.patch.object(LlamaMLP, "forward", limited(2)):
        keep("smaller", export("smaller"))
    with mock.patch.object(LlamaMLP, "forward", limited(0)):
        keep("memory", export("memory"))


def spoiled(root: Path, keep: Any) -> None:
    """Exports whose weights are wrong although every name and shape is right."""
    from safetensors.torch import load_file, save_file

    from tuneserve.quantize.smoke import smoke_test

    def smoke(name: str, method: str) -> Callable[[], Any]:
        return lambda: smoke_test(
            root / "model", root / name, root / "dataset", method=method, group_size=32
        )

    for method in ("gptq", "awq"):
        name = f"lost_{method}"
        shutil.copytree(root / method, root / name)
        tensors = load_file(root / name / "model.safetensors")
        for key in tensors:
            if key.endswith("qzeros"):
                tensors[key].zero_()
        save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
        keep(name, smoke(name, method))
    # Beside the embedding nothing that the layers add counts: each token is followed by itself.
    shutil.copytree(root / "gptq", root / "looping")
    tensors = load_file(root / "looping" / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 1e6
    save_file(tensors, root / "looping" / "model.safetensors", metadata={"format": "pt"})
    with mock.patch("tuneserve.quantize.smoke.MAX_LOSS_INCREASE", 1e9):
        keep("looping", smoke("looping", "gptq"))
    # The 16-bit model itself computes what is not finite.
    shutil.copytree(root / "model", root / "infinite")
    tensors = load_file(root / "infinite" / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("inf"))
    save_file(tensors, root / "infinite" / "model.safetensors", metadata={"format": "pt"})
    keep(
        "infinite",
        lambda: smoke_test(
            root / "infinite", root / "gptq", root / "dataset", method="gptq", group_size=32
        ),
    )
    # Large hidden states; and hidden states as they were, with a large input of each down_proj.
    scaled = {"overflow": {"embed_tokens.weight": 1e6}}
    scaled["overflow_inside"] = {"up_proj.scales": 2e4, "down_proj.scales": 1 / 2e4}
    for name, key, dtype in (
        ("overflow", "dtype", "float16"),
        ("overflow_inside", "dtype", "float16"),
        ("overflow_old", "torch_dtype", "float16"),
        ("overflow_none", "dtype", "bfloat16"),
    ):
        shutil.copytree(root / "gptq", root / name)
        config = json.loads((root / name / "config.json").read_text())
        config.pop("dtype")
        (root / name / "config.json").write_text(json.dumps({**config, key: dtype}))
        tensors = load_file(root / name / "model.safetensors")
        for ending, factor in scaled.get(name, scaled["overflow"]).items():
            for tensor in [n for n in tensors if n.endswith(ending)]:
                tensors[tensor] *= factor
        save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
        with (
            mock.patch("tuneserve.quantize.smoke.MAX_LOSS_INCREASE", 1e9),
            mock.patch("tuneserve.quantize.smoke._looping", return_value=0),
        ):
            keep(name, smoke(name, "gptq"))


def as_stage(root: Path) -> dict[str, Any]:
    """The same export as a stage of a run fills its artifact folder."""
    from tuneserve.artifacts import Artifact
    from tuneserve.config import RunFile
    from tuneserve.quantize import stage
    from tuneserve.stages import StageContext

    run = RunFile.model_validate(
        {
            "name": "demo",
            "model": {"base": "somewhere"},
            "data": {"train": ["chats.jsonl"]},
            "quantize": SECTION.model_dump(),
        }
    )
    for folder in ("stage", "stage_work"):
        (root / folder).mkdir()
    inputs = {
        "merged": Artifact("merged-1", root / "model", {}),
        "dataset": Artifact("dataset-1", root / "dataset", {}),
    }
    return stage.run(
        StageContext(
            run, None, inputs, root / "stage", root / "stage_work", settings={"method": "gptq"}
        )
    )


def references(root: Path) -> dict[str, Any]:
    """Log probabilities of held-out tokens by transformers, on weights taken apart by us."""
    import pyarrow.parquet
    import torch
    from transformers import AutoModelForCausalLM

    from tuneserve.quantize.smoke import load_dequantized

    rows = pyarrow.parquet.read_table(root / "dataset" / "eval.parquet")["input_ids"].to_pylist()
    rows = rows[:6]
    found: dict[str, Any] = {"rows": rows}
    for method in ("gptq", "awq"):
        model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        with torch.inference_mode():
            load_dequantized(model, root / method, root / "model", method, 32)
            found[method] = [
                model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
                .gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
                for row in rows
            ]  # fmt: skip
    return found


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    main(Path(sys.argv[1]))
