"""One optimizer step of QLoRA: ours beside stock transformers with PEFT, and Unsloth, on one GPU.

    python bench/bench_train.py [--quick] [--shape qwen2-7b] [--peers ours,stock,unsloth]

Every peer trains in a process of its own on the same random weights: rank 64 on q, k, v and o,
2 rows of 2,048 tokens, three tokens of four supervised; processes load side by side and then take
turns, and each has a time limit of its own. `stock` is what the usual recipe does
(`prepare_model_for_kbit_training`, paged 8-bit AdamW); Unsloth compiles what it compiles by
default before its first step, and is left out, and said so, where it is not installed. `--quick`
takes the `tiny` shape, on a CPU too, to show that the script works, and writes nothing. The last
line is one JSON object;
`ratio` is our seconds a step over the fastest peer's with the same base.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).with_name("results") / "train.json"
SCRIPT = ROOT / "tests" / "gpu" / "train_step.py"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
SETTINGS = {
    "nf4": {"method": "qlora", "checkpointing": "true"},
    "nf4-offload": {"method": "qlora", "checkpointing": "offload"},
    "nf4-kept": {"method": "qlora", "checkpointing": "false"},
    "bf16-kept": {"method": "lora", "checkpointing": "false"},
}
# Unsloth's own checkpointing holds checkpoints in host memory.
RUNS = {
    "ours": ("nf4", "nf4-offload", "nf4-kept", "bf16-kept"),
    "stock": ("nf4", "bf16-kept"),
    "unsloth": ("nf4-offload", "nf4-kept", "bf16-kept"),
}
RANK, BATCH, LENGTH, STEPS = 64, 2, 2048, 12


def main() -> None:
    """Run the peers and compare, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shape", default="qwen2-7b")
    parser.add_argument("--peers", default="ours,stock,unsloth")
    parser.add_argument("--folder", type=Path, help="keep weights here, and use those there")
    parser.add_argument("--unsloth-path", default="", help="PYTHONPATH of Unsloth's packages")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for a group of peers")
    parser.add_argument("--at-once", type=int, default=5, help="models on the card at once")
    parser.add_argument(
        "--be", nargs=3, metavar=("PEER", "SETTING", "BASE"), help=argparse.SUPPRESS
    )
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, default=1, help=argparse.SUPPRESS)  # itself included
    options = parser.parse_args()
    if options.be:
        peer, setting, base = options.be
        print(json.dumps(_peer_step(peer, setting, Path(base), options)))
        return
    if options.quick:
        options.shape = "tiny"
    results = _all(options)
    print(f"{'peer':<10}{'setting':<14}{'GiB reserved':>14}{'s a step':>10}")
    for found in results:
        gib = (found.get("peak_reserved_bytes") or 0) / 2**30
        step = found.get("seconds_per_step") or 0
        error = found.get("error", "")
        print(f"{found['peer']:<10}{found['setting']:<14}{gib:>14.2f}{step:>10.3f}  {error}")
    result = {
        "bench": "train",
        "command": f"python bench/bench_train.py --shape {options.shape} --peers {options.peers}",
        "shape": options.shape,
        **_ratio(results),
        "runs": results,
    }
    if not options.quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}))


def _ratio(results: list[dict[str, Any]]) -> dict[str, Any]:
    def seconds(peer: bool, kind: str) -> float | None:
        found = [
            r["seconds_per_step"]
            for r in results
            if (r["peer"] != "ours") == peer and r["setting"].startswith(kind) and "error" not in r
        ]
        return min(found) if found else None

    pairs = {kind: (seconds(False, kind), seconds(True, kind)) for kind in ("nf4", "bf16")}
    return {
        "ratio": {k: round(a / b, 3) if a and b else None for k, (a, b) in pairs.items()},
        "seconds_per_step": {k: {"ours": a, "fastest_peer": b} for k, (a, b) in pairs.items()},
    }


def _all(options: argparse.Namespace) -> list[dict[str, Any]]:
    place = options.folder or Path(tempfile.mkdtemp())
    base = place / f"base-{options.shape}"
    _run(
        [
            sys.executable,
            str(SCRIPT),
            "--shape",
            options.shape,
            "--folder",
            str(place),
            "--make-only",
        ]
    )
    runs = [(peer, setting) for peer in options.peers.split(",") for setting in RUNS[peer]]
    results = []
    for begin in range(0, len(runs), options.at_once):
        results += _group(options, runs[begin : begin + options.at_once], base, place)
    return results


