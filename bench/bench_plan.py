"""How well the plan's training peak agrees with measured ones. Its last line is one JSON object.

    python bench/bench_plan.py [--quick] [--measurements FOLDER]

The measurements are one optimizer step each of Qwen2-7B's shape on one H200 (`peak_reserved` of
torch's allocator, in GiB). Compared are those of the code path that the plan describes: a fused
head and no float32 copies. The two constants that were fitted (`edge_tensors`, `slack_blocks`) were
chosen on the points with checkpointing; those without are the held-out ones. All points are of one
architecture.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tuneserve.plan.arch import Arch, arch_from_config
from tuneserve.plan.memory import Step, train_peak

GIB = 2**30
FILE = "h200_qlora_step.json"
RESULT = Path(__file__).with_name("results") / "plan.json"

# Of the measurements' README: 28 layers, hidden 3584, vocabulary 152,064.
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}


def predicted(arch: Arch, row: dict[str, Any]) -> tuple[float, float]:
    """Allocated and reserved GiB of one measured setting; the CUDA context is no part of either."""
    attention = [linear for linear in arch.linears if linear.in_attention]
    step = Step(
        micro_batch=row["b"],
        length=row["s"],
        targets=tuple(attention) if row["targets"] == 4 else arch.linears,
        rank=row["r"],
        quantized=row["kind"] != "bf16",
        double_quant=row["kind"].endswith("-dq"),
        checkpointing=bool(row["gc"]),
        optimizer="paged_adamw_8bit",
        kernels="liger",
        compiled="compile" in row["peer"],
        adapter_element_bytes=4 if row["lora_dtype"] == "torch.float32" else 2,
    )
    parts = dict(train_peak(arch, step).components)
    del parts["CUDA context"]
    slack = parts.pop("allocator slack")
    allocated = sum(parts.values())
    return allocated / GIB, (allocated + slack) / GIB


def errors(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Mean and worst absolute relative error of (predicted, measured)."""
    relative = [abs(found / measured - 1) for found, measured in pairs]
    if not relative:
        return {"mape": None, "worst": None, "points": 0}
    mean = sum(relative) / len(relative)
    return {"mape": round(mean, 4), "worst": round(max(relative), 4), "points": len(relative)}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same, but write no result")
    parser.add_argument("--measurements", type=Path, help=f"folder with {FILE}")
    options = parser.parse_args()
    folder = options.measurements or Path(
        os.environ.get("TUNESERVE_MEASUREMENTS")
        or Path(__file__).resolve().parents[2] / "shared" / "measurements"
    )
    path = folder / FILE
    if not path.is_file():
        print(f"{path} is not there; give --measurements or set TUNESERVE_MEASUREMENTS")
        print(json.dumps({"bench": "plan", "skipped": f"no {FILE}", **errors([])}))
        return
    rows = json.loads(path.read_text(encoding="utf-8"))
    arch = arch_from_config(QWEN2_7B)
    fitted: list[tuple[float, float]] = []
    held_out: list[tuple[float, float]] = []
    allocated: list[tuple[float, float]] = []
    points: list[dict[str, Any]] = []
    print(f"{'base':<8}{'step':<28}{'r':>4} {'checkpoints':<12}{'predicted':>10}{'measured':>10}")
    for row in rows:
        if "liger" not in row["peer"]:
            continue
        alloc, reserved = predicted(arch, row)
        (fitted if row["gc"] else held_out).append((reserved, row["peak_reserved"]))
        allocated.append((alloc, row["peak_alloc"]))
        error = reserved / row["peak_reserved"] - 1
        setting = {name: row[name] for name in ("kind", "peer", "b", "s", "r", "targets", "gc")}
        points.append(
            {**setting, "predicted": round(reserved, 3), "measured": round(row["peak_reserved"], 3)}
        )
        print(
            f"{row['kind']:<8}{row['peer']:<28}{row['r']:>4} {'yes' if row['gc'] else 'no':<12}"
            f"{reserved:>10.2f}{row['peak_reserved']:>10.2f} GiB {error:+.1%}"
        )
    result = {
        "bench": "plan",
        **errors(fitted + held_out),
        "held_out": errors(held_out),
        "allocated": errors(allocated),
        "not_compared": sum("liger" not in row["peer"] for row in rows),
    }
    if not options.quick:
        RESULT.parent.mkdir(exist_ok=True)
        about = {"machine": "one NVIDIA H200", "measured": FILE, "points_gib": points}
        RESULT.write_text(json.dumps({**result, **about}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