def _group(
    options: argparse.Namespace, group: list[tuple[str, str]], base: Path, place: Path
) -> list[dict[str, Any]]:
    """Peers that load side by side and take turns."""
    turn = [
        *("--turn", str(options.turn or tempfile.mkdtemp())),
        *("--of", str(len(group) - 1 + options.of)),
    ]
    until = time.monotonic() + options.limit
    started = []
    for peer, setting in group:
        command = [sys.executable, __file__, "--be", peer, setting, str(base), *turn]
        if peer == "ours":
            command = [sys.executable, str(SCRIPT), *_ours(options, setting, place), *turn]
        elif options.quick:
            command.append("--quick")
        # Into files: a child that waits for its turn must not wait for a reader as well.
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        environment = _environment(options, peer, place)
        child = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        started.append((peer, setting, child, out, err))
    results = []
    for peer, setting, child, out, err in started:
        found: dict[str, Any] = {"peer": peer, "setting": setting}
        try:
            child.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            found["error"] = f"not done after {options.limit:.0f} s"
        said, errors = (file.seek(0) or file.read() for file in (out, err))
        try:
            found |= json.loads(said.strip().splitlines()[-1])
        except (ValueError, IndexError):
            last = (errors.strip().splitlines() or ["nothing was printed"])[-1]
            found.setdefault("error", last[:300])
            sys.stderr.write(f"== {peer} {setting}\n{errors[-3000:]}\n")
        results.append(found)
        print(json.dumps(found), flush=True)
    return results


def _environment(options: argparse.Namespace, peer: str, place: Path) -> dict[str, str]:
    """A peer's; what it compiles is kept for the next process, beside the weights."""
    environment = dict(os.environ)
    if peer == "unsloth":
        cache = place / "compiled"
        environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "UNSLOTH_COMPILE_LOCATION": str(cache / "unsloth"),
            "UNSLOTH_DISABLE_STATISTICS": "1",
        }
        if options.unsloth_path:
            environment["PYTHONPATH"] = options.unsloth_path
    return environment


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _ours(options: argparse.Namespace, setting: str, place: Path) -> list[str]:
    chosen = SETTINGS[setting]
    sizes = ["--rank", "8", "--length", "64", "--steps", "3"] if options.quick else []
    return [
        *("--shape", options.shape, "--folder", str(place), "--targets", ",".join(TARGETS)),
        *("--method", chosen["method"], "--checkpointing", chosen["checkpointing"]),
        *("--rank", str(RANK), "--micro-batch", str(BATCH), "--length", str(LENGTH)),
        *("--steps", str(STEPS), *sizes),
    ]


def _peer_step(peer: str, setting: str, base: Path, options: argparse.Namespace) -> dict[str, Any]:
    if peer == "unsloth" and importlib.util.find_spec("unsloth") is None:
        raise SystemExit("Unsloth is not installed")
    load = {"stock": _load_stock, "unsloth": _load_unsloth}[peer]
    model = load(setting, base, options)
    import torch

    if options.turn:
        sys.path.insert(0, str(SCRIPT.parent))
        from train_step import _wait_for_turn

        _wait_for_turn(options.turn, options.of)
    cuda = torch.cuda.is_available()
    trained = [p for p in model.parameters() if p.requires_grad]
    if cuda:
        import bitsandbytes

        optimizer: Any = bitsandbytes.optim.PagedAdamW8bit(trained, lr=2e-4)
    else:
        optimizer = torch.optim.AdamW(trained, lr=2e-4)
    device = next(model.parameters()).device
    length = 64 if options.quick else LENGTH
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, model.config.vocab_size, (BATCH, length), generator=generator).to(device)
    labels = ids.clone()
    labels[:, : length // 4] = -100
    model.train()
    seconds, losses = [], []
    for _ in range(4 if options.quick else STEPS):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    found = {
        "seconds_per_step": round(statistics.median(seconds[2:]), 4),
        "first_step_seconds": round(seconds[0], 2),
        "losses": losses,
        "versions": _versions(peer),
    }
    if cuda:
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def _versions(peer: str) -> dict[str, str]:
    from importlib.metadata import version

    names = ["torch", "transformers", "peft", "bitsandbytes"]
    return {name: version(name) for name in names + ["unsloth"] * (peer == "unsloth")}


def _load_stock(setting: str, base: Path, options: argparse.Namespace) -> Any:
    sys.modules.setdefault("gptqmodel", None)  # type: ignore[arg-type]
    import peft
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = SETTINGS[setting]["method"] == "qlora"
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.bfloat16,
        device_map={"": device},
        **({"quantization_config": nf4} if quantized else {}),
    )
    checkpointing = SETTINGS[setting]["checkpointing"] != "false"
    if quantized:
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    return peft.get_peft_model(
        model,
        peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )


def _load_unsloth(setting: str, base: Path, options: argparse.Namespace) -> Any:
    import unsloth  # isort: skip  (first: it patches the others)
    import torch

    quantized = SETTINGS[setting]["method"] == "qlora"
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        str(base), max_seq_length=LENGTH, dtype=torch.bfloat16, load_in_4bit=quantized
    )
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=0,
        target_modules=TARGETS,
        bias="none",
        use_gradient_checkpointing="unsloth" if "offload" in setting else False,
    )


if __name__ == "__main__":
    main()
